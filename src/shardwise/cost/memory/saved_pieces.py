"""Allocations of other micro batches in flight and of the optimizer's state, at once or in their own sizes.

An allocator without expandable segments reuses the segment of a single large allocation for smaller ones, and then
needs another for the next large one. So where segments do not expand (`Program.in_pieces`), what stands for many
tensors is traced as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.cost.memory.cost_inputs import CostInputs
from shardwise.cost.memory.local_shapes import FP32

MOST_PIECES = 6000  # allocations that stand for other micro batches; above, neighbours are traced together
STATE_TENSORS = 2 * 7  # of a block: two states of some seven matrices


def kept_logits(s: CostInputs) -> float:
    """Bytes that the loss of one micro batch saves for its backward."""
    each = s.layout.width if s.program.fused_loss else FP32
    return max((b.logits for b in s.bytes), default=0.0) * s.micro * each


def saved_pieces(s: CostInputs, others: int) -> Iterator[float]:
    """Sizes of what ``others`` micro batches save on this stage."""
    each = list(_saved_by_one(s))
    if not s.program.in_pieces:
        yield sum(each) * others
        return
    together = max(1, math.ceil(others * len(each) / MOST_PIECES))
    sizes = [sum(each[i : i + together]) for i in range(0, len(each), together)]
    for _ in range(others):
        yield from sizes


def _saved_by_one(s: CostInputs) -> Iterator[float]:
    """Sizes of the tensors that one micro batch saves: ops' results, or a block's input, and copies of weights."""
    for unit, weights, piece in zip(s.bytes, s.weights, s.pieces, strict=True):
        alone = piece.recompute == "none"
        keeps = piece.is_block or s.program.recompute == "none"
        saved = [op.saved for op in unit.ops] if alone else [unit.kept]
        copies = (weights.copies if s.layout.autocasts else 0) + weights.exchanged
        saved = [] if piece.is_block and s.program.saves_on_host else saved
        one = [size * s.micro for size in saved] + [float(copies) if alone and keeps else 0.0]
        for _ in range(piece.count):
            yield from (size for size in one if size)
    yield s.sent * s.micro


def state_pieces(s: CostInputs) -> Iterator[int]:
    """Sizes of the optimizer's state."""
    number = sum(piece.count for piece in s.pieces) * STATE_TENSORS if s.program.in_pieces else 1
    for part in range(number):
        yield s.optimizer * (part + 1) // number - s.optimizer * part // number
