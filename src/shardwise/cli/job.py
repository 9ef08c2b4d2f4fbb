"""`Job`: everything that the ranks of one run must agree on, made once and read by each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from shardwise.cli.calibration import corrected_costs, read_links
from shardwise.cost.calibration import CalibrationFile
from shardwise.cost.estimate import Estimate
from shardwise.cost.memory import Parts
from shardwise.cost.optimizer_state import LEAN
from shardwise.cost.steptime import StepTime
from shardwise.errors import ConfigError, DataError, ModelError, PlanError, ShardwiseError
from shardwise.parallel.environment import visible_devices
from shardwise.plan.adapter import AdapterOptions
from shardwise.plan.plan import DeviceType, Plan, Precision, Recompute, axis_problems, split_batch, stages_of
from shardwise.plan.strategy import parse_strategy
from shardwise.search.adapting import with_plan
from shardwise.search.alternatives import Alternative, alternatives
from shardwise.search.candidate import Pins
from shardwise.search.choose import Choice, check_degrees, choose, choose_profiled, exact
from shardwise.search.search import ask, cost_of
from shardwise.search.traffic import sent_bytes
from shardwise.spec.cluster import ClusterSpec, detect
from shardwise.spec.model import ModelSpec
from shardwise.spec.profile import ModelProfile
from shardwise.spec.read import read_model
from shardwise.spec.workload import Workload
from shardwise.train.config import Config, OptimizerTable, optimizer_problems
from shardwise.train.corpus import Corpus, prepare_corpus
from shardwise.train.trackers import check_trackers

if TYPE_CHECKING:
    from torch import nn


# keys of [parallel] that a plan takes over under the same name
_OPTIONS = (
    "sequence_parallel",
    "loss_parallel",
    "tp_styles",
    "async_tp",
    "pipeline_schedule",
    "virtual_stages",
    "compile",
    "prefetch",
)


class Job(BaseModel):
    """A config, the plan for it, where the prepared corpus lies, and what memory and time were predicted.

    ``traffic`` is what a device is predicted to send in a step, bytes by axis; ``alternatives`` what else the plan
    could have been; ``measured_links`` bytes/s that ``bench comm`` got out of an axis, and when.
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
    measured_links: dict[str, tuple[float, str]] = {}

    def to_json(self) -> str:
        """For the ranks. Keys that the user left out stay out: a config says when a key that is given does nothing."""
        return self.model_dump_json(by_alias=True, exclude_unset=True)


