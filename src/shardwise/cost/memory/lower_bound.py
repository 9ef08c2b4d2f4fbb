"""Fast lower bound of a rank's peak, for search: sums at the moments when plans are fullest.

It takes microseconds. Each moment is a line in the micro batch, ``fixed + each × micro batch``; the lines of a plan are
computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.cost.memory.activations import UnitBytes, unit_bytes
from shardwise.cost.memory.local_shapes import (
    FP32,
    LayerGroup,
    ShardLayout,
    UnitWeights,
    average_bytes,
    heavy_stages,
    layout_of,
    micro_batches_in_flight,
    stage_pieces,
    unit_weights,
    with_routing,
)
from shardwise.cost.memory.memory_key import MemoryKey
from shardwise.cost.memory.optimizer_shards import optimizer_bytes, optimizer_mean_bytes
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class BytesLine:
    """Bytes at one moment: ``fixed``, plus ``each`` for each sample of the micro batch."""

    fixed: float
    each: float = 0.0


def peak_lower_bound(profile: ModelProfile, plan: Plan, workload: Workload) -> int:
    """Live bytes at the peak of the fullest rank, some per cent low.

    Allocator overhead and context are not counted.
    """
    micro = plan.sequences
    return int(max(line.fixed + line.each * micro for line in _lines(MemoryKey(profile, plan, workload))))


@dataclass(frozen=True, slots=True)
class _Moments:
    """Bytes of a pipeline rank that do not depend on the number of micro batches.

    ``step`` is the end of the optimizer's step, ``base`` lives throughout. Each micro batch in flight adds ``copies``
    and, for each sample, ``kept``; ``logits`` and ``again`` are the temporaries of a sample in the loss and in
    recompute, ``lost`` what the loss keeps of each one in flight.
    """

    stage: int
    layout: ShardLayout
    step: float
    base: float
    buckets: int
    waits: int
    kept: float
    copies: int
    logits: float
    lost: float
    again: float
    gathered: int
    reducing: tuple[BytesLine, ...]


@lru_cache(maxsize=16384)
def _lines(key: MemoryKey) -> tuple[BytesLine, ...]:
    plan, lines = key.plan, []
    accum = plan.grad_accum
    for rank in _moments(MemoryKey(key.profile, plan, key.workload, accumulation=False)):
        in_flight = micro_batches_in_flight(rank.layout, rank.stage, accum)
        if not rank.layout.offloads:
            lines.append(BytesLine(rank.step))
        waits = rank.waits if accum > 1 else 0
        for fixed, crowd in (
            (rank.buckets, in_flight),
            (rank.buckets + waits, in_flight if accum > in_flight else max(1, in_flight - 1)),
        ):
            each = rank.kept * crowd + rank.lost * (crowd - 1)
            here = rank.base + fixed + rank.copies * crowd
            lines.append(BytesLine(here, each + rank.logits))
            lines.append(BytesLine(here + rank.gathered, each + rank.again))
        if accum == 1:
            lines += rank.reducing
    return tuple(lines)


@lru_cache(maxsize=16384)
def _moments(key: MemoryKey) -> tuple[_Moments, ...]:
    """Bytes of each pipeline rank that can be the fullest."""
    stored = _stored(MemoryKey(key.profile, key.plan, key.workload, step=False))
    return tuple(_moments_of(rank, key) for rank in stored)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a pipeline rank stores, and the temporaries of its optimizer."""

    stage: int
    layout: ShardLayout
    parameters: int
    gradients: int
    state: int
    temporaries: float


@lru_cache(maxsize=4096)
def _stored(key: MemoryKey) -> tuple[_Stored, ...]:
    """Bytes that each pipeline rank stores that can be the fullest."""
    layout = with_routing(layout_of(key.plan, key.workload.program), key.workload)
    stages = heavy_stages(key.profile, layout)
    return tuple(_stored_by(n, stage_pieces(key.profile, layout, n), layout, key.workload, key.plan) for n in stages)


