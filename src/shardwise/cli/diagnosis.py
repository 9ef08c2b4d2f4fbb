"""From a run that has ended to findings: what a job knows and what was measured, put together for `diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.measure.diagnosis import diagnose
from shardwise.measure.finding import Finding
from shardwise.measure.observed import DeviceState, HostUse, Save
from shardwise.measure.timing import Timing
from shardwise.search.alternatives import Alternative, alternatives
from shardwise.train.metrics import read_metrics

if TYPE_CHECKING:
    from shardwise.measure.state import Peaks
    from shardwise.measure.utilisation import AxisUse
    from shardwise.plan.plan import Plan
    from shardwise.spec.cluster import ClusterSpec
    from shardwise.spec.profile import ModelProfile
    from shardwise.spec.workload import Workload


def other_plans(
    profile: ModelProfile | None, workload: Workload, cluster: ClusterSpec, plan: Plan
) -> tuple[Alternative, ...]:
    """What else a step could be, for a job; nothing for a model that could not be traced."""
    from shardwise.errors import UserError

    if profile is None:
        return ()
    try:
        return alternatives(profile, workload, cluster, plan)
    except UserError:  # what cannot be costed is no alternative
        return ()


def findings_of(
    job: Any,
    session: Any,
    timing: Timing | None,
    *,
    host: HostUse | None = None,
    peaks: Peaks | None = None,
    cluster: ClusterSpec | None = None,
    others: Sequence[Alternative] = (),
    axes: Sequence[AxisUse] = (),
    gpus: Sequence[DeviceState] = (),
    mfu: float | None = None,
    price: float | None = None,
) -> tuple[Finding, ...]:
    """What the run of ``job`` lost time to; on rank 0, after the last step. What is left out stays unknown.

    ``peaks`` are the fullest rank's (the fit receipt's), ``axes`` what each axis sends in a step, ``price`` US dollars
    for an hour of a device.
    """
    from shardwise.measure.observe import observe

    if timing is None:
        return ()
    table = job.config.checkpoint
    seen = observe(
        session,
        timing,
        host=host,
        saves=saves_of(Path(job.config.train.output), after=session.first_step, background=table.async_save),
        save_every=table.every or None,
        traffic=bytes_by_axis(axes),
        cluster=cluster,
        peak_bytes=None if peaks is None else max(peaks.allocated.values(), default=None),
        predicted=job.step_time,
        alternatives=others,
        gpus=gpus,
        price=price,
        mfu=mfu,
    )
    return diagnose(seen)


def saves_of(output: Path, *, after: int, background: bool) -> tuple[Save, ...]:
    """The checkpoints that ``metrics.jsonl`` tells of, made after step ``after``."""
    return tuple(
        Save(
            step=line["step"],
            stall_s=line["checkpoint_stall_s"],
            write_s=line.get("checkpoint_write_s"),
            num_bytes=line.get("checkpoint_bytes"),
            background=background,
        )
        for line in read_metrics(output / "metrics.jsonl")
        if "checkpoint_stall_s" in line and line["step"] > after
    )


def bytes_by_axis(axes: Sequence[AxisUse]) -> dict[str, float]:
    """Bytes that a device sends in a step over ``dp``, ``tp`` and ``cp``; the data-parallel axes are one."""
    found: dict[str, float] = {}
    for use in axes:
        axis = "dp" if use.axis.startswith("dp") else use.axis
        found[axis] = found.get(axis, 0.0) + use.wire_bytes
    return found
