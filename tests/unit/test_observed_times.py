"""Times of observed steps: the observer's own work counts nowhere, and the report has means and a diagnosis of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import nn

from shardwise.measure.collectives import Collective
from shardwise.observation.loop_facts import LoopFacts
from shardwise.observation.loop_times import LoopTimes
from shardwise.observation.run_output import LaterSteps, observed_loop
from shardwise.observation.step_clock import StepClock, _Flight
from shardwise.receipts.receipt import Receipt
from shardwise.report.html.observed_folder import ObservedLoop

RECEIPT = Receipt(title="observed loop", lines=())
LONG = 0.05


def test_own_work_before_a_forward_is_not_a_wait_in_it() -> None:
    """DDP waits in its pre-forward while the observer works there, too: the forward keeps what is its own."""
    clock = StepClock(nn.Linear(2, 2))
    clock.start()
    clock.see_operator("forward", "_record_function_enter_new", ["DistributedDataParallel.forward"])
    flight = _Flight(Collective("broadcast", 4, "float32", "forward"), time.perf_counter(), clock.own)
    clock._flights.append(flight)
    with clock.own:
        time.sleep(LONG)
    time.sleep(LONG / 2)
    flight.land(None)
    clock.enter_model()
    time.sleep(LONG / 5)
    clock.at("other")
    clock.stop()
    clock._entered = None
    (wait,) = clock._waited()
    forward = clock._parts["forward"]
    assert forward - wait[1] >= LONG / 5
    assert wait[1] >= LONG / 2
    assert clock._ended - clock._began == pytest.approx(sum(clock._parts.values()))


def facts(world: int, **more: Any) -> list[LoopFacts]:
    return [LoopFacts(rank=rank, world_size=world, wrapper="DDP", parameters=(), **more) for rank in range(world)]


def times(wait: float = 0.0, **parts: float) -> LoopTimes:
    every = {"forward": 0.02, "backward": 0.04, "optimizer": 0.01, "other": 0.01, "exposed_dp": wait} | parts
    return LoopTimes(
        step_s=sum(every.values()), own_s=0.001, operators=9, parts=every, early_reduce_s=wait / 2, early_reduces=1,
        cpu_wait_s=0.0, tokens=100, samples=2, unknown={"data": "no loader"},
    )  # fmt: skip


def loop(*ranks: list[LoopTimes], world: int = 2, **more: Any) -> ObservedLoop:
    alone = [one.model_copy(update={"times": times()}) for one in facts(world, **more)]
    return observed_loop(RECEIPT, alone, LaterSteps(ranks, None) if ranks else None)


def test_one_step_has_no_diagnosis_and_says_why() -> None:
    found = loop()
    assert found.findings is None and "it takes 5" in found.unknown["findings"]
    assert not found.not_judged


def test_means_are_over_the_later_steps_of_each_rank() -> None:
    fast = [times(0.05 if step else 0.01) for step in range(5)]
    slow = [times(0.01, data=0.04 if step else 0.0) for step in range(5)]
    found = loop(fast, slow)
    timing = found.timing
    assert (timing.steps, timing.warm_up, timing.world_size) == (5, 2, 2)
    assert timing.late_rank == 1 and timing.late_share == pytest.approx(0.8)
    assert [row["slowest_rank"] for row in timing.ranks] == pytest.approx([0.032, 0.0])
    assert [row["exposed_dp"] for row in timing.ranks] == pytest.approx([0.01, 0.01])
    # a part that one rank does not separate is in the loop's own code on every rank
    assert timing.parts["data"] is None and timing.ranks[1]["other"] == pytest.approx(0.01 + 0.8 * 0.04)
    assert [sum(row.values()) for row in timing.ranks] == pytest.approx([timing.step_s] * 2)
    assert timing.tokens_per_s == pytest.approx(200 / timing.step_s)
    assert timing.early_reduce_s == pytest.approx(0.005) and timing.early_reduces == 1
    kinds = {finding.kind: finding for finding in found.findings or ()}
    assert kinds["straggler"].rank == 1 and "in the loop's own code" in kinds["straggler"].text
    assert found.not_judged["data-loader"] == "no loader"


def test_a_step_that_was_skipped_on_a_rank_is_left_out() -> None:
    rows = [times() for _ in range(5)]
    cut = [*rows[:4], times(data=9.0).model_copy(update={"restarted": True})]
    found = loop(rows, cut)
    assert found.timing.steps == 4 and found.timing.step_s == pytest.approx(0.08)
    assert found.findings is None and "it takes 5" in found.unknown["findings"]
    all_cut = [one.model_copy(update={"restarted": True}) for one in rows]
    assert loop(all_cut, rows).timing.warm_up == 1


def test_advice_names_no_key_of_shardwise() -> None:
    """Reductions after each micro batch, and waiting for them."""
    rows = [times(0.06) for _ in range(5)]
    found = loop(rows, rows, forwards=4, backward_elements=(8, 8, 8, 8))
    kinds = {finding.kind: finding for finding in found.findings or ()}
    assert kinds.keys() >= {"early-sync", "communication"}
    assert "no_sync" in kinds["early-sync"].fix and "4 micro batches a step" in kinds["early-sync"].evidence[1]
    assert "micro batches a step=8" in kinds["communication"].fix
    text = found.model_dump_json()
    assert not [word for word in ("train.", "parallel.", "session", "checkpoint.every") if word in text]


def test_no_loop_is_healthy_where_its_waits_are_not_seen() -> None:
    seen = [times(data=0.0) for _ in range(5)]
    assert [finding.kind for finding in loop(seen, seen).findings or ()] == ["healthy"]
    parts = {name: value for name, value in times().parts.items() if name != "exposed_dp"}
    why = {"exposed_dp": "only DDP waits in a place of its own"}
    hidden = [one.model_copy(update={"parts": {**parts, "data": 0.0}, "unknown": why}) for one in seen]
    found = loop(hidden, hidden)
    assert found.findings == ()
    assert found.not_judged["communication"] == found.not_judged["straggler"] == why["exposed_dp"]
    alone = loop(hidden, world=1)
    assert [finding.kind for finding in alone.findings or ()] == ["healthy"]
    assert alone.not_judged["straggler"] == "there is one rank"
