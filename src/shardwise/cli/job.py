"""`Job`: everything that the ranks of one run must agree on, made once and read by each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from shardwise.cost.memory import Estimate
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.plan import Plan, Recompute, split_batch
from shardwise.search.choose import Choice, choose
from shardwise.spec.cluster import ClusterSpec, detect
from shardwise.spec.model import ModelSpec, read_model
from shardwise.train.config import Config
from shardwise.train.corpus import Corpus, prepare_corpus

if TYPE_CHECKING:
    from torch import nn


class Job(BaseModel):
    """A config, the plan for it, where the prepared corpus lies, and what memory was predicted."""

    model_config = ConfigDict(frozen=True)

    config: Config
    plan: Plan
    corpus: Path
    estimate: Estimate
    as_json: bool = False


class Prepared(BaseModel):
    """A job, and what was found out on the way, for those who print it."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    job: Job
    choice: Choice
    spec: ModelSpec
    cluster: ClusterSpec
    corpus: Corpus


def prepare_job(
    config: Config, say: Callable[[str], None], *, plan: Plan | None = None, nodes: int = 1, as_json: bool = False
) -> Prepared:
    """Read the data, look at the machine and the model, and choose the plan. Starts no rank, needs no GPU.

    Raises:
        UserError: whatever of the config cannot be.
        DoesNotFit: no plan fits.
    """
    check_output(Path(config.train.output))
    nproc = config.parallel.nproc or (plan.dims.world_size // nodes if plan else None)
    cluster = detect(config.parallel.device, nproc).model_copy(update={"nodes": nodes})
    draft = plan or draft_plan(config, cluster)
    corpus = prepare_corpus(config.data, Path(config.train.output) / "data", say)
    choice, spec = choose_plan(config, draft, cluster, corpus, fixed=plan is not None)
    job = Job(config=config, plan=choice.plan, corpus=corpus.folder, estimate=choice.estimate, as_json=as_json)
    return Prepared(job=job, choice=choice, spec=spec, cluster=cluster, corpus=corpus)


def draft_plan(config: Config, cluster: ClusterSpec) -> Plan:
    """What is decided before the strategy: the batch split, the precision, recompute."""
    train, parallel = config.train, config.parallel
    micro, accum = split_batch(
        cluster.world_size, global_batch=train.global_batch, micro_batch=train.micro_batch, grad_accum=train.grad_accum
    )
    return Plan(
        micro_batch=micro,
        grad_accum=accum,
        seq_len=config.data.seq_len,
        precision=parallel.precision,
        recompute=parallel.recompute,
        device=cluster.device,
    )


def choose_plan(
    config: Config, draft: Plan, cluster: ClusterSpec, corpus: Corpus, *, fixed: bool
) -> tuple[Choice, ModelSpec]:
    """Read the model's structure on the meta device and choose; a ``fixed`` plan is only costed."""
    from shardwise.parallel.apply import check
    from shardwise.parallel.materialize import build
    from shardwise.train.model import model_factory
    from shardwise.train.optimizer import build_optimizer, workload_of

    factory = model_factory(config, corpus.vocab_size)
    module = build(factory, config.train.seed, real=False)
    spec = read_model(module)
    check(spec, draft)
    workload = workload_of(build_optimizer(module.parameters(), config.optimizer))
    workload = workload.model_copy(update=_activations(config, draft, spec, factory))
    if fixed:
        return _fixed_choice(draft, spec, workload, cluster), spec
    parallel = config.parallel
    choice = choose(
        draft,
        spec,
        workload,
        cluster,
        strategy=parallel.strategy,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
    )
    return choice, spec


def _activations(
    config: Config, plan: Plan, spec: ModelSpec, factory: Callable[[], nn.Module]
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


def _fixed_choice(plan: Plan, spec: ModelSpec, workload: object, cluster: ClusterSpec) -> Choice:
    from shardwise.cost.memory import estimate_memory
    from shardwise.spec.workload import Workload

    if plan.dims.world_size != cluster.world_size:
        raise PlanError(
            f"the plan is for {plan.dims.world_size} ranks ({plan.dims}), but there are {cluster.world_size}; "
            f"use --nproc {plan.dims.world_size // cluster.nodes} or make a new plan"
        )
    if plan.device != cluster.device:
        raise PlanError(f"the plan is for {plan.device}, but this machine gives {cluster.device}; set parallel.device")
    return Choice(plan=plan, estimate=estimate_memory(spec, plan, Workload.model_validate(workload)))


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
        raise ConfigError(
            f"train.output '{folder}' cannot be written to: {error.strerror}; choose another folder"
        ) from None