def _stored_by(
    stage: int, pieces: tuple[LayerGroup, ...], layout: ShardLayout, workload: Workload, plan: Plan
) -> _Stored:
    rows = tuple((p, unit_weights(p.unit, layout)) for p in pieces)
    gradients = sum(w.gradients * p.count for p, w in rows)
    if plan.optimizer_in_backward:
        gradients = max(w.gradients for _, w in rows)
    shares = layout.shards_state
    state = (optimizer_mean_bytes if shares else optimizer_bytes)(pieces, layout, workload) or 0
    temporaries = 0.0
    if not shares and not layout.masters:
        largest = max((w.largest for _, w in rows), default=0) * layout.stored
        temporaries = sum(w.trained * p.count for p, w in rows) * layout.stored * workload.optimizer_temporaries
        temporaries += largest * workload.loop_temporaries
        temporaries = min(temporaries, largest) if plan.optimizer_in_backward else temporaries
    return _Stored(
        stage=stage,
        layout=layout,
        parameters=sum(w.parameters * p.count for p, w in rows) * (2 if plan.reference == "copy" else 1),
        gradients=gradients,
        state=state + average_bytes(pieces, layout, workload),
        temporaries=temporaries,
    )


def _moments_of(stored: _Stored, key: MemoryKey) -> _Moments:
    workload, plan, layout, gradients = key.workload, key.plan, stored.layout, stored.gradients
    compiled, fused = workload.compiles(plan), workload.fuses_loss(plan)
    pieces = stage_pieces(key.profile, layout, stored.stage, plan.recompute, plan.recompute_layers)
    rows = [(p, unit_weights(p.unit, layout), unit_bytes(p.unit, layout, p.recompute, compiled)) for p in pieces]
    rest = 0 if layout.offloads else stored.parameters + stored.state
    kept, copies = sum(b.kept * p.count for p, _, b in rows), 0
    if plan.offload_activations and layout.is_cuda:
        kept = sum(b.kept * p.count for p, _, b in rows if not p.is_block)
    if layout.autocasts:
        copies = sum(w.copies * p.count for p, w, _ in rows if p.recompute == "none")
    copies += sum(w.exchanged * p.count for p, w, _ in rows if p.recompute == "none")
    base = rest + _gathered(rows, layout)
    buckets = gradients if not layout.shards and (layout.replicas > 1 or layout.masters) else 0
    # beside the last micro batch: unsharded gradients, or those that accumulate outside DDP's buckets
    if layout.shards and (plan.gradient_sync == "last" or layout.pp > 1):
        waits = sum(w.waiting * p.count for p, w, _ in rows)
    else:
        waits = 0 if layout.offloads or layout.masters or workload.program.adds_in_buckets else gradients
    loss_bytes = [b.logits * (layout.width if fused else b.loss_copies * FP32) for _, _, b in rows]
    if plan.loss_chunks > 1:
        each_logit = FP32 + (layout.width if layout.width < FP32 else 0)
        loss_bytes = [b.logits * each_logit / plan.loss_chunks for _, _, b in rows]
    logits = max(loss_bytes, default=0.0)
    # nothing is recomputed while the blocks after it still hold what they saved
    ends_kept = [p.recompute for p in pieces if p.is_block][-1:] == ["none"]
    recompute_bytes = max((b.again for p, _, b in rows[-2:] if p.is_block and not ends_kept), default=0.0)
    gathered = max((sum(w.gathered) for p, w, _ in rows[-2:] if p.is_block), default=0)
    gathered = gathered if layout.shards and not layout.keeps_weights else 0
    lost = max((b.logits for _, _, b in rows), default=0.0) * (layout.width if fused else FP32)
    return _Moments(
        stage=stored.stage,
        layout=layout,
        step=stored.parameters + gradients + stored.state + stored.temporaries,
        base=base,
        buckets=buckets,
        waits=waits,
        kept=kept,
        copies=copies,
        logits=logits,
        lost=lost,
        again=recompute_bytes,
        gathered=gathered,
        reducing=tuple(_reducing(rows, base, kept) if gathered else ()),
    )


def _reducing(rows: list[tuple[LayerGroup, UnitWeights, UnitBytes]], base: float, kept: float) -> list[BytesLine]:
    """Peak at the end of the backward of the last block but one.

    Two unsharded blocks, one unsharded gradient, and one in reduction.
    """
    piece, weights, unit = next(row for row in reversed(rows) if row[0].is_block)
    if piece.count < 3:
        return []
    sent = weights.sent if weights.sent != weights.parameters else 0
    moving = weights.reduce_in + weights.full_gradients + sum(weights.gathered) + sent
    return [BytesLine(base + moving, kept - 2 * unit.kept)]


def _gathered(rows: list[tuple[LayerGroup, UnitWeights, UnitBytes]], layout: ShardLayout) -> int:
    """Bytes of unsharded weights that stay from forward to backward."""
    if not layout.shards:
        return 0
    return sum(sum(w.gathered) * p.count for p, w, _ in rows if layout.keeps_weights or not p.is_block)
