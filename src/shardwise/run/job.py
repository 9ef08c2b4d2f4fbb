"""`Job`: facts that all ranks of one run share, prepared once and read by each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from shardwise.cost.link_calibration import CalibrationFile
from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import ShardPlacement
from shardwise.cost.time.step_time import StepTime
from shardwise.environment import visible_devices
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.model.facts import ModelSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.parallel_options import CONFIG_KEYS
from shardwise.plan.plan import Plan, split_batch
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import sent_bytes
from shardwise.plan.workload import Workload
from shardwise.run.calibration import corrected_costs, read_links
from shardwise.run.checks import (
    adapter_of,
    check_engine,
    check_generated,
    check_isolated,
    check_model_path,
    check_options,
    check_output,
    check_packages,
    check_plan,
    check_samples,
)
from shardwise.run.inspect_model import described, look
from shardwise.search.alternatives import Alternative, alternatives, smaller
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.choose import Choice, choose, choose_profiled, exact
from shardwise.search.cost_inputs_of_plan import adapted, with_plan
from shardwise.search.problem import ask, default_precision, precision_text
from shardwise.search.search import cost_of, time_of
from shardwise.train.config import Config, optimizer_problems
from shardwise.train.tasks.registry import TaskData, example_inputs_of, length_of, prepare_data
from shardwise.train.trackers import check_trackers

if TYPE_CHECKING:
    pass


class Job(BaseModel):
    """Job of a run: config, plan, prepared corpus, and predicted memory and time.

    ``traffic`` is the predicted traffic of a device in a step, bytes by axis; ``alternatives`` are other possible
    plans, ``smaller`` those that need less memory; ``measured_links`` bytes/s that ``bench comm`` measured on an axis,
    and when (``None`` without a calibration, empty where it has no bandwidth); ``command`` are the words that started
    the run.
    """

    model_config = ConfigDict(frozen=True)

    config: Config
    plan: Plan
    corpus: Path
    estimate: Estimate
    step_time: StepTime | None = None
    as_json: bool = False
    cluster: ClusterSpec | None = None
    traffic: dict[str, float] = {}
    alternatives: tuple[Alternative, ...] = ()
    measured_links: dict[str, tuple[float, str]] | None = None
    smaller: tuple[Alternative, ...] = ()
    command: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Serialize for the ranks without unset keys, as a config reports given keys without effect."""
        return self.model_dump_json(by_alias=True, exclude_unset=True)


