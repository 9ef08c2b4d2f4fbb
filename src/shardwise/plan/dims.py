"""`ParallelDims`: number of ranks on each mesh axis; the product of all but ``ep`` is the world size."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from shardwise.errors import PlanError
from shardwise.plan.divisibility import one_of
from shardwise.plan.strategy import DEGREES, Strategy

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SHOWN = (*AXES, "ep")


@dataclass(frozen=True)
class MeshCoord:
    """Position of a rank on each axis, from 0.

    ``dp`` counts over both data-parallel axes; ``ep`` counts over ranks of ``dp``, ``cp`` and ``tp``.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int = 0


class ParallelDims(BaseModel):
    """Degrees of each axis; the product of all but ``ep`` is the world size.

    ``ep`` spreads whole experts over ranks that are data-parallel (and ``cp``, ``tp``) ones for all other weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp_replicate: int = Field(default=1, ge=1)
    dp_shard: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)

    @property
    def dp(self) -> int:
        """Number of ranks with different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Product of all degrees but ``ep``."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks over which experts may be spread: those of one replica, ``dp_shard`` × ``cp`` × ``tp``.

        Where weights are not sharded, every data-parallel rank counts.
        """
        return (self.dp_shard if self.dp_shard > 1 else self.dp_replicate) * self.cp * self.tp

    @property
    def expert_shards(self) -> int:
        """Ranks that share the weights (or the gradients) of the same experts, of one replica."""
        return self.expert_ranks // self.ep

    @property
    def splits_model(self) -> bool:
        """True where ranks share the work on one sample."""
        return self.tp * self.pp * self.cp > 1

    def place(self, rank: int) -> MeshCoord:
        """Return the position of global rank ``rank``.

        Axes are in the order of ``AXES``, the last one fastest.
        """
        ep = rank % self.ep  # consecutive ranks have different experts
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return MeshCoord(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)

    def __str__(self) -> str:
        shown = [f"{axis}={getattr(self, axis)}" for axis in SHOWN if getattr(self, axis) > 1]
        return " × ".join(shown) if shown else "one rank"


def expert_dims(dims: ParallelDims) -> ParallelDims:
    """Return the degrees that the experts of one rank of ``ep`` see: those that share them, and the replicas."""
    if dims.dp_shard > 1:
        return dims.model_copy(update={"dp_shard": dims.expert_shards, "tp": 1, "cp": 1, "ep": 1})
    return dims.model_copy(update={"dp_replicate": dims.expert_shards, "tp": 1, "cp": 1, "ep": 1})


def dims_for(
    strategy: Strategy,
    world_size: int,
    *,
    devices_per_node: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
) -> ParallelDims:
    """Return the degrees of ``strategy`` on ``world_size`` ranks.

    ``tp``, ``pp``, ``cp`` and ``ep`` are the strategy's own; the remaining ranks are data parallel. Plain strategies
    use one data-parallel axis. ``hsdp`` shards inside a node and replicates across nodes; on one node it replicates
    twice where the number is even. Given degrees are kept and checked.

    Raises:
        PlanError: the degrees do not multiply to the world size, experts do not spread over them, or the strategy has
            no such axis.
    """
    if world_size < 1:
        raise PlanError(f"world size {world_size}: at least one rank is needed")
    model_ranks = strategy.tp * strategy.pp * strategy.cp
    if world_size % model_ranks:
        shown = " × ".join(f"{axis} {getattr(strategy, axis)}" for axis in DEGREES if getattr(strategy, axis) > 1)
        raise PlanError(
            f"{strategy}: {shown} = {model_ranks} does not divide the world size {world_size}; "
            f"use degrees whose product divides {world_size}"
        )
    ranks = world_size // model_ranks
    asked = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
    given = {axis: degree for axis, degree in asked.items() if degree is not None}
    if strategy.base == "hsdp":
        in_node = None if devices_per_node is None else max(1, devices_per_node // (strategy.tp * strategy.cp))
        replicate, shard = _hsdp_degrees(ranks, in_node, dp_replicate, dp_shard)
    elif strategy.shards_parameters:
        replicate, shard = 1, ranks
    else:
        replicate, shard = ranks, 1
    chosen = {"dp_replicate": replicate, "dp_shard": shard}
    wrong = {axis: degree for axis, degree in given.items() if chosen[axis] != degree}
    if wrong or replicate * shard != ranks:
        equation = " × ".join(f"{axis} {given.get(axis, chosen[axis])}" for axis in chosen)
        fix = f"{strategy.base} on {ranks} ranks is dp_replicate {replicate} × dp_shard {shard}; leave both out"
        if strategy.base == "hsdp":
            pairs = [f"{n} × {ranks // n}" for n in range(1, ranks + 1) if ranks % n == 0]
            fix = f"dp_replicate × dp_shard may be {', '.join(pairs)}"
        product = given.get("dp_replicate", replicate) * given.get("dp_shard", shard)
        what = f"is not the world size {ranks}" if product != ranks else f"does not go with {strategy.base}"
        raise PlanError(f"{equation} {what}: {fix}")
    dims = ParallelDims(
        dp_replicate=replicate, dp_shard=shard, tp=strategy.tp, pp=strategy.pp, cp=strategy.cp, ep=strategy.ep
    )
    if problem := spread_problem(dims):
        raise PlanError(f"{strategy}: {problem}")
    return dims


def spread_problem(dims: ParallelDims, experts: int = 0) -> str:
    """Explain why experts cannot be spread over ``dims.ep`` ranks, with degrees that work; empty if they can.

    Degrees that do not divide ``experts`` of a layer, where it is given, are not proposed.
    """
    ranks, inner = dims.expert_ranks, dims.cp * dims.tp
    if dims.ep == 1 or (ranks % dims.ep == 0 and dims.ep % inner == 0):
        return ""
    axis = "dp_shard" if dims.dp_shard > 1 else "dp_replicate"
    factors = [(axis, ranks // inner), ("cp", dims.cp), ("tp", dims.tp)]
    shown = " × ".join(f"{name} {n}" for name, n in factors if n > 1 or name == axis)
    works = [n for n in range(2, ranks + 1) if ranks % n == 0 and n % inner == 0 and experts % n == 0]
    fix = f"use {one_of(works[:8])}" if works else "leave +ep out"
    over = f" = {ranks}" if inner > 1 else ""
    many = f", and be a multiple of {inner} because the ranks of a sample have different experts" if inner > 1 else ""
    return f"ep {dims.ep} must divide the {shown}{over} ranks that experts are spread over{many}; {fix}"


def _hsdp_degrees(
    world_size: int, devices_per_node: int | None, dp_replicate: int | None, dp_shard: int | None
) -> tuple[int, int]:
    if dp_replicate is not None and dp_shard is not None:
        return dp_replicate, dp_shard
    if dp_replicate is not None:
        return dp_replicate, max(1, world_size // dp_replicate)
    if dp_shard is not None:
        return max(1, world_size // dp_shard), dp_shard
    if devices_per_node and world_size > devices_per_node and world_size % devices_per_node == 0:
        return world_size // devices_per_node, devices_per_node
    if world_size % 2 == 0:
        return 2, world_size // 2
    if world_size == 1:
        return 1, 1
    raise PlanError(
        f"hsdp on {world_size} ranks: no even split into replicas exists; "
        f"use fsdp, or set parallel.dp_replicate to a divisor of {world_size}"
    )