class Prepared(BaseModel):
    """A job, and what was found out on the way, for those who print it. ``notes`` are about measured links."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    job: Job
    choice: Choice
    spec: ModelSpec
    cluster: ClusterSpec
    corpus: Corpus
    notes: tuple[str, ...] = ()


def prepare_job(
    config: Config,
    say: Callable[[str], None],
    *,
    plan: Plan | None = None,
    nodes: int = 1,
    as_json: bool = False,
    calibration: Path | None = None,
) -> Prepared:
    """Read the data, look at the machine and the model, and choose the plan. Starts no rank, needs no GPU.

    ``calibration`` is a file of ``bench comm``, for the time that is predicted.

    Raises:
        UserError: whatever of the config cannot be.
        DoesNotFit: no plan fits.
    """
    check_output(Path(config.train.output))
    check_trackers(config.train.trackers)
    if config.optimizer.factory is None and config.optimizer.name == "adamw8bit":
        from shardwise.parallel.adamw8bit import require_bitsandbytes

        require_bitsandbytes()
    nproc = config.parallel.nproc or (plan.dims.world_size // nodes if plan else None)
    cluster = detect(config.parallel.device, nproc, visible=visible_devices()).model_copy(update={"nodes": nodes})
    check_plan(config, cluster, plan)
    links, told = (None, []) if calibration is None else read_links(calibration, cluster)
    check_model_path(config)
    draft = draft_plan(config, cluster) if plan is None else completed(plan, config)
    check_packages(draft.parsed.adapter if plan is not None else adapter_of(config))
    check_engine(config, plan, say)
    corpus = prepare_corpus(config.data, Path(config.train.output) / "data", say)
    check_samples(config, corpus)
    choice, spec, asked = choose_plan(config, draft, cluster, corpus, fixed=plan is not None, links=links)
    job = Job(
        config=config,
        plan=choice.plan,
        corpus=corpus.folder,
        estimate=choice.estimate,
        step_time=choice.time,
        as_json=as_json,
        cluster=cluster,
        measured_links={} if links is None else links.rates(),
        **foreseen(asked, choice.plan, cluster),
    )
    return Prepared(job=job, choice=choice, spec=spec, cluster=cluster, corpus=corpus, notes=tuple(told))


def check_plan(config: Config, cluster: ClusterSpec, plan: Plan | None) -> None:
    """What can be said of the strategy and of a given plan before the data is read, which may take long.

    Raises:
        PlanError: the degrees cannot be, or the given plan is for something else; all that differs.
    """
    parallel = config.parallel
    if plan is None:
        check_degrees(parallel.strategy, cluster, dp_replicate=parallel.dp_replicate, dp_shard=parallel.dp_shard)
        return
    problems = []
    if plan.dims.world_size != cluster.world_size:
        problems.append(
            f"the plan is for {plan.dims.world_size} ranks ({plan.dims}), but there are {cluster.world_size}; "
            f"use --nproc {max(1, plan.dims.world_size // cluster.nodes)} or make a new plan"
        )
    if plan.device != cluster.device:
        problems.append(
            f"the plan is for {plan.device}, but the ranks are on {cluster.device}; "
            f"set parallel.device={plan.device} where there is one, or make a new plan"
        )
    given = {
        **{f"parallel.{key}": (getattr(parallel, key), getattr(plan, key)) for key in _OPTIONS},
        "parallel.strategy": (config.parallel.strategy, plan.strategy),
        "parallel.precision": (config.parallel.precision, plan.precision),
        "parallel.recompute": (config.parallel.recompute, plan.recompute),
        "parallel.dp_replicate": (config.parallel.dp_replicate, plan.dims.dp_replicate),
        "parallel.dp_shard": (config.parallel.dp_shard, plan.dims.dp_shard),
        "train.global_batch": (config.train.global_batch, plan.global_batch),
        "train.micro_batch": (config.train.micro_batch, plan.micro_batch),
        "train.grad_accum": (config.train.grad_accum, plan.grad_accum),
        "train.loss_chunks": (config.train.loss_chunks, plan.loss_chunks),
        "parallel.nvme_path": (config.parallel.nvme_path, plan.nvme_path),
        "optimizer.in_backward": (config.optimizer.in_backward, plan.optimizer_in_backward),
    }
    if plan.parsed.adapter != "none":
        adapter = plan.adapter or AdapterOptions()
        given |= {f"lora.{key}": (getattr(config.lora.options, key), value) for key, value in adapter}
    for key, (asked, planned) in given.items():
        table, _, name = key.partition(".")
        if (
            name in getattr(config, table).model_fields_set
            and planned is not None
            and asked not in (planned, None, "auto")
        ):
            problems.append(f"{key} is {asked}, but the plan says {planned}; take the key out or make a new plan")
    if plan.optimizer_in_backward and config.optimizer.clip_norm is not None:
        problems.append(
            "the plan steps the optimizer in the backward, before the norm of all gradients is known, and "
            f'optimizer.clip_norm is {config.optimizer.clip_norm:g}; set optimizer.clip_norm="none" or make a new plan'
        )
    if plan.seq_len not in (None, config.data.seq_len):
        problems.append(
            f"the plan is for samples of {plan.seq_len} tokens, but data.seq_len is {config.data.seq_len}; "
            f"set data.seq_len={plan.seq_len} or make a new plan"
        )
    if problems:
        raise PlanError(*problems)


def check_packages(adapter: str) -> None:
    """Whether what adapters need is installed, before the data is read.

    Raises:
        ConfigError: it is not.
    """
    if adapter == "none":
        return
    if find_spec("peft") is None:
        raise ConfigError("adapters need peft; install it with: pip install 'shardwise[hf]'")
    if adapter == "qlora" and find_spec("bitsandbytes") is None:
        raise ConfigError("+qlora needs bitsandbytes; install it with: pip install 'shardwise[qlora]'")


def check_engine(config: Config, plan: Plan | None, say: Callable[[str], None]) -> None:
    """Whether the engine that a strategy names is installed and can run it, before the data is read.

    Raises:
        UserError: all that is in the way.
    """
    named = config.parallel.strategy if plan is None else plan.strategy
    strategy = None if named == "auto" else parse_strategy(named)
    if strategy is not None and strategy.engine == "deepspeed":
        from shardwise.parallel.deepspeed_ready import check_ready

        path = config.parallel.nvme_path if plan is None else config.parallel.nvme_path or plan.nvme_path
        check_ready(nvme=strategy.nvme, nvme_path=path, say=say)


def completed(plan: Plan, config: Config) -> Plan:
    """A plan that leaves the batch open (one made for a loop of one's own) takes it from the config."""
    if plan.micro_batch is not None:
        return plan.model_copy(update={"seq_len": config.data.seq_len})
    train = config.train
    micro, accum = split_batch(
        plan.dims.dp,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        grad_accum=plan.grad_accum if plan.grad_accum > 1 else train.grad_accum,
    )
    return plan.model_copy(update={"micro_batch": micro, "grad_accum": accum, "seq_len": config.data.seq_len})


def check_model_path(config: Config) -> None:
    """Whether the model's configuration is there, before the data is read.

    Raises:
        ModelError: it is not.
    """
    from shardwise.train.model import configuration_file

    if config.model.config is not None:
        configuration_file(Path(config.model.config))


def check_samples(config: Config, corpus: Corpus) -> None:
    """Whether there is something to learn from, and something to measure on.

    Raises:
        DataError: there is not.
    """
    from shardwise.train.samples import samples_for

    samples_for(corpus.train, config.data, corpus.separator)
    if corpus.heldout is not None:
        heldout = samples_for(corpus.heldout, config.data, corpus.separator)
        if not heldout.label_bytes(config.train.eval_samples or None):
            raise DataError(
                "the held-out documents have no byte that can be predicted from one before it; "
                "give data.heldout_path longer documents, or set data.heldout_fraction=0"
            )


def draft_plan(config: Config, cluster: ClusterSpec) -> Plan:
    """What is decided before the strategy: the batch split, the precision, recompute."""
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
        seq_len=config.data.seq_len,
        precision=parallel.precision,
        recompute=parallel.recompute,
        loss_chunks=train.loss_chunks,
        optimizer_in_backward=config.optimizer.in_backward,
        device=cluster.device,
        adapter=None if adapter_of(config) == "none" else config.lora.options,
    )


