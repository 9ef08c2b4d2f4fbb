"""Costs corrected by what earlier runs on this machine have measured; see `shardwise.measure.history`."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.cost.estimate import Estimate
from shardwise.cost.steptime import StepTime
from shardwise.measure.history import Correction, read_history
from shardwise.plan.plan import Plan
from shardwise.search.search import Costs, default_costs
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.profile import ModelProfile
from shardwise.spec.workload import Workload

SECONDS = (
    *("step_s", "low_s", "high_s", "compute_s", "recompute_s", "exposed_dp_s", "exposed_tp_s", "exposed_cp_s"),
    *("pipeline_s", "optimizer_s", "offload_s", "host_s"),
)
RATES = ("tokens_per_s_per_device", "mfu")


def corrected_costs(cluster: ClusterSpec) -> Costs:
    """The cost model, times the median of measured over predicted of runs on ``cluster``'s kind of device.

    Unchanged where there are no such runs, or too few.
    """
    plain = default_costs()
    device = "CPU" if cluster.device == "cpu" else cluster.device_name
    history = read_history()
    bases = {run.base for run in history.runs}
    found = {base: history.correction(device, base) for base in bases}
    found = {base: one for base, one in found.items() if one.peak is not None or one.step is not None}
    return plain if not found else _wrapped(plain, lambda base: found.get(base))


def _wrapped(plain: Costs, correction_of: Callable[[str], Correction | None]) -> Costs:
    def estimate(profile: ModelProfile, plan: Plan, workload: Workload, cluster: ClusterSpec) -> Estimate:
        return corrected_memory(plain.estimate(profile, plan, workload, cluster), correction_of(plan.parsed.base))

    def step_time(profile: ModelProfile, plan: Plan, workload: Workload, cluster: ClusterSpec) -> StepTime:
        return corrected_time(plain.step_time(profile, plan, workload, cluster), correction_of(plan.parsed.base))

    return Costs(estimate=estimate, screen=plain.screen, step_time=step_time)


def corrected_memory(memory: Estimate, correction: Correction | None) -> Estimate:
    """The estimate with its peak, and what follows from it, moved by what runs have shown; categories stay."""
    ratio = None if correction is None else correction.peak
    if ratio is None or memory.allocated is None:
        return memory
    more = round(memory.allocated * (ratio.median - 1))
    moved = {
        name: max(0, value + more)
        for name in ("allocated", "reserved", "device")
        if (value := getattr(memory, name)) is not None
    }
    note = f"peak × {ratio.median:.3f}: the median of {ratio.count} runs on this machine"
    return memory.model_copy(update={**moved, "notes": (*memory.notes, note)})


def corrected_time(time: StepTime, correction: Correction | None) -> StepTime:
    """All seconds times what runs have shown."""
    ratio = None if correction is None else correction.step
    if ratio is None:
        return time
    note = f"step time × {ratio.median:.3f}: the median of {ratio.count} runs on this machine"
    told = "; ".join(part for part in (time.calibrated, note) if part)
    moved = {name: getattr(time, name) * ratio.median for name in SECONDS}
    rates = {name: value / ratio.median for name in RATES if (value := getattr(time, name)) is not None}
    return time.model_copy(update={**moved, **rates, "calibrated": told})
