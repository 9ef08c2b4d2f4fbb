"""Predicted against published memory: every row, the worst first; figures by source. ``memory.py [source ...]``."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass

from rows import Row, load_rows

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import estimate
from shardwise.units import GIB

COMPARED = {"allocated": "allocated", "active": "allocated", "reserved": "reserved", "device": "device"}


@dataclass(frozen=True)
class Scored:
    """A row, what was predicted for it, and the relative error where a number was published."""

    row: Row
    estimate: Estimate
    error: float | None
    reserved_error: float | None

    @property
    def fits(self) -> bool | None:
        """What the estimate says; ``None`` where the device's memory is not known."""
        memory, device = self.row.cluster.device_memory_bytes, self.estimate.device
        return None if memory is None or device is None else device <= memory


def score(row: Row, *, told: bool = True) -> Scored:
    """Predict one row with ``--program``, or, unless ``told``, without it."""
    one = row if told else row.default()
    return _scored(row, estimate(one.profile, one.plan, one.workload, one.cluster))


def _scored(row: Row, found: Estimate) -> Scored:
    name = COMPARED.get(row.memory_kind)
    error = None
    if row.memory_bytes and name and not row.oom:
        error = getattr(found, name) / row.memory_bytes - 1
    both = found.reserved / row.reserved_bytes - 1 if row.reserved_bytes and found.reserved and not row.oom else None
    return Scored(row, found, error, both)


def line(scored: Scored) -> str:
    """One row of the table, GiB."""
    row, found = scored.row, scored.estimate
    parts = " ".join(
        f"{name[:3]} {(getattr(found, name) or 0) / GIB:.1f}"
        for name in ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    )
    measured = f"{row.memory_bytes / GIB:.2f}" if row.memory_bytes else "-"
    also = "" if scored.reserved_error is None else f" (reserved {scored.reserved_error:+.1%})"
    shown = "" if scored.error is None else f"{scored.error:+7.1%}"
    totals = " / ".join(f"{(getattr(found, name) or 0) / GIB:.2f}" for name in ("allocated", "reserved", "device"))
    return f"{shown:>8} {row.memory_kind:9} {measured:>7} | {totals} | {parts} | {row.label}{also}"


def report(scored: list[Scored]) -> list[str]:
    """The whole text."""
    with_error = sorted((s for s in scored if s.error is not None), key=lambda s: -abs(s.error or 0))
    lines = ["error    kind      measured | predicted allocated / reserved / device | at their most | row (GiB)"]
    lines += [line(s) for s in with_error]
    by_source: dict[str, list[float]] = defaultdict(list)
    for s in with_error:
        by_source[f"{s.row.source} {s.row.memory_kind}"].append(s.error or 0.0)
        if s.reserved_error is not None:
            by_source[f"{s.row.source} reserved (second column)"].append(s.reserved_error)
    lines += ["", "median |error|   median error   worst   rows"]
    for name, errors in sorted(by_source.items()):
        lines.append(_summary(name, errors))
    like = [s.error or 0.0 for s in with_error if s.row.memory_kind in ("allocated", "reserved", "active")]
    lines.append(_summary("ALL allocated, active, reserved", like) if like else "no rows")
    torch = [
        s.error or 0.0
        for s in with_error
        if s.row.memory_kind != "device" and not s.row.framework.startswith(("Megatron", "OneFlow"))
    ]
    if torch:
        lines.append(_summary("the same without Megatron, whose weights, gradients and state have other widths", torch))
    oom = [s for s in scored if s.row.oom]
    ran = [s for s in scored if not s.row.oom and (s.row.memory_bytes or s.row.memory_kind == "fits")]
    missed = [s for s in oom if s.fits]
    refused = [s for s in ran if s.fits is False]
    lines += ["", f"out of memory: {len(oom)} rows, {len(missed)} called fits"]
    lines += [f"  {line(s)}" for s in oom]
    lines.append(f"ran: {len(ran)} rows, {len(refused)} called does not fit ({len(refused) / max(1, len(ran)):.1%})")
    lines += [f"  {line(s)}" for s in refused]
    unknown = sum(s.fits is None for s in [*oom, *ran])
    return [*lines, f"device memory unknown: {unknown} rows"]


def _summary(name: str, errors: list[float]) -> str:
    absolute = [abs(e) for e in errors]
    middle = statistics.median(absolute)
    return f"{middle:8.1%} {statistics.median(errors):+14.1%} {max(absolute):10.1%} {len(errors):5}   {name}"


def main() -> None:
    """Print the table of the sources named on the command line, or of all; ``--untold`` knows no framework."""
    told, sources = "--untold" not in sys.argv, [word for word in sys.argv[1:] if not word.startswith("-")]
    rows = [row for row in load_rows(*sources) if row.memory_bytes or row.oom or row.memory_kind == "fits"]
    print("\n".join(report([score(row, told=told) for row in rows])))


if __name__ == "__main__":
    main()