def adapter_of(config: Config) -> str:
    """``lora``, ``qlora`` or ``none``: what the named strategy says."""
    named = config.parallel.strategy
    return "none" if named == "auto" else parse_strategy(named).adapter


def with_adapters(factory: Callable[[], nn.Module], plan: Plan) -> Callable[[], nn.Module]:
    """``factory`` with the plan's adapters in what it makes, and nothing packed: so it runs on fake tensors."""
    from shardwise.parallel.adapters import add_adapters

    unpacked = Plan(strategy="ddp+lora", adapter=plan.adapter, precision=plan.precision)

    def adapted() -> nn.Module:
        module = factory()
        add_adapters(module, unpacked)
        return module

    return adapted


def data_ranks(config: Config, cluster: ClusterSpec) -> int:
    """Ranks that see different samples: under ``auto`` all, else what the named strategy leaves of them."""
    strategy = None if config.parallel.strategy == "auto" else parse_strategy(config.parallel.strategy)
    return cluster.world_size // (1 if strategy is None else strategy.tp * strategy.pp * strategy.cp)


def pipeline_batches(config: Config, cluster: ClusterSpec) -> int | None:
    """Micro batches of a pipeline on CPUs, whose speed is not modelled, where the config leaves them open.

    As many as divide a rank's share of the global batch, up to four for each stage: the bubble is then a fifth or less.
    """
    train, parallel = config.train, config.parallel
    stages = 1 if parallel.strategy == "auto" else parse_strategy(parallel.strategy).pp
    if stages == 1 or cluster.device != "cpu" or train.micro_batch or train.grad_accum or train.global_batch is None:
        return train.grad_accum
    share = train.global_batch // data_ranks(config, cluster)
    most = 4 * stages * (parallel.virtual_stages or stages_of(parallel.pipeline_schedule))
    return max((n for n in range(1, min(share, most) + 1) if share % n == 0), default=None)


def with_options(plan: Plan, config: Config) -> Plan:
    """A plan that was chosen, with what ``[parallel]`` says about how its axes are run, and the loss's chunks."""
    parallel, dims = config.parallel, plan.dims
    update: dict[str, Any] = {
        "compile": parallel.compile,
        "loss_chunks": config.train.loss_chunks,
        "optimizer_in_backward": config.optimizer.in_backward,
    }
    if dims.tp > 1:
        keys = ("sequence_parallel", "loss_parallel", "tp_styles", "async_tp")
        update |= {key: getattr(parallel, key) for key in keys}
    if dims.pp > 1:
        schedule = parallel.pipeline_schedule
        update |= {"pipeline_schedule": schedule, "virtual_stages": parallel.virtual_stages or stages_of(schedule)}
    if plan.parsed.shards_parameters:
        update["prefetch"] = parallel.prefetch
    if plan.parsed.nvme:
        update["nvme_path"] = parallel.nvme_path
    return plan.model_copy(update=update)


