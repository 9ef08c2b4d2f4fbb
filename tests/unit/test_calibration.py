"""Costs corrected by the history of this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.time.step_time import StepTime
from shardwise.hardware.cluster import ClusterSpec
from shardwise.measure.history import Correction, Ratio
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.run import calibration
from shardwise.run.calibration import SECONDS, corrected_memory, corrected_time
from shardwise.search.problem import Costs

MEMORY = Estimate(
    parameters=100,
    gradients=100,
    optimizer=200,
    activations=500,
    logits=0,
    buffers=0,
    context=50,
    allocated=1000,
    reserved=1100,
    device=1150,
)
TIME = StepTime(step_s=2.0, low_s=1.8, high_s=2.2, compute_s=1.5, exposed_dp_s=0.5)
MORE = Correction(
    peak=Ratio(median=1.1, low=1.0, high=1.2, count=5), step=Ratio(median=1.5, low=1.4, high=1.6, count=7)
)


def test_memory_moves_the_peak_and_keeps_the_exact_parts():
    found = corrected_memory(MEMORY, MORE)
    assert (found.allocated, found.reserved, found.device) == (1100, 1200, 1250)
    assert (found.parameters, found.optimizer) == (100, 200)
    assert found.notes == ("peak × 1.100: the median of 5 runs on this machine",)


def test_time_scales_as_a_whole():
    found = corrected_time(TIME, MORE)
    assert [getattr(found, name) for name in SECONDS] == pytest.approx([1.5 * getattr(TIME, name) for name in SECONDS])
    assert found.calibrated == "step time × 1.500: the median of 7 runs on this machine"
    assert {name for name in StepTime.model_fields if name.endswith("_s") and name != "tokens_per_s"} == set(SECONDS)


@pytest.mark.parametrize("correction", [None, Correction()])
def test_without_runs_nothing_changes(correction):
    assert corrected_memory(MEMORY, correction) is MEMORY and corrected_time(TIME, correction) is TIME


def test_rates_fall_as_times_rise():
    found = corrected_time(TIME.model_copy(update={"tokens_per_s_per_device": 300.0, "mfu": 0.6}), MORE)
    assert found.tokens_per_s_per_device == pytest.approx(200) and found.mfu == pytest.approx(0.4)


def test_by_strategy_and_device(monkeypatch):
    """Runs of fsdp on CPU correct fsdp plans on CPU, and nothing else."""

    class Told:
        runs = (SimpleNamespace(base="fsdp"),)

        def correction(self, device: str, base: str) -> Correction:
            return MORE if (device, base) == ("CPU", "fsdp") else Correction()

    plain = Costs(lambda *a: MEMORY, lambda *a: 0, lambda *a: TIME)
    monkeypatch.setattr(calibration, "default_costs", lambda: plain)
    monkeypatch.setattr(calibration, "read_history", Told)
    here = ClusterSpec(device="cpu", device_name="CPU")
    costs = calibration.corrected_costs(here)
    for strategy, peak, step_s in (("fsdp", 1100, 3.0), ("ddp", 1000, 2.0)):
        plan = Plan(strategy=strategy)
        assert costs.estimate(None, plan, Workload(), here).allocated == peak
        assert costs.step_time(None, plan, Workload(), here).step_s == step_s
    assert calibration.corrected_costs(ClusterSpec(device="cuda", device_name="T4")) is plain