class PreparedJob(BaseModel):
    """Job with findings of its preparation to print. ``notes`` are about measured links."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    job: Job
    choice: Choice
    spec: ModelSpec
    cluster: ClusterSpec
    corpus: TaskData
    notes: tuple[str, ...] = ()


def prepare_job(
    config: Config,
    log: Callable[[str], None],
    *,
    plan: Plan | None = None,
    nodes: int = 1,
    cluster: ClusterSpec | None = None,
    as_json: bool = False,
    calibration: Path | None = None,
    command: Sequence[str] = (),
) -> PreparedJob:
    """Read the data, inspect machine and model, and choose the plan.

    Starts no rank, needs no GPU.

    ``cluster`` is where the run will be, by default ``nodes`` machines like this one.
    ``calibration`` is a file of ``bench comm``, for the predicted time; ``command`` are the words that started the run.

    Raises:
        UserError: any part of the config is impossible.
        DoesNotFit: no plan fits.
    """
    check_output(Path(config.train.output))
    check_trackers(config.train.trackers)
    if config.optimizer.factory is None:
        OPTIMIZERS[config.optimizer.name].require_package()
    if cluster is None:
        nproc = config.parallel.nproc or (plan.dims.world_size // nodes if plan else None)
        cluster = detect(config.parallel.device, nproc, visible=visible_devices()).model_copy(update={"nodes": nodes})
    check_plan(config, cluster, plan)
    links, notes = (None, []) if calibration is None else read_links(calibration, cluster, config.parallel.threads)
    check_model_path(config)
    draft = draft_plan(config, cluster) if plan is None else completed(plan, config)
    check_packages(draft.parsed.adapter if plan is not None else adapter_of(config))
    check_engine(config, plan, log)
    corpus = prepare_data(config, Path(config.train.output) / "data", log)
    check_samples(config, corpus)
    choice, spec, asked = choose_plan(config, draft, cluster, corpus, fixed=plan is not None, links=links)
    check_drive(choice.plan, spec, cluster, asked)
    job = Job(
        config=config,
        plan=choice.plan,
        corpus=corpus.folder,
        estimate=choice.estimate,
        step_time=choice.time,
        as_json=as_json,
        cluster=cluster,
        measured_links=None if links is None else links.rates(),
        command=tuple(command),
        **foreseen(asked, choice.plan, cluster, config),
    )
    return PreparedJob(job=job, choice=choice, spec=spec, cluster=cluster, corpus=corpus, notes=tuple(notes))


def check_drive(plan: Plan, spec: ModelSpec, cluster: ClusterSpec, asked: Asked) -> None:
    """Check that a machine's drive has room for swapping; report the cost of a slow one.

    Raises:
        UserError: it has not enough room.
    """
    if not plan.parsed.nvme or plan.nvme_path is None:
        return
    from shardwise.parallel.engines.deepspeed_nvme import check_room, drive_speed, slow_text
    from shardwise.plan.deepspeed_stages import swapped

    trained = [p.num_elements for p in spec.parameters if p.trainable]
    away = swapped(plan, (p.num_elements for p in spec.parameters), [trained])
    ranks, states = plan.dims.world_size // cluster.nodes, asked[1].optimizer_states or 2
    check_room(plan.nvme_path, ranks * away.num_bytes(plan, states))
    written, read = (ranks * number for number in away.moved_bytes(plan, states))
    message = slow_text(plan.nvme_path, written, read, drive_speed(plan.nvme_path))
    if message:
        logging.getLogger("shardwise").warning(message)


def completed(plan: Plan, config: Config) -> Plan:
    """Complete a plan without a batch (made for a custom loop) from the config."""
    if plan.micro_batch is not None:
        return plan.model_copy(update={"seq_len": length_of(config)})
    train = config.train
    micro, accum = split_batch(
        plan.dims.dp,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        grad_accum=plan.grad_accum if plan.grad_accum > 1 else train.grad_accum,
    )
    return plan.model_copy(update={"micro_batch": micro, "grad_accum": accum, "seq_len": length_of(config)})


def draft_plan(config: Config, cluster: ClusterSpec) -> Plan:
    """Build a draft plan: batch split, precision and recompute, without the strategy."""
    train, parallel = config.train, config.parallel
    micro, accum = split_batch(
        data_ranks(config, cluster),
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        grad_accum=pipeline_batches(config, cluster),
    )
    return Plan(
        micro_batch=micro,
        grad_accum=accum,
        seq_len=length_of(config),
        precision=default_precision(cluster) if parallel.precision == "auto" else parallel.precision,
        recompute=parallel.recompute,
        recompute_layers=parallel.recompute_layers,
        offload_activations=parallel.offload_activations,
        loss_chunks=train.loss_chunks,
        optimizer_in_backward=config.optimizer.in_backward,
        device=cluster.device,
        adapter=None if adapter_of(config) == "none" else config.lora.options,
        **parallel.types,
    )


def data_ranks(config: Config, cluster: ClusterSpec) -> int:
    """Count ranks with different samples: all under ``auto``, else by the named strategy."""
    strategy = None if config.parallel.strategy == "auto" else parse_strategy(config.parallel.strategy)
    return cluster.world_size // (1 if strategy is None else strategy.tp * strategy.pp * strategy.cp)


def pipeline_batches(config: Config, cluster: ClusterSpec) -> int | None:
    """Return the micro batches of a pipeline on CPUs, which is not modelled; ``None`` if given.

    The most that divide a rank's share of the global batch, up to four for each stage: the bubble is then a fifth or
    less.
    """
    train, parallel = config.train, config.parallel
    stages = 1 if parallel.strategy == "auto" else parse_strategy(parallel.strategy).pp
    if stages == 1 or cluster.device != "cpu" or train.micro_batch or train.grad_accum or train.global_batch is None:
        return train.grad_accum
    share = train.global_batch // data_ranks(config, cluster)
    most = 4 * stages * parallel.stages_per_rank
    return max((n for n in range(1, min(share, most) + 1) if share % n == 0), default=None)


def with_options(plan: Plan, config: Config) -> Plan:
    """Add ``[parallel]``'s options of the axes, and the loss chunks, to a chosen plan."""
    update = {name: attrgetter(key)(config) for name, key in CONFIG_KEYS.items() if not key.startswith("parallel.")}
    update |= config.parallel.options_for(plan.parsed) | {"fp8_emulate": config.parallel.fp8_emulate}
    if plan.parsed.adapter != "none":
        update["adapter"] = config.lora.options
    return plan.model_copy(update=update)