def choose_plan(
    config: Config,
    draft: Plan,
    cluster: ClusterSpec,
    corpus: Corpus,
    *,
    fixed: bool,
    links: CalibrationFile | None = None,
) -> tuple[Choice, ModelSpec, Asked]:
    """Read the model's structure on the meta device and choose; a ``fixed`` plan is only costed."""
    import torch

    from shardwise.parallel.adapters import check_adapters, linear_layers, packed_spec
    from shardwise.parallel.apply import check, check_cut
    from shardwise.parallel.materialize import build
    from shardwise.parallel.split import parts_of
    from shardwise.train.model import model_factory

    factory = model_factory(config, corpus.vocab_size)
    with users_code(_key("model", config.model.factory, config.model.config)):
        base = module = build(factory, config.train.seed, real=False)
        kind = draft.parsed.adapter if fixed else adapter_of(config)
        if kind != "none":
            draft = draft.model_copy(update={"adapter": draft.adapter or AdapterOptions()})
            check_adapters(base, draft.adapter or AdapterOptions(), kind, draft.device)
            factory = with_adapters(factory, draft)
            module = build(factory, config.train.seed, real=False)
    spec = read_model(module)
    if kind == "qlora":
        spec = packed_spec(spec, linear_layers(base))
    check(spec, draft)
    workload = workload_for(module, config.optimizer, draft.device)
    told = _activations(config, draft, spec, factory, corpus.vocab_size)
    batch = (draft.micro_batch or 1) * draft.grad_accum * (draft.dims.dp if fixed else data_ranks(config, cluster))
    facts = {"seq_len": config.data.seq_len, "global_batch": batch}
    workload = with_plan(workload.model_copy(update={**told, **facts}), draft)
    profile = traced_profile(  # the planner adds the adapters itself
        base, config.data.seq_len, corpus.vocab_size, precision=draft.precision, device=draft.device
    )

    def cut(plan: Plan) -> Parts:
        sample = torch.zeros(plan.micro_batch or 1, config.data.seq_len, dtype=torch.int64)
        plan = plan if fixed else with_options(plan, config)
        return parts_of(check_cut(module, spec, plan, sample), spec, plan)

    if fixed:
        choice = _fixed_choice(draft, spec, workload, profile, cluster, cut(draft), links)
    elif profile is not None:
        pins, costs = _pins(config, cluster), corrected_costs(cluster, links)
        choice = choose_profiled(profile, spec, workload, cluster, pins, costs=costs, cut=cut)
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
            cut=cut,
        )
    if not fixed:
        choice = replace(choice, plan=with_options(choice.plan, config))
    check(spec, choice.plan)
    if unfit := [*axis_problems(choice.plan), *optimizer_problems(config.optimizer, choice.plan.parsed)]:
        raise PlanError(*unfit)
    if not choice.plan.dims.splits_model:
        cut(choice.plan)  # its options; a plan that cuts the model was looked at when it was chosen
    return choice, spec, (profile, workload)


Asked = tuple[ModelProfile | None, Workload]
"""What the planner was asked about; without a profile where the model does not run on fake tensors."""


def foreseen(asked: Asked, plan: Plan, cluster: ClusterSpec) -> dict[str, Any]:
    """What the planner knows of a plan beside its costs: its traffic, and what else it could have been."""
    profile, workload = asked
    if profile is None:
        return {}
    return {"traffic": sent_bytes(profile, plan), "alternatives": alternatives(profile, workload, cluster, plan)}


