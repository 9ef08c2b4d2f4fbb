"""One size of ``bench scaling`` on real ranks: the clock, the parts, the work."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from shardwise.bench.scaling.scaling_plans import plan_at
from shardwise.bench.scaling.scaling_sizes import WARM_UP, forget, measure_size
from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.process_group import join
from shardwise.measure.scaling_facts import Mode, Sample
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.config import Config
from tests.models import LENGTH, decoder, ragged_batches
from tests.worlds import run_world

STEPS, SLEEP_S = 6, 0.03


def config() -> Config:
    return Config.model_validate(
        {
            "model": {"factory": "tests.models:byte_decoder"},
            "data": {"path": "python:json", "seq_len": LENGTH},
            "train": {"steps": 1},
        }
    )


def feed(plan: Plan, ticks: list[float], pause_s: float = 0.0) -> Iterator[list[Any]]:
    """Micro batches without end, each step's handed out after ``pause_s``; ``ticks`` has the wall clock's times."""
    rank_batches = ragged_batches(plan.grad_accum, micro_batch=plan.micro_batch or 1)
    while True:
        ticks.append(time.time())
        time.sleep(pause_s)
        yield rank_batches


def measured(strategy: str, mode: Mode, pause_s: float) -> tuple[Sample | None, list[float], bool]:
    """What is found of this world, what the feed's clock says, and whether nothing was left behind."""
    ranks = join("cpu")
    reference = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 2), micro_batch=2, grad_accum=2)
    plan = plan_at(reference, ranks.world_size, mode)
    ticks: list[float] = []
    models: list[weakref.ref[Any]] = []

    def factory() -> nn.Module:
        made = decoder()
        models.append(weakref.ref(made))
        return made

    sample = measure_size(config(), plan, mode, factory, feed(plan, ticks, pause_s), ranks, STEPS)
    forget(ranks)
    return sample, ticks, COMM_TIMER.listener is None and [model() for model in models] == [None]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_size_is_timed_as_a_clock_elsewhere_says(world: int, strategy: str) -> None:
    """The wall clock of the last rank's feed saw the same steps begin; generous, as machines are shared."""
    found = run_world(measured, world, strategy, "strong", SLEEP_S)
    samples = [sample for sample, _, _ in found]
    sample = samples[0]
    assert sample is not None and samples[1:] == [None] * (world - 1)
    assert all(clean for _, _, clean in found)
    ticks = found[-1][1]
    assert len(ticks) == WARM_UP + STEPS
    elsewhere = ticks[-1] - ticks[WARM_UP]
    assert sum(sample.steps_s[:-1]) == pytest.approx(elsewhere, rel=0.1)
    assert len(sample.steps_s) == STEPS and sum(sample.steps_s) == pytest.approx(sample.wall_s)
    assert sample.step_s > SLEEP_S


def test_parts_and_work_of_two_sizes() -> None:
    """The pause of the feed is found as waiting for data, and the strong size has half of the work on each rank."""
    one, two = (run_world(measured, world, "ddp", "strong", SLEEP_S)[0][0] for world in (1, 2))
    assert one is not None and two is not None
    assert (one.plan.grad_accum, two.plan.grad_accum) == (4, 2)
    assert (one.devices, two.devices, one.nodes, two.nodes) == (1, 2, 1, 1)
    assert one.tokens > 0 and one.tokens % STEPS == 0
    for sample in (one, two):
        assert sample.threads == 1 and sample.cores is not None
        assert sample.timing is not None and sample.timing.steps == STEPS
        assert sample.timing.step_s == pytest.approx(sample.step_s, rel=0.1)
        data = sample.timing.parts["data"]
        assert data is not None and data.low_s > SLEEP_S * 0.9
        parts = sum(spread.mean_s for spread in sample.timing.parts.values() if spread is not None)
        assert parts == pytest.approx(sample.timing.step_s, rel=0.01)
    assert one.timing is not None and one.timing.parts["exposed_dp"] is None
    assert two.timing is not None and two.timing.parts["exposed_dp"] is not None
