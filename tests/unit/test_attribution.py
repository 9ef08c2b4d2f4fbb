"""The arithmetic of attribution: clocks that lose nothing, waiting that is split fairly, memory that does not grow."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from shardwise.distributed.comm_timer import COMM_TIMER, Waits
from shardwise.measure.step_time import clock
from shardwise.measure.step_time.attribution import Attribution, CpuWait, PhaseTotals, groups_of, split_off_waiting
from shardwise.measure.step_time.clock import COUNTED, EARLY, DeviceClock, HostClock
from shardwise.measure.step_time.timing import PHASES
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy

COLUMN = {part: index for index, part in enumerate(COUNTED)}


class Ticks:
    """A clock that goes on by what the test says."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticks]:
    found = Ticks()
    monkeypatch.setattr(clock, "time", found)
    yield found


def lap_of(clocked: Any) -> dict[str, int]:
    interval = clocked.take()
    assert interval is not None
    return {part: spent for part, spent in zip(COUNTED, interval, strict=True) if spent}


def test_every_moment_is_one_part(ticks: Ticks):
    one = HostClock()
    for part, length in (("data", 5), ("forward", 7)):
        one.phase(part)
        ticks.now += length
    one.enter("exposed_tp")
    ticks.now += 11
    one.enter("exposed_dp")  # inside of it
    ticks.now += 13
    one.leave()
    ticks.now += 17
    one.leave()
    ticks.now += 19
    one.interval()
    assert lap_of(one) == {"data": 5, "forward": 7 + 19, "exposed_tp": 11 + 17, "exposed_dp": 13}
    assert one.take() is None


def test_a_new_phase_ends_what_was_left_open(ticks: Ticks):
    one = HostClock()
    one.phase("backward")
    one.enter("exposed_dp")
    ticks.now += 3
    one.phase("other")
    ticks.now += 4
    one.leave()  # too late: it ended with the phase
    ticks.now += 5
    one.interval()
    assert lap_of(one) == {"exposed_dp": 3, "other": 9}


def test_between_steps_nothing_is_told_apart(ticks: Ticks):
    one = HostClock()
    one.phase("evaluation")
    ticks.now += 2
    one.enter("exposed_dp")
    ticks.now += 3
    one.leave()
    ticks.now += 4
    one.interval()
    assert lap_of(one) == {"evaluation": 9}