def choose_plan(
    config: Config,
    draft: Plan,
    cluster: ClusterSpec,
    corpus: TaskData,
    *,
    fixed: bool,
    links: CalibrationFile | None = None,
) -> tuple[Choice, ModelSpec, Asked]:
    """Inspect the model on the meta device and choose a plan; a ``fixed`` plan is only costed."""
    from shardwise.parallel.decide import Decision, check_model, decide, parts_of, with_stages

    kind = draft.parsed.adapter if fixed else adapter_of(config)
    if kind != "none":
        draft = draft.model_copy(update={"adapter": draft.adapter or AdapterOptions()})
    inspection = look(config, draft, kind, corpus)
    module, spec, profile = inspection.module, inspection.spec, inspection.profile
    batch = (draft.micro_batch or 1) * draft.grad_accum * (draft.dims.dp if fixed else data_ranks(config, cluster))
    facts = {"seq_len": length_of(config), "global_batch": batch}
    workload = with_plan(inspection.workload.model_copy(update=facts), draft)

    def decided(plan: Plan) -> Decision:
        sample = example_inputs_of(corpus, config, plan.micro_batch or 1)
        return decide(module, spec, plan, sample)

    def check_sharding(plan: Plan) -> ShardPlacement:
        plan = plan if fixed else with_options(plan, config)
        return parts_of(decided(plan), spec, plan)

    def staged(plan: Plan) -> Plan:
        return with_stages(plan, decided(plan).wiring) if plan.dims.pp > 1 and plan.stage_blocks is None else plan

    if fixed:
        draft = staged(draft)
        choice = _fixed_choice(draft, spec, workload, profile, cluster, check_sharding(draft))
    elif profile is not None:
        pins, costs = _pins(config, cluster), corrected_costs(cluster, links)
        choice = choose_profiled(
            profile, spec, workload, cluster, pins, costs=costs, check_sharding=check_sharding, command=as_config_keys
        )
    else:
        parallel = config.parallel
        choice = choose(
            draft,
            spec,
            workload,
            cluster,
            strategy=parallel.strategy,
            dp_replicate=parallel.dp_replicate,
            dp_shard=parallel.dp_shard,
            check_sharding=check_sharding,
        )
    if not fixed:
        named = config.parallel.precision != "auto"
        notes = precision_text(choice.plan.precision, cluster, named=named)
        choice = replace(choice, plan=with_options(choice.plan, config), precision=notes)
    if links is not None and profile is not None:
        timed = described(config, profile, compiled=workload.compiles(choice.plan))
        choice = _timed_over(links, choice, timed, workload, cluster)
    check_model(spec, choice.plan)
    check_isolated(config, corpus.kind, module, choice.plan)
    check_generated(config, corpus.kind, choice.plan)
    check_options(config, module, choice.plan)
    if not choice.plan.dims.splits_model:
        check_sharding(choice.plan)  # its options; a plan that splits the model was checked when it was chosen
    return replace(choice, plan=staged(choice.plan)), spec, (profile, workload)


