"""The rule for loss spikes, and the samples of a step."""

from __future__ import annotations

import random
from collections import deque

import pytest

from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.data.order import Order
from shardwise.train.loss_spikes import FEWEST, LossSpikes, spike

DRAW = random.Random(3)
NOISE = [2.0 + DRAW.gauss(0, 0.05) for _ in range(64)]


@pytest.mark.parametrize(
    ("before", "loss", "found"),
    [
        (NOISE, 2.9, True),
        (NOISE, 2.3, False),  # within 8 spreads
        (NOISE, 0.1, False),
        (NOISE, float("nan"), False),
        ([2.0] * 64, 2.1, False),  # no spread: within a tenth
        ([2.0] * 64, 2.3, True),
        ([2.0] * (FEWEST - 1), 9.0, False),
        ([9.0, *NOISE], 2.9, True),  # an earlier spike does not hide it
        ([8.0 * 0.95**n for n in range(64)], 1.0, False),  # a loss that falls
    ],
)
def test_a_spike_is_far_above_the_median(before: list[float], loss: float, found: bool) -> None:
    assert (spike(deque(before), loss) is not None) is found


def test_a_spike_has_the_samples_of_its_step() -> None:
    dims = dims_for(parse_strategy("ddp"), 2)
    plan = Plan(strategy="ddp", dims=dims, micro_batch=2, grad_accum=2)
    spikes = LossSpikes(Order(100, seed=1, shuffle=False), plan)
    assert [spikes.fields(loss, 8 * step) for step, loss in enumerate(NOISE)] == [{}] * 64
    line = spikes.fields(5.0, 16)
    assert line["loss_spike"]["samples"] == [[16, 17, 20, 21], [18, 19, 22, 23]]
    assert line["loss_spike"]["median"] == pytest.approx(2.0, abs=0.05)