class Event:
    """What CUDA's event is to the clock: it passes when the device gets there."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: Any) -> None:
        self.at_ms = stream.device_ms
        self.stream = stream

    def query(self) -> bool:
        return self.stream.passed_ms >= self.at_ms

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return end.at_ms - self.at_ms


def test_a_devices_time_is_read_when_it_has_passed_and_events_are_used_again(monkeypatch: pytest.MonkeyPatch):
    stream = SimpleNamespace(device_ms=0.0, passed_ms=-1.0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    one, laps = DeviceClock(torch.device("cpu")), []
    for _ in range(20):
        for part, length in (("data", 1.0), ("forward", 2.0), ("backward", 4.0)):
            one.phase(part)
            if part == "backward":
                one.enter("exposed_dp")
                stream.device_ms += 0.5
                one.leave()
            stream.device_ms += length
        one.interval()
        assert one.take() is None, "the device is behind"
        stream.passed_ms = stream.device_ms
        laps.append(lap_of(one))
    expected = {"data": 1_000_000, "forward": 2_000_000, "backward": 4_000_000, "exposed_dp": 500_000}
    assert laps == [expected] * 20
    assert Event.made <= 16, "events are used again"


def test_a_border_on_a_slower_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    main, side = (SimpleNamespace(device_ms=0.0, passed_ms=0.0) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    streams = iter([main, main, side, main])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    one = DeviceClock(torch.device("cpu"))
    one.phase("forward")
    side.device_ms = 3.0
    one.phase("backward")
    main.device_ms = main.passed_ms = 5.0
    one.interval()
    assert one.take() is None, "the other stream is behind"
    side.passed_ms = 3.0
    assert lap_of(one) == {"forward": 3_000_000, "backward": 2_000_000}


def test_the_last_step_on_a_gpu_is_told_too(monkeypatch: pytest.MonkeyPatch):
    stream = SimpleNamespace(device_ms=0.0, passed_ms=-1.0)

    def work(milliseconds: float) -> None:
        stream.device_ms += milliseconds

    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(stream, "passed_ms", stream.device_ms))
    session: Any = SimpleNamespace(
        device=torch.device("cuda"),
        ranks=SimpleNamespace(world_size=1, is_main=True, control=None),
        plan=plan("ddp", 1),
        applied=SimpleNamespace(engine=None, outer=torch.nn.Linear(1, 1), pipeline=None),
        reduced_ranks=1,
        observers=[],
        phase_watchers=[],
        header=[],
        at_close=contextlib.ExitStack(),
    )
    one = Attribution.attach(session)
    one.on_prepared(session)
    for number in range(1, 9):
        one._on_phase("data")
        one.deliver(np.array([one.post()]))
        one._on_phase("forward")
        work(2.0)
        one.on_step_end(session, SimpleNamespace(number=number, tokens=10, processed=None))  # type: ignore[arg-type]
    one.finish()
    timing = one.timing()
    assert timing is not None and timing.warm_up + timing.steps == 8
    assert COMM_TIMER.listener is None and not session.header


class LateEvent(Event):
    """One that the device takes a moment to get to."""

    def record(self, stream: Any) -> None:
        stream.device_ms += 0.01
        super().record(stream)


def plan(strategy: str, world: int) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world))


def seconds(ranks: int, **parts: list[float]) -> Any:
    table = np.zeros((ranks, len(COUNTED)))
    for part, values in parts.items():
        table[:, COLUMN[part]] = values
    return table


def test_what_the_last_rank_did_not_wait_is_waiting_for_it():
    parts = seconds(3, forward=[1.0, 1.0, 1.5], exposed_dp=[0.6, 0.7, 0.1], control=[0.01, 0.02, 0.01])
    assert split_off_waiting(parts, plan("ddp", 3).dims) == 2
    assert parts[:, COLUMN["exposed_dp"]] == pytest.approx([0.1] * 3)
    assert parts[:, COLUMN["slowest_rank"]] == pytest.approx([0.5, 0.61, 0.0])


def test_a_slow_link_is_no_slow_rank():
    parts = seconds(2, forward=[1.0, 1.0], exposed_dp=[2.0, 2.01])
    assert split_off_waiting(parts, plan("ddp", 2).dims) is None
    assert parts[:, COLUMN["exposed_dp"]] == pytest.approx([2.0, 2.0])


def test_ranks_wait_in_their_own_groups():
    dims = plan("ddp+tp2", 4).dims
    assert groups_of("exposed_tp", dims) == [[0, 1], [2, 3]]
    assert groups_of("exposed_dp", dims) == [[0, 2], [1, 3]]
    assert groups_of("control", dims) == [[0, 1, 2, 3]]
    parts = seconds(4, forward=[1.0] * 4, exposed_tp=[0.1, 0.3, 0.8, 0.8])
    split_off_waiting(parts, dims)
    assert parts[:, COLUMN["exposed_tp"]] == pytest.approx([0.1, 0.1, 0.8, 0.8]), "each group has its own link"


def test_stages_of_a_pipeline_are_late_by_design():
    parts = seconds(2, forward=[1.0, 2.0], pipeline=[1.0, 0.0], control=[0.9, 0.0])
    assert split_off_waiting(parts, plan("ddp+pp2", 2).dims) is None
    assert parts[:, COLUMN["pipeline"]] == pytest.approx([1.0, 0.0])


def table(tokens: int, lost: int, **parts: list[int]) -> Any:
    ranks = len(next(iter(parts.values())))
    found = np.zeros((ranks, 4 + len(COUNTED)))
    found[:, 0], found[:, 2] = tokens, lost
    for part, values in parts.items():
        found[:, 4 + COLUMN[part]] = values
    found[:, 3] = found[:, 4:].sum(axis=1)
    return found


def test_totals_are_means_of_steps_and_ranks():
    totals, own = PhaseTotals(warm_up=3), plan("ddp", 2)
    ms = 1_000_000
    for late in (0, 10, 20):
        totals.add(table(100, 5 * ms, forward=[50 * ms, 50 * ms], exposed_dp=[30 * ms, (30 + late) * ms]), own)
    timing = totals.timing(own, {})
    assert timing.steps == 3 and timing.warm_up == 3
    assert timing.step_s == pytest.approx(0.085) and timing.median_step_s == pytest.approx(0.085)
    assert timing.parts["exposed_dp"].mean_s == pytest.approx(0.03)  # type: ignore[union-attr]
    waited = timing.parts["slowest_rank"]
    assert waited is not None and (waited.mean_s, waited.high_s, waited.highest_rank) == pytest.approx((0.005, 0.01, 1))
    assert timing.late_rank == 0 and timing.late_share == pytest.approx(2 / 3)
    assert timing.tokens_per_s == pytest.approx(300 / 0.255)
    assert timing.cpu_wait_s is not None and timing.cpu_wait_s.mean_s == pytest.approx(0.005)
    assert timing.stopwatch_s == pytest.approx(timing.step_s)


def test_what_cannot_be_measured_is_none():
    totals, own = PhaseTotals(), plan("ddp", 1)
    totals.add(table(8, -1, forward=[10], transfer=[3], exposed_dp=[2]), own)
    timing = totals.timing(own, {"recompute": "blocks are compiled"})
    assert timing.cpu_wait_s is None
    for part in ("exposed_dp", "exposed_tp", "pipeline", "slowest_rank", "transfer", "recompute"):
        assert timing.parts[part] is None
    told = sum(found.mean_s for found in timing.parts.values() if found is not None)
    assert told == pytest.approx(timing.step_s) == pytest.approx(15e-9), "nothing is lost with them"


def test_an_axis_that_is_not_there_is_not_unmeasured():
    totals, own = PhaseTotals(), plan("ddp+tp2", 2)
    totals.add(table(8, 0, forward=[10, 10]), own)
    why = {"exposed_tp": "compiled", "exposed_cp": "compiled", "recompute": "compiled"}
    assert totals.timing(own, why).unmeasured == {"exposed_tp": "compiled"}


def test_a_kernel_that_keeps_no_account_of_cores_is_unknown(tmp_path: Path):
    waiting = CpuWait()
    waiting.close()
    found = []
    for text in ("50 3 1", "60 7 2", "0 0 0"):
        (tmp_path / "schedstat").write_text(text)
        waiting._file = os.open(tmp_path / "schedstat", os.O_RDONLY)
        found.append(waiting.interval())
        waiting.close()
    assert found[1:] == [4, -1]


def test_early_reductions_are_part_of_the_exposed_ones():
    totals, own = PhaseTotals(), plan("ddp", 2)
    totals.add(table(8, 0, exposed_dp=[4, 4], **{EARLY: [6, 6]}), own)
    timing = totals.timing(own, {})
    assert timing.early_reduce_s == pytest.approx(6e-9)
    assert timing.parts["exposed_dp"].mean_s == pytest.approx(10e-9)  # type: ignore[union-attr]
    assert set(timing.parts) == set(PHASES)


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    totals, own = PhaseTotals(), plan("ddp", 2)
    for _ in range(1000):
        totals.add(table(8, 0, forward=[5, 5]), own)
    kept = [value for value in vars(totals).values() if isinstance(value, np.ndarray)]
    assert sum(value.nbytes for value in kept) < 1000 and len(totals._periods) == 1000


def test_a_step_of_many_ranks_is_added_up_about_as_fast_as_one_of_two():
    def fastest(ranks: int) -> float:
        totals, own, took = PhaseTotals(), plan("fsdp", ranks), []
        for _ in range(10):
            begin = time.perf_counter()
            totals.add(table(8, 0, forward=[5] * ranks, exposed_dp=list(range(ranks))), own)
            took.append(time.perf_counter() - begin)
        return min(took)

    assert fastest(1024) < 50 * fastest(2)


def test_code_is_not_compiled_anew_for_who_listens():
    waits, counted = Waits(), CompileCounter()

    @torch.compile(backend=counted)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        with waits.part("exposed_tp"):
            return x * 2

    for listener in (None, HostClock(), None):
        waits.listener = listener
        doubled(torch.ones(3))
    assert counted.frame_count == 1


def test_nobody_listens_costs_nothing():
    waits = Waits()
    assert waits.part("exposed_tp") is waits.part("exposed_dp")
    waits.enter("exposed_tp")
    waits.leave()
