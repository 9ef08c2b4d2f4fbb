"""Loss spikes: a logged loss far above those before it, with the samples of its step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from shardwise.plan.plan import Plan
from shardwise.train.data.order import SampleOrder, rank_ids

WINDOW = 64
"""Logged losses that one is compared with."""
FEWEST = 20
"""Fewer of them show no spread yet."""
SPREADS = 8.0
"""A spike is above the median by this many spreads (1.4826 × the median deviation, a standard deviation of noise)."""
LEAST = 0.1
"""And by this share of the median: a loss that hardly varies has no spread to go by."""


class LossSpikes:
    """Detector of spikes in the logged losses of a run. It knows the samples of every step by their position."""

    def __init__(self, order: SampleOrder, plan: Plan) -> None:
        self._order, self._plan = order, plan
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def fields(self, loss: float, position: int) -> dict[str, Any]:
        """Return what a logged line says beside the ``loss`` of the step at ``position``; empty without a spike."""
        median = spike(self._losses, loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        if median is None:
            return {}
        plan = self._plan
        micro, samples = plan.micro_batch or 1, []
        for replica in range(plan.dims.dp):
            ids = rank_ids(self._order, position, plan.dims.dp, replica, micro, plan.grad_accum)
            samples.append([int(number) for row in ids for number in row if number >= 0])
        return {"loss_spike": {"median": median, "samples": samples}}


def spike(before: deque[float], loss: float) -> float | None:
    """Return the median of the losses ``before`` if ``loss`` is far above it."""
    if len(before) < FEWEST or not math.isfinite(loss):
        return None
    median = statistics.median(before)
    spread = 1.4826 * statistics.median(abs(one - median) for one in before)
    return median if loss > median + max(SPREADS * spread, LEAST * abs(median)) else None
