"""Correct costs by measurements: links, and whole runs.

Links are from ``bench comm`` (`shardwise.cost.link_calibration`), runs from earlier ones on this machine
(`shardwise.measure.history`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardwise.cost.compute_calibration import MeasuredCompute
from shardwise.cost.link_calibration import FIX, CalibrationFile, check_calibration, covers, read_calibration
from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.time.step_time import StepTime
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.cpu import processor_name
from shardwise.measure.history import Correction, read_history
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.search.problem import Costs, default_costs
from shardwise.units import counted

SECONDS = (
    *("step_s", "low_s", "high_s", "compute_s", "recompute_s", "exposed_dp_s", "exposed_tp_s", "exposed_cp_s"),
    *("exposed_ep_s", "pipeline_s", "optimizer_s", "offload_s", "host_s"),
)
NOT_MEASURED = "in fp32 with AdamW or SGD, without convolutions, experts, 4-bit weights, documents and compiled blocks"
RATES = ("samples_per_s_per_device", "tokens_per_s_per_device", "mfu")


def read_links(path: Path, cluster: ClusterSpec, threads: int | None = None) -> tuple[CalibrationFile, list[str]]:
    """Read a ``bench comm`` file for plans on ``cluster``; also describe its changes and gaps.

    What CPU ranks with another number of ``threads`` computed is left out; ``None`` takes any.

    Raises:
        UserError: it cannot be read, or was measured on a different cluster.
    """
    links = read_calibration(path)
    notes, measured = links_told(links, cluster, name=str(path)), links.compute
    if cluster.device == "cpu" and measured is not None and threads not in (None, measured.threads):
        why = f"measured with {counted(measured.threads, 'thread')} a rank, and parallel.threads is {threads}"
        fix = f"make them equal, or measure again with OMP_NUM_THREADS={threads}"
        told = f"--calibration has no effect on this plan: it was {why}; {fix}"
        return links.model_copy(update={"compute": None}), [told]
    return links, notes


def links_told(links: CalibrationFile, cluster: ClusterSpec, *, name: str = "") -> list[str]:
    """Describe the effect of measured links on plans for ``cluster``, and their gaps.

    Raises:
        PlanError: they were measured on a different cluster.
    """
    notes = check_calibration(links, cluster, processor=processor_name(), name=name)
    if cluster.device == "cpu" and compute_of(links, cluster) is None:
        measured = counted(links.devices_per_node, "rank")
        why = f"measured with {measured} a node, and the plan has {cluster.devices_per_node}"
        if links.compute is None:
            why = "made by an earlier version, which did not measure how fast a CPU computes"
        fix = f"; {FIX} --nproc {cluster.devices_per_node}" if cluster.world_size > 1 else ""  # needs two ranks
        return [f"--calibration has no effect on this plan: it was {why}{fix}"]
    if cluster.device == "cpu" and notes:  # there is no catalogue to stand in
        return [f"--calibration has no effect on this plan, as {notes[0].partition(';')[0]}; {FIX} --max-size 256MiB"]
    beside = f"; {NOT_MEASURED}" if cluster.device == "cpu" else ""
    return [f"times are over {links.says()}{beside}", *notes]


def compute_of(links: CalibrationFile, cluster: ClusterSpec) -> MeasuredCompute | None:
    """Return what was measured of a CPU's ranks, if as many share the cores; None for GPUs, which are in a table."""
    alike = cluster.device == "cpu" and links.devices_per_node == cluster.devices_per_node
    return links.compute if alike else None


def corrected_costs(cluster: ClusterSpec, links: CalibrationFile | None = None) -> Costs:
    """Return the cost model scaled by the median of measured over predicted on this device.

    Unchanged if there are no such runs, or too few. With measured ``links`` they determine the time, and runs correct
    the memory alone: time corrections from runs apply to predictions with the catalogue's links.
    """
    plain = default_costs() if links is None else _over(links, cluster)
    device = "CPU" if cluster.device == "cpu" else cluster.device_name
    history = read_history()
    bases = {run.base for run in history.runs}
    found = {base: history.correction(device, base) for base in bases}
    found = {base: one for base, one in found.items() if one.peak is not None or one.step is not None}
    if links is not None:
        found = {base: one.model_copy(update={"step": None}) for base, one in found.items()}
    return plain if not found else _wrapped(plain, lambda base: found.get(base))


def _over(links: CalibrationFile, cluster: ClusterSpec) -> Costs:
    """Return the cost model over measured links, with their name in its calibration note."""
    compute = compute_of(links, cluster)
    plain = default_costs(None if compute is None else compute.rates(), links.calibration())

    def step_time(profile: ModelProfile, plan: Plan, workload: Workload, cluster: ClusterSpec) -> StepTime:
        time = plain.step_time(profile, plan, workload, cluster)
        notes = "; ".join(part for part in (time.calibrated, links.says()) if part)
        return time.model_copy(update={"calibrated": notes})

    precisions = frozenset() if compute is None else frozenset({compute.precision})
    return replace(plain, step_time=step_time, links_known=covers(links, cluster), measured=precisions)


def _wrapped(plain: Costs, correction_of: Callable[[str], Correction | None]) -> Costs:
    def estimate(profile: ModelProfile, plan: Plan, workload: Workload, cluster: ClusterSpec) -> Estimate:
        own = correction_of(plan.parsed.base) if workload.program.is_own else None  # runs of ``train``
        return corrected_memory(plain.estimate(profile, plan, workload, cluster), own)

    def step_time(profile: ModelProfile, plan: Plan, workload: Workload, cluster: ClusterSpec) -> StepTime:
        own = correction_of(plan.parsed.base) if workload.program.is_own else None
        return corrected_time(plain.step_time(profile, plan, workload, cluster), own)

    return replace(plain, estimate=estimate, step_time=step_time)


def corrected_memory(memory: Estimate, correction: Correction | None) -> Estimate:
    """Return the estimate with its peak corrected by past runs; categories stay."""
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
    """Scale all seconds by the correction of past runs."""
    ratio = None if correction is None else correction.step
    if ratio is None:
        return time
    note = f"step time × {ratio.median:.3f}: the median of {ratio.count} runs on this machine"
    notes = "; ".join(part for part in (time.calibrated, note) if part)
    moved = {name: getattr(time, name) * ratio.median for name in SECONDS}
    rates = {name: value / ratio.median for name in RATES if (value := getattr(time, name)) is not None}
    return time.model_copy(update={**moved, **rates, "calibrated": notes})