Asked = tuple[ModelProfile | None, Workload]
"""Question to the planner; without a profile if the model does not run on fake tensors."""


def foreseen(asked: Asked, plan: Plan, cluster: ClusterSpec, config: Config) -> dict[str, Any]:
    """Return the planner's knowledge of a plan beside its costs: traffic and alternatives, and those that need less."""
    profile, workload = asked
    if profile is None:
        return {}
    trained = adapted(profile, plan.parsed, with_plan(workload, plan), plan.precision, plan.device)
    less = smaller(profile, workload, cluster, plan)
    return {
        "traffic": sent_bytes(trained, plan, workload.program),
        "alternatives": alternatives(profile, workload, cluster, plan),
        "smaller": tuple(one for one in less if not optimizer_problems(config.optimizer, one.plan.parsed)),
    }


def _pins(config: Config, cluster: ClusterSpec) -> Pins:
    """Return the choices that the config fixes; an open batch split is searched for."""
    parallel, train = config.parallel, config.train
    split = {"micro_batch": train.micro_batch, "grad_accum": pipeline_batches(config, cluster)}
    return Pins(
        strategy=None if parallel.strategy == "auto" else parse_strategy(parallel.strategy),
        recompute=parallel.recompute,
        precision=None if parallel.precision == "auto" else parallel.precision,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        options=given_options(config),
        **split,
    )


def as_config_keys(options: Mapping[str, str | None], candidate: Candidate) -> str:
    """Format options of ``shardwise plan`` as the keys of ``train`` that do the same."""
    names = {"--loss-chunks": "train.loss_chunks", "--optimizer": "optimizer.name", "--strategy": "parallel.strategy"}
    keys = {names[option]: value for option, value in options.items() if option in names}
    if "--optimizer-in-backward" in options:  # not for every strategy, and before the norm of all gradients is known
        keys |= {"optimizer.in_backward": "true", "optimizer.clip_norm": "none"}
        keys |= {"parallel.strategy": str(candidate.plan.parsed)}
    return "set " + " ".join(f"{key}={value}" for key, value in keys.items())


def given_options(config: Config) -> dict[str, Any]:
    """Return the options that the config names, the loss chunks and the adapters."""
    given = {
        name: value
        for name, key in CONFIG_KEYS.items()
        if (value := attrgetter(key)(config)) is not None
        and (not key.startswith("parallel.") or name in config.parallel.model_fields_set)
    }
    if "pipeline_schedule" in given:
        given["virtual_stages"] = config.parallel.stages_per_rank
    return given if adapter_of(config) == "none" else given | {"adapter": config.lora.options}


def _timed_over(
    links: CalibrationFile, choice: Choice, profile: ModelProfile, workload: Workload, cluster: ClusterSpec
) -> Choice:
    """Return the choice with its time over measured links; its own is the catalogue's."""
    pins = Pins(strategy=choice.plan.parsed, precision=choice.plan.precision)
    problem = ask(profile, workload, cluster, pins, costs=corrected_costs(cluster, links))
    return replace(choice, time=time_of(problem, choice.plan))


def _fixed_choice(
    plan: Plan,
    spec: ModelSpec,
    workload: Workload,
    profile: ModelProfile | None,
    cluster: ClusterSpec,
    parts: ShardPlacement,
) -> Choice:
    """Cost a given plan."""
    from shardwise.cost.memory.estimate_memory import estimate_memory

    if profile is None:
        return Choice(plan=plan, estimate=estimate_memory(spec, plan, workload, parts))
    pins = Pins(strategy=plan.parsed, precision=plan.precision)
    found = cost_of(ask(profile, workload, cluster, pins), plan)
    return Choice(plan=plan, estimate=exact(found, spec, workload, parts), time=found.time)
