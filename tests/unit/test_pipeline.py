"""Pipeline schedules against the textbook and against the event-by-event simulation; overlap on two streams."""

from __future__ import annotations

import pytest

from shardwise.cost.time.overlap import UnitRun, elapsed_s
from shardwise.cost.time.pipeline_time import (
    SIMULATED_EVENTS,
    blocks_per_stage,
    bubble_fraction,
    in_flight,
    pipeline_s,
    simulate_1f1b,
)
from shardwise.plan.stage_balance import balanced_stages, even_stages


@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 8), (4, 4), (4, 3), (8, 64), (5, 7)])
def test_equal_stages_idle_the_textbook_share(stages: int, micros: int) -> None:
    forward, backward = [1.0] * stages, [2.0] * stages
    total = simulate_1f1b(forward, backward, 0.0, micros)
    assert total == pytest.approx((micros + stages - 1) * 3.0)
    assert 1 - micros * 3.0 / total == pytest.approx(bubble_fraction(stages, micros))


@pytest.mark.parametrize("slow", [0, 3, 7])
def test_the_asymptote_is_the_simulation(slow: int) -> None:
    micros = SIMULATED_EVENTS // 8 + 8  # just past what is simulated
    forward, backward = [1.0] * 8, [2.0] * 8
    forward[slow], backward[slow] = 1.3, 2.6
    exact = simulate_1f1b(forward, backward, 0.0, micros)
    assert pipeline_s(forward, backward, 0.0, micros) == pytest.approx(exact, rel=0.01)


def test_the_asymptote_with_transfers_is_near_the_simulation() -> None:
    micros = SIMULATED_EVENTS // 8 + 8
    forward, backward = [1.0] * 8, [2.0] * 8
    exact = simulate_1f1b(forward, backward, 0.2, micros)
    assert exact > simulate_1f1b(forward, backward, 0.0, micros)
    assert pipeline_s(forward, backward, 0.2, micros) == pytest.approx(exact, rel=0.03)


def test_interleaving_divides_the_bubble() -> None:
    forward, backward = [1.0] * 4, [2.0] * 4
    plain, interleaved = pipeline_s(forward, backward, 0.0, 8), pipeline_s(forward, backward, 0.0, 8, virtual=3)
    assert plain - 24.0 == pytest.approx(9.0)
    assert interleaved - 24.0 == pytest.approx(3.0)
    assert 1 - 24.0 / interleaved == pytest.approx(bubble_fraction(4, 8, 3))


def test_one_stage_has_no_bubble() -> None:
    assert pipeline_s([1.0], [2.0], 0.5, 5) == pytest.approx(15.0)
    assert simulate_1f1b([1.0], [2.0], 0.5, 5) == pytest.approx(15.0)


def test_in_flight_micro_batches() -> None:
    assert [in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(0, 4, 2) == 2
    assert in_flight(0, 4, 8, 2) == pytest.approx((2 * 3 + 4 + 1) / 2)


@pytest.mark.parametrize(("blocks", "stages"), [(126, 16), (80, 8), (32, 3), (2, 4), (7, 1)])
def test_blocks_are_dealt_out_evenly_and_the_head_is_relieved(blocks: int, stages: int) -> None:
    counts = blocks_per_stage(blocks, stages)
    assert sum(counts) == blocks and len(counts) == stages
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_gathers_hide_behind_computation() -> None:
    alone = elapsed_s([UnitRun(10, 1.0)])
    hidden = elapsed_s([UnitRun(10, 1.0, gather_s=0.9)])
    exposed = elapsed_s([UnitRun(10, 1.0, gather_s=1.5)])
    assert hidden == pytest.approx(alone + 0.9)  # only the first is waited for
    assert exposed == pytest.approx(10 * 1.5 + 1.0)  # only the last computation is not on the wire's time
    assert elapsed_s([UnitRun(10, 1.0, gather_s=0.9)], ahead=False) == pytest.approx(10 * 1.9)


def test_the_last_reduction_is_waited_for() -> None:
    assert elapsed_s([UnitRun(10, 1.0, reduce_s=0.5)]) == pytest.approx(10.5)
    assert elapsed_s([UnitRun(10, 1.0, reduce_s=2.0)]) == pytest.approx(1.0 + 20.0)


def test_gathers_and_reductions_share_the_wire() -> None:
    both = elapsed_s([UnitRun(20, 1.0, gather_s=0.6, reduce_s=0.6)])
    assert both >= 20 * 1.2
    assert both == pytest.approx(20 * 1.2, rel=0.1)


def test_a_long_run_is_multiplied_and_not_followed() -> None:
    runs = [UnitRun(1, 0.1, 0.3), UnitRun(1000, 1.0, 0.7, 0.2), UnitRun(1, 0.5)]
    split = [UnitRun(1, 0.1, 0.3), *[UnitRun(1, 1.0, 0.7, 0.2)] * 1000, UnitRun(1, 0.5)]
    assert elapsed_s(runs) == pytest.approx(elapsed_s(split))


def test_contention_slows_by_what_is_hidden() -> None:
    runs = [UnitRun(10, 1.0, gather_s=0.5)]
    assert elapsed_s(runs, contention=0.2) - elapsed_s(runs) == pytest.approx(0.2 * 9 * 0.5)


def test_equal_blocks_are_dealt_out_as_any_blocks_are():
    """The short way gives the cut of the search over all of them, ties included."""
    for number in (1, 2, 5, 9, 13, 24):
        for stages in range(1, min(number, 7) + 1):
            for before, after in ((0.0, 0.0), (0.0, 0.5), (0.0, 3.3), (2.0, 5.0), (30.0, 1.0), (1.0, 1.0)):
                full = balanced_stages([1.7] * number, before * 1.7, after * 1.7, stages)
                assert even_stages(number, 1.7, before * 1.7, after * 1.7, stages) == full
    with pytest.raises(ValueError, match="3 blocks cannot be 4 stages"):
        even_stages(3, 1.0, 0.0, 0.0, 4)
