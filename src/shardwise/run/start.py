"""``shardwise.start``: entry point for a custom training loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from shardwise.distributed.process_group import Ranks, join, leave_at_exit
from shardwise.environment import visible_devices
from shardwise.errors import PlanError
from shardwise.hardware.cluster import detect
from shardwise.measure.step_time.attribution import Attribution
from shardwise.model.read import read_model
from shardwise.parallel.apply import parameter_names
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.parallel_options import ParallelOptions, without_effect
from shardwise.plan.plan import Plan, Recompute, RunPrecision, plan_problems, read_plan, runnable
from shardwise.plan.strategy import alias_note, runnable_strategy
from shardwise.run.out_of_memory import ForeseenLoop, OutOfMemoryRecorder, explain_at_exit
from shardwise.search.choose import choose
from shardwise.train.optimizer import workload_of
from shardwise.train.session import Planner, Session


def start(
    plan: str | Plan | Path = "auto",
    *,
    grad_accum: int = 1,
    precision: RunPrecision = "fp32",
    recompute: Recompute = "none",
    lora: AdapterOptions | None = None,
    options: Mapping[str, Any] | None = None,
    device: str = "auto",
    receipts: bool = True,
    output: str | Path | None = None,
) -> Session:
    """Join the other ranks, or run alone, and return a `Session`.

    Works in a notebook, in a plain script, under ``torchrun`` and inside an existing process group; what it
    creates is destroyed when the process ends or at ``session.close()``.

    Args:
        plan: a strategy (``"auto"``, ``"fsdp"``, ...), a `Plan`, or the path of a plan file.
        grad_accum: micro batches per optimizer step on one rank; this and the next two are the plan's if one is given.
        precision: compute dtype; weights, gradients and their reduction stay fp32.
        recompute: activation checkpointing of the repeated blocks.
        lora: the adapters of a strategy with ``+lora`` or ``+qlora``; default: rank 16 on all linear layers
            of the blocks. A plan has its own.
        options: options of a named strategy by the names of `ParallelOptions`, such as ``compile`` and ``prefetch``,
            or DDP's ``static_graph``. A plan has its own.
        device: ``cpu``, ``cuda``, or ``auto``.
        receipts: check effects after the second step, and print the result on rank 0; also check during the run
            that replicas do not drift apart.
        output: folder for ``metrics.jsonl`` and the report that `Session.report` writes; default: none.

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
    chosen = _checked_options(options, plan)
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
    _observe(session, receipts=receipts, output=output)
    leave_at_exit(ranks)  # and not the session, which would keep the model alive
    return session


def _observe(session: Session, *, receipts: bool, output: str | Path | None) -> None:
    """Attach what measures and checks a session."""
    session.timekeeper = attribution = Attribution.attach(session)
    explain_at_exit(OutOfMemoryRecorder(session, ForeseenLoop()))
    effects = None
    if receipts:
        from shardwise.receipts.drift import DriftRecorder
        from shardwise.receipts.effects import EffectsRecorder
        from shardwise.report.terminal import print_receipt

        effects = EffectsRecorder(on_receipt=print_receipt)
        session.observers.append(effects)
        DriftRecorder.attach(session)
    if output is not None:
        from shardwise.run.loop_recorder import LoopRecorder

        recorder = LoopRecorder(Path(output), attribution, effects)
        session.observers.append(recorder)
        session.reporter = recorder.conclude


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


def _fixed(plan: Plan) -> Planner:
    def planner(model: nn.Module, optimizer: Optimizer) -> Plan:
        return plan

    return planner


def _searching(strategy: str, draft: Plan, ranks: Ranks) -> Planner:
    def planner(model: nn.Module, optimizer: Optimizer) -> Plan:
        cluster = detect(draft.device, ranks.local_world_size, visible=visible_devices()).model_copy(
            update={"nodes": max(1, ranks.world_size // ranks.local_world_size)}
        )
        workload = workload_of(optimizer, parameter_names(model))
        return runnable(choose(draft, read_model(model), workload, cluster, strategy=strategy).plan)

    return planner
