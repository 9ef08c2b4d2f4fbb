"""Bytes of optimizer state on the fullest rank of a stage: sharded with the weights, or as ZeRO-1 partitions it."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

from shardwise.cost.memory.expert_shards import rest_shape
from shardwise.cost.memory.local_shapes import (
    FP32,
    PROBES,
    STATE_ITEMSIZE,
    LayerGroup,
    ShardLayout,
    local_weight,
)
from shardwise.cost.same import Same
from shardwise.model.profile import Unit, Weight
from shardwise.plan.optimizers import ParameterShard
from shardwise.plan.workload import Workload


def optimizer_bytes(pieces: tuple[LayerGroup, ...], layout: ShardLayout, workload: Workload) -> int | None:
    """Optimizer state of the fullest rank of a stage; ``None`` for an unknown optimizer.

    The state of a weight is declared in `plan.optimizers`. Fp32 masters of low-precision weights are one tensor more;
    with them ``zero1`` shards one flat buffer evenly, as Megatron-LM's distributed optimizer does.
    """
    if workload.optimizer is None and workload.optimizer_states is None:
        return None
    if layout.shards_state:
        if layout.flat_state:
            return optimizer_mean_bytes(pieces, layout, workload)
        return sum(_fullest_share(pieces, layout, workload, probe) for probe in PROBES)
    shards = tuple(layout.ranks_of(weight) for weight in PROBES)
    types, key = StateTypes.of(layout), _StateKey(workload)
    return sum(
        piece.count
        * sum(_unit_states(Same(piece.unit), layout.tp, layout.ep, shards, types, key, layout.whole_experts))
        for piece in pieces
    )


def optimizer_mean_bytes(pieces: tuple[LayerGroup, ...], layout: ShardLayout, workload: Workload) -> int | None:
    """Mean optimizer state per rank of a stage under ``zero1``: a fast lower bound of the peak."""
    if workload.optimizer is None and workload.optimizer_states is None:
        return None
    full, types, key = [0, 0], StateTypes.of(layout), _StateKey(workload)
    for p in pieces:
        states = _unit_states(Same(p.unit), layout.tp, layout.ep, (1, 1), types, key)
        full = [total + p.count * state for total, state in zip(full, states, strict=True)]
    return sum(total // layout.replicas_of(weight) for total, weight in zip(full, PROBES, strict=True))


@dataclass(frozen=True, slots=True)
class StateTypes:
    """What the optimizer steps: fp32 ``masters``, or weights of ``stored`` bytes, with Kahan's rest or without."""

    masters: bool
    stored: int
    kahan: bool

    @classmethod
    def of(cls, layout: ShardLayout) -> StateTypes:
        """Return those of a layout."""
        return cls(layout.masters, layout.stored, layout.kahan)

    def weight_state(self, shape: tuple[int, ...], workload: Workload, weight: Weight, in_block: bool) -> int:
        """Bytes of a weight's state, of its fp32 master, and of what Kahan summation keeps."""
        more = FP32 * self.masters + self.stored * self.kahan
        stored = FP32 if self.masters else self.stored
        return _state_bytes(shape, stored, workload, weight, in_block) + more * math.prod(shape)


class _StateKey:
    """Workload that is equal to those whose optimizer has the same state."""

    __slots__ = ("facts", "workload")

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.facts = (workload.optimizer, workload.optimizer_states, workload.scalar_states)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StateKey) and self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.facts)


@lru_cache(maxsize=8192)
def _unit_states(
    same: Same[Unit],
    tp: int,
    ep: int,
    shards: tuple[int, ...],
    types: StateTypes,
    key: _StateKey,
    whole: bool = False,
) -> tuple[int, int]:
    """Bytes of optimizer state of one unit's weights on the fullest rank: of dense ones, and of experts."""
    unit, found = same.value, [0, 0]
    in_block = unit.kind == "block"
    for weight in unit.weights:
        if weight.trainable:
            shape = local_weight(weight, tp, ep, vocab=not in_block)
            routed = bool(weight.experts)
            rest = rest_shape(weight, shape, shards[routed], whole=whole)
            found[routed] += types.weight_state(rest, key.workload, weight, in_block)
    return found[0], found[1]


def _local(weight: Weight, piece: LayerGroup, layout: ShardLayout) -> tuple[int, ...]:
    return local_weight(weight, layout.tp, layout.ep, vocab=not piece.is_block)


def _fullest_share(pieces: tuple[LayerGroup, ...], layout: ShardLayout, workload: Workload, kind: Weight) -> int:
    """Largest shard in ZeroRedundancyOptimizer's partition; of spread experts or of all other weights.

    The rule is that of `cost.memory.zero1_shares`, kept as sums on a heap.
    """
    shapes = [
        (_local(w, piece, layout), w, piece.is_block)
        for piece in pieces
        for _ in range(piece.count)
        for w in piece.unit.weights
        if w.trainable and (layout.ep > 1 and bool(w.experts)) == bool(kind.experts)
    ]
    ranks = layout.replicas_of(kind)
    loads = [(0, rank) for rank in range(ranks)]
    states = [0] * ranks
    shapes.sort(key=lambda one: (_stepped_in(one[0], one[1], workload, in_block=one[2]), -math.prod(one[0])))
    for shape, weight, in_block in shapes:
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + math.prod(shape), rank))
        states[rank] += StateTypes.of(layout).weight_state(shape, workload, weight, in_block)
    return max(states)


def _stepped_in(shape: tuple[int, ...], weight: Weight, workload: Workload, *, in_block: bool) -> int:
    """Number of the optimizer's parameter group that a weight is in."""
    spec = workload.custom_state
    if spec is None or spec.group is None:
        return 0
    return spec.group(ParameterShard(weight.shape, shape, shape, in_block))


def _state_bytes(shape: tuple[int, ...], stored: int, workload: Workload, weight: Weight, in_block: bool) -> int:
    """Bytes of state of a weight that is stepped in ``stored`` bytes an element; counters and scales in fp32."""
    fixed = workload.scalar_states * STATE_ITEMSIZE
    if (spec := workload.custom_state) is not None:
        return spec.state_bytes(ParameterShard(weight.shape, shape, shape, in_block), stored) + fixed
    states = 2 if workload.optimizer_states is None else workload.optimizer_states
    return states * math.prod(shape) * min(math.ceil(weight.itemsize), stored) + fixed
