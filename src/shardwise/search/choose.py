"""Choose the simplest plan that fits; every plan that was passed over keeps its reason."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.estimate import Estimate
from shardwise.cost.memory import estimate_memory
from shardwise.errors import DoesNotFit, PlanError
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.workload import Workload
from shardwise.units import bytes_text

SIMPLEST_FIRST = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "zero2+offload", "fsdp+offload")
USABLE = 0.9  # of device memory: the rest is the framework's, the communicator's and fragmentation
USABLE_IF_UNKNOWN = 0.6  # where saved activations are not known


@dataclass(frozen=True)
class Choice:
    """A plan, what it is predicted to hold, and why the simpler ones were passed over."""

    plan: Plan
    estimate: Estimate
    rejected: tuple[tuple[str, str], ...] = ()


def check_degrees(
    strategy: str, cluster: ClusterSpec, *, dp_replicate: int | None = None, dp_shard: int | None = None
) -> None:
    """Whether the strategy, or with ``auto`` any strategy, has these degrees on this cluster; needs no model.

    Raises:
        PlanError: it has not.
    """
    refused = []
    for name in SIMPLEST_FIRST if strategy == "auto" else (strategy,):
        try:
            _dims(name, cluster, dp_replicate, dp_shard)
            return
        except PlanError as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
    world, text = cluster.world_size, " and ".join(f"parallel.{name} {n}" for name, n in given.items() if n)
    raise PlanError(f"no strategy has {text} on {world} ranks; leave it out, or make dp_replicate × dp_shard {world}")


def _dims(name: str, cluster: ClusterSpec, dp_replicate: int | None, dp_shard: int | None) -> ParallelDims:
    return dims_for(
        parse_strategy(name),
        cluster.world_size,
        devices_per_node=cluster.devices_per_node,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
    )


def choose(
    draft: Plan,
    spec: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    *,
    strategy: str = "auto",
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
) -> Choice:
    """Complete ``draft`` (batch split, precision, recompute) with a strategy and its degrees.

    A named strategy is kept, fitting or not. ``auto`` takes the first of `SIMPLEST_FIRST` whose known bytes stay
    under 90 % of the device's memory (60 % where saved activations are unknown); unknown memory counts as enough.

    Raises:
        PlanError: the strategy and the degrees do not go with the world size.
        DoesNotFit: ``auto`` found none; the message has every candidate with its bytes.
    """
    check_degrees(strategy, cluster, dp_replicate=dp_replicate, dp_shard=dp_shard)

    def candidate(name: str, reason: str) -> Choice:
        dims = _dims(name, cluster, dp_replicate, dp_shard)
        plan = draft.model_copy(update={"strategy": str(parse_strategy(name)), "dims": dims, "reason": reason})
        return Choice(plan=plan, estimate=estimate_memory(spec, plan, workload))

    if strategy != "auto":
        return candidate(strategy, "asked for by name")
    rejected: list[tuple[str, str]] = []
    for name in SIMPLEST_FIRST:
        if name == "hsdp" and cluster.nodes == 1 and dp_replicate is None and dp_shard is None:
            rejected.append((name, "one node: nothing to gain over fsdp"))
            continue
        try:
            found = candidate(name, "")
        except PlanError as error:
            rejected.append((name, str(error)))
            continue
        share = USABLE_IF_UNKNOWN if found.estimate.unknown else USABLE
        limit = None if cluster.device_memory_bytes is None else int(cluster.device_memory_bytes * share)
        needed = found.estimate.device_bytes
        if limit is None or needed <= limit:
            room = "device memory unknown" if limit is None else f"of {bytes_text(limit)} usable"
            reason = f"the simplest that fits: {bytes_text(needed)} {room}"
            plan = found.plan.model_copy(update={"reason": reason})
            return Choice(plan=plan, estimate=found.estimate, rejected=tuple(rejected))
        rejected.append((name, f"needs {bytes_text(needed)}, {bytes_text(limit)} usable"))
    lines = "\n".join(f"  {name}: {why}" for name, why in rejected)
    raise DoesNotFit(
        f"no plan fits {cluster.world_size} × {cluster.device_name}:\n{lines}\n"
        "use more or larger devices, a smaller micro batch, or parallel.recompute=full"
    )