@contextmanager
def users_code(where: str) -> Iterator[None]:
    """What the user's function raises becomes a message that says where; a machine out of memory stays one.

    Raises:
        ConfigError: anything else was raised inside.
    """
    from shardwise.train.optimizer import raised_text

    try:
        yield
    except (ShardwiseError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{where} raised {raised_text(error)}; repair it, or change its arguments") from error


def _key(table: str, factory: str | None, other: str | None) -> str:
    if factory is not None:
        return f"{table}.factory '{factory}'"
    return f"model.config '{other}'" if table == "model" else f"optimizer.name '{other}'"


def _activations(
    config: Config, plan: Plan, spec: ModelSpec, factory: Callable[[], nn.Module], vocab_size: int
) -> dict[str, dict[str, int | None] | int | None]:
    """Saved bytes of a sample under the plan's recompute mode, and its logits.

    ``full`` holds the blocks' inputs plus one block that is being recomputed. What ``selective`` keeps is not seen by
    autograd's hooks, so it stays unknown.
    """
    from shardwise.parallel.precision import DTYPES
    from shardwise.parallel.recompute import apply_recompute
    from shardwise.train.loss import token_loss_sum
    from shardwise.train.model import forward_bytes

    def measure(mode: Recompute) -> tuple[int, int] | None:
        return forward_bytes(
            factory,
            token_loss_sum,
            seq_len=config.data.seq_len,
            vocab_size=vocab_size,
            dtype=DTYPES[plan.precision],
            prepare=lambda model: apply_recompute(model, mode, spec.blocks),
        )

    whole = measure("none")
    if whole is None:
        return {}
    saved: int | None = whole[0]
    if plan.recompute == "selective":
        saved = None
    elif plan.recompute == "full" and (kept := measure("full")) is not None:
        saved = kept[0] + (whole[0] - kept[0]) // len(spec.blocks)
    return {"activation_bytes": {plan.recompute: saved}, "logits_bytes": whole[1]}


def workload_for(module: nn.Module, table: OptimizerTable, device: DeviceType) -> Workload:
    """What the optimizer of a config will keep of ``module``; batch and length are left open.

    Raises:
        ConfigError: the optimizer's factory raised.
    """
    from shardwise.parallel.apply import parameter_names
    from shardwise.train.optimizer import build_optimizer, workload_of

    with users_code(_key("optimizer", table.factory, table.name)):
        workload = workload_of(build_optimizer(module.parameters(), table), parameter_names(module), device=device)
    known = workload.optimizer if workload.optimizer in LEAN else None
    return workload.model_copy(update={"optimizer": table.name if table.factory is None else known})


def traced_profile(
    module: nn.Module, seq_len: int, vocab_size: int, *, precision: Precision, device: DeviceType
) -> ModelProfile | None:
    """The traced profile; ``None`` for a module that does not run on fake tensors."""
    from shardwise.spec.trace import trace_module

    try:
        width: Literal["fp32", "bf16"] = "fp32" if precision == "fp32" else "bf16"
        return trace_module(
            module, seq_len=seq_len, vocab_size=vocab_size, precision=width, device=device, under_autocast=True
        )
    except ModelError:
        return None


def _pins(config: Config, cluster: ClusterSpec) -> Pins:
    """What the config fixes; where it leaves the batch split open, the largest micro batch that fits is looked for."""
    parallel, train = config.parallel, config.train
    split = {"micro_batch": train.micro_batch, "grad_accum": pipeline_batches(config, cluster)}
    return Pins(
        strategy=None if parallel.strategy == "auto" else parse_strategy(parallel.strategy),
        recompute=parallel.recompute,
        precision=parallel.precision,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        options=_given_options(config),
        **split,
    )


def _given_options(config: Config) -> dict[str, Any]:
    """The options of the plan's axes that the config names, and the loss's chunks."""
    parallel = config.parallel
    named = {key: getattr(parallel, key) for key in _OPTIONS if key in parallel.model_fields_set}
    if "pipeline_schedule" in named:
        named["virtual_stages"] = parallel.virtual_stages or stages_of(parallel.pipeline_schedule)
    named["loss_chunks"] = config.train.loss_chunks
    named["optimizer_in_backward"] = config.optimizer.in_backward
    return {key: value for key, value in named.items() if value is not None}


def _fixed_choice(
    plan: Plan,
    spec: ModelSpec,
    workload: Workload,
    profile: ModelProfile | None,
    cluster: ClusterSpec,
    parts: Parts,
    links: CalibrationFile | None,
) -> Choice:
    """A plan that is given, with its costs."""
    from shardwise.cost.memory import estimate_memory

    if profile is None:
        return Choice(plan=plan, estimate=estimate_memory(spec, plan, workload, parts))
    pins = Pins(strategy=plan.parsed, precision=plan.precision)
    costs = None if links is None else corrected_costs(cluster, links)
    found = cost_of(ask(profile, workload, cluster, pins, costs=costs), plan)
    return Choice(plan=plan, estimate=exact(found, spec, workload, parts), time=found.time)


def check_output(folder: Path) -> None:
    """The run folder must exist or be made, and be writable; found out before anything is computed.

    Raises:
        ConfigError: it is not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = "a file is in the way" if is_file else error.strerror
        raise ConfigError(f"train.output '{folder}' cannot be written to: {why}; choose another folder") from None
