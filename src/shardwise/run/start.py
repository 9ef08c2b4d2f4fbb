"""``shardwise.start``: entry point for a custom training loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardwise.distributed.process_group import Ranks, join, leave_at_exit, prepared_by_main
from shardwise.environment import record_collectives, visible_devices
from shardwise.errors import ModelError, PlanError, did_you_mean
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.measure.step_time.attribution import Attribution
from shardwise.model.profile import ModelProfile
from shardwise.model.read import read_model
from shardwise.model.trace import trace_module
from shardwise.parallel.apply import parameter_names
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.parallel_options import ParallelOptions, without_effect
from shardwise.plan.plan import (
    Plan,
    Recompute,
    RunPrecision,
    plan_problems,
    read_plan,
    runnable,
    type_problems,
    unrun_types,
)
from shardwise.plan.strategy import alias_note, runnable_strategy
from shardwise.plan.tensor_types import BARE_STRATEGIES, TYPE_FIELDS
from shardwise.plan.workload import Workload
from shardwise.run.out_of_memory import ForeseenLoop, OutOfMemoryRecorder, explain_at_exit
from shardwise.search.candidate import Pins
from shardwise.search.choose import choose, choose_profiled
from shardwise.train.optimizer import workload_of
from shardwise.train.run_files import RunFile
from shardwise.train.session import Planner, Session


def start(
    plan: str | Plan | Path = "auto",
    *,
    grad_accum: int = 1,
    precision: RunPrecision = "fp32",
    recompute: Recompute = "none",
    types: Mapping[str, Any] | None = None,
    lora: AdapterOptions | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "auto",
    receipts: bool = True,
    output: str | Path | None = None,
    watch: bool = False,
) -> Session:
    """Join the other ranks, or run alone, and return a `Session`.

    Works in a notebook, in a plain script, under ``torchrun`` and inside an existing process group; what it
    creates is destroyed when the process ends or at ``session.close()``.

    Args:
        plan: a strategy (``"fsdp"``, ...), a `Plan`, the path of a plan file, or ``"auto"``: the planner's choice among
            strategies that any loop runs, for batches like the sample that ``session.prepare`` gets.
        grad_accum: micro batches per optimizer step on one rank; this and the next two are the plan's if one is given.
        precision: compute dtype; weights, gradients and their reduction stay fp32 without ``types``.
        recompute: activation checkpointing of the repeated blocks.
        types: of a named strategy under bf16: ``weights`` (``fp32``, ``compute``, ``masters``), ``accumulate`` and
            ``reduce`` (``fp32``, ``compute``), ``rounding`` (``nearest``, ``stochastic``, ``kahan``), ``fp8``
            (``tensorwise``, ``rowwise``) and ``fp8_emulate`` (True where no device has fp8). A plan has its own.
        lora: the adapters of a strategy with ``+lora`` or ``+qlora``; default: rank 16 on all linear layers
            of the blocks. A plan has its own.
        options: options of a named strategy by the names of `ParallelOptions`, such as ``compile`` and ``prefetch``,
            or DDP's ``static_graph``. A plan has its own.
        device: ``cpu``, ``cuda``, or ``auto``.
        receipts: check effects after the second step, and print the result on rank 0; also check during the run
            that replicas do not drift apart, and that no parameter loses its gradient.
        output: folder for ``metrics.jsonl`` and the report that `Session.report` writes; default: none.
        watch: name the rank that the others wait for, and end ranks that cannot go on with exit code 3, by a process
            beside them (Linux); it needs torch's flight recorder, which is on if no process group exists yet.

    Raises:
        PlanError: the strategy or the plan is impossible.
    """
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith((".toml", ".json"))):
        plan = runnable(read_plan(Path(plan)))
    adapter = "none"
    if isinstance(plan, str) and plan != "auto":
        adapter = runnable_strategy(plan).adapter
    if isinstance(plan, str) and lora is not None and adapter == "none":
        raise PlanError(f"start('{plan}', lora=...): name a strategy with +lora or +qlora, such as 'fsdp+lora'")
    chosen = _checked_options(options, plan) | _checked_types(types, plan, precision)
    if isinstance(plan, Plan):
        runnable(plan)
        given = {"grad_accum": (grad_accum, 1), "precision": (precision, "fp32"), "recompute": (recompute, "none")}
        wrong = [
            f"start(..., {key}={value!r}) conflicts with the plan, which has {getattr(plan, key)}; change it there"
            for key, (value, default) in given.items()
            if value not in (default, getattr(plan, key))
        ]
        if lora is not None:
            wrong.append("start(..., lora=...) is beside a plan; give the plan adapter=AdapterOptions(...)")
        if wrong:
            raise PlanError(*wrong)
    if watch:
        record_collectives()
    ranks = join(device)
    if ranks.is_main and isinstance(plan, str) and (note := alias_note(plan)) is not None:
        logging.getLogger("shardwise").warning(note)
    if isinstance(plan, Plan):
        planner = _fixed(plan)
    else:
        draft = Plan(
            grad_accum=grad_accum,
            precision=precision,
            recompute=recompute,
            adapter=None if adapter == "none" else lora or AdapterOptions(),
            device="cuda" if ranks.device.type == "cuda" else "cpu",
            **chosen,
        )
        planner = _searching(plan, draft, ranks)
    session = Session(ranks=ranks, planner=planner)
    attribution = _observe(session, receipts=receipts, output=output)
    if watch:
        from shardwise.watch.rank_watch import RankWatch

        beside = RankWatch(session, Path(output or "."), beside=True)
        beside.judge_speed(attribution, logging.getLogger("shardwise").warning)
    leave_at_exit(ranks)  # and not the session, which would keep the model alive
    return session


def _observe(session: Session, *, receipts: bool, output: str | Path | None) -> Attribution:
    """Attach what measures and checks a session; return what measures its time."""
    session.timekeeper = attribution = Attribution.attach(session)
    explain_at_exit(OutOfMemoryRecorder(session, ForeseenLoop()))
    effects = lost = None
    if receipts:
        from shardwise.receipts.changed_types import DtypeRecorder
        from shardwise.receipts.drift import DriftRecorder
        from shardwise.receipts.effects import EffectsRecorder
        from shardwise.receipts.lost_gradients import LostGradients
        from shardwise.report.terminal import print_receipt

        effects = EffectsRecorder(on_receipt=print_receipt)
        session.observers.append(effects)
        DriftRecorder.attach(session)
        lost = LostGradients.attach(session)
        DtypeRecorder.attach(session)
    if output is not None:
        from shardwise.run.loop_recorder import LoopRecorder

        recorder = LoopRecorder(Path(output), attribution, effects, lost)
        session.observers.append(recorder)
        session.reporter = recorder.conclude
        session.nonfinite_file = Path(output) / RunFile.NONFINITE
    return attribution


def _checked_options(options: Mapping[str, Any] | None, plan: str | Plan | Path) -> dict[str, Any]:
    """Return the options of a named strategy.

    Raises:
        PlanError: one does not exist, has a wrong value or no effect; all problems at once.
    """
    if not options:
        return {}
    if not isinstance(plan, str) or plan == "auto":
        raise PlanError(
            "start(..., options=...) belongs to a named strategy, such as start('ddp', options=...); a plan has its "
            "own, and 'auto' may choose a strategy that they do not suit"
        )
    try:
        found = ParallelOptions.model_validate(dict(options))
    except ValidationError as error:
        raise PlanError(*(f"start(..., options=...): {line}" for line in plan_problems(error))) from None
    strategy = runnable_strategy(plan)
    if problems := without_effect(options, strategy):
        raise PlanError(*(f"start('{plan}', options=...): {problem}" for problem in problems))
    return {name: value for name, value in found.options_for(strategy).items() if name in options}


def _checked_types(types: Mapping[str, Any] | None, plan: str | Plan | Path, precision: RunPrecision) -> dict[str, Any]:
    """Return the types of a named strategy.

    Raises:
        PlanError: one does not exist, has a wrong value, or is not run under the strategy; all problems at once.
    """
    if not types:
        return {}
    if not isinstance(plan, str) or plan == "auto":
        raise PlanError(
            f"start(..., types=...) belongs to a named strategy: {', '.join(BARE_STRATEGIES)}; a plan has its own"
        )
    known = (*TYPE_FIELDS, "fp8_emulate")
    wrong = [f"'{key}' is none of {', '.join(known)}{did_you_mean(key, known)}" for key in types if key not in known]
    try:
        given = {key: value for key, value in types.items() if key in known}
        made = Plan.model_validate({"strategy": plan, "precision": precision, **given})
        wrong += type_problems(made) or unrun_types(made)
    except ValidationError as error:
        wrong += plan_problems(error)
    if wrong:
        raise PlanError(*(f"start('{plan}', types=...): {line}" for line in wrong))
    return dict(types)


def _fixed(plan: Plan) -> Planner:
    def planner(model: nn.Module, optimizer: Optimizer, sample: Any) -> Plan:
        return plan

    return planner


def _searching(strategy: str, draft: Plan, ranks: Ranks) -> Planner:
    def planner(model: nn.Module, optimizer: Optimizer, sample: Any) -> Plan:
        cluster = detect(draft.device, ranks.local_world_size, visible=visible_devices()).model_copy(
            update={"nodes": max(1, ranks.world_size // ranks.local_world_size)}
        )
        workload = workload_of(optimizer, parameter_names(model))
        if strategy != "auto":
            return runnable(choose(draft, read_model(model), workload, cluster, strategy=strategy).plan)

        def found() -> str:  # on one rank: the ranks' samples may differ in length
            return automatic(draft, model, workload, cluster, sample).to_json()

        return Plan.model_validate_json(prepared_by_main(found, ranks, "the plan"))

    return planner


def automatic(draft: Plan, model: nn.Module, workload: Workload, cluster: ClusterSpec, sample: Any) -> Plan:
    """Return the planner's choice for a custom loop: among strategies that any loop runs, for batches like ``sample``.

    Without a sample, or where the model does not run on fake tensors, the simplest whose known bytes fit.

    Raises:
        DoesNotFit: nothing fits.
    """
    spec = read_model(model)
    profile = None if sample is None else _profile(model, sample, draft)
    if profile is None:
        choice = choose(draft, spec, workload, cluster)
        known = "what a forward saves is unknown: give session.prepare(model, optimizer, sample) a micro batch"
        reason = choice.plan.reason if sample is not None else f"{choice.plan.reason}; {known}"
        return choice.plan.model_copy(update={"reason": reason})
    micro = next(len(leaf) for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    pins = Pins(
        micro_batch=micro,
        grad_accum=draft.grad_accum,
        recompute=draft.recompute,
        precision=draft.precision,
        whole_model=True,
    )
    batch = micro * draft.grad_accum * cluster.world_size
    asked = workload.model_copy(update={"seq_len": profile.seq_len, "global_batch": batch})
    plan = choose_profiled(profile, spec, asked, cluster, pins).plan
    return plan.model_copy(update={"micro_batch": None, "seq_len": None})  # the loader's own, which may differ


def _profile(model: nn.Module, sample: Any, draft: Plan) -> ModelProfile | None:
    width: Literal["fp32", "bf16"] = "fp32" if draft.precision == "fp32" else "bf16"
    try:
        return trace_module(model, inputs=sample, precision=width, device=draft.device, under_autocast=True)
    except ModelError:
        return None
