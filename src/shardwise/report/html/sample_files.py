"""Files of ``bench scaling`` and ``bench comm`` as curves and tables for a run's page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwise.cost.link_calibration import MeasuredLink, read_calibration
from shardwise.errors import UserError
from shardwise.measure.comm_facts import bus_factor
from shardwise.measure.scaling_facts import MODES, Mode, Scaling, ScalingRow, rows_of, warnings_of
from shardwise.report.html.run_record import BenchSamples, Curve
from shardwise.report.html.text import UNKNOWN, milliseconds, percent
from shardwise.units import count_text, counted, money_text, number_text


def together(*readers: Callable[[], BenchSamples | None]) -> list[BenchSamples | None]:
    """Call all readers and collect their results.

    Raises:
        UserError: the problems of all of them.
    """
    found: list[BenchSamples | None] = []
    problems: list[str] = []
    for reader in readers:
        try:
            found.append(reader())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def _document(option: str, path: Path, made_by: str) -> dict[str, Any]:
    rule = f"give the JSON file that {made_by} has written"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{option} '{path}': {error.strerror or error}; {rule}") from None
    except ValueError as error:
        raise UserError(f"{option} '{path}' is not JSON ({str(error).splitlines()[0]}); {rule}") from None
    if not isinstance(found, dict):
        raise UserError(f"{option} '{path}' contains no samples; {rule}")
    return found


def read_scaling(path: Path) -> BenchSamples:
    """Read throughput over devices, measured and predicted, and efficiency as a table.

    Raises:
        UserError: the file is not one of ``bench scaling``.
    """
    made_by = "shardwise bench scaling"
    document = _document("--scaling", path, made_by)
    try:
        found = Scaling.model_validate(document.get("scaling", document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"--scaling '{path}' contains no samples of {made_by} ({where}: {first['msg']}); give the JSON file it "
            "wrote"
        ) from None
    price = document.get("price_per_device_hour")
    curves: list[Curve] = []
    rows: list[tuple[str, ...]] = []
    for mode in MODES:
        measured = rows_of(found.of(mode), price if isinstance(price, int | float) else None) if found.of(mode) else []
        if measured:
            x = tuple(float(row.devices) for row in measured)
            y = tuple(row.tokens_per_s for row in measured)
            curves.append(Curve(name=f"{mode}, measured", group=f"{mode} scaling", x=x, y=y))
            rows += [_scaling_row(mode, row) for row in measured]
    curves += _predicted(document)
    curves += _linear(curves)
    head = (
        "devices",
        "scaling",
        "step",
        "tokens/s",
        "efficiency",
        "lost of a step",
        "last device adds",
        "$ / M tokens",
    )
    subject = found.subject
    notes = [f"Measured with {subject.model}, {subject.strategy}, {subject.precision}, on {subject.device}"]
    notes += [f"{line[:1].upper()}{line[1:]}" for line in warnings_of(found)]
    source = f"{path.name} ({made_by})"
    return BenchSamples(source=source, curves=tuple(curves), columns=head, rows=tuple(rows), notes=tuple(notes))


def _scaling_row(mode: Mode, row: ScalingRow) -> tuple[str, ...]:
    added = (
        "–"
        if row.added_tokens_per_s is None
        else f"{count_text(row.added_tokens_per_s)} tokens/s ({percent(row.worth)})"
    )
    each = "–" if row.dollars_per_million_tokens is None else money_text(row.dollars_per_million_tokens)
    known = "" if row.low == row.high else f" ({percent(row.low)} to {percent(row.high)})"
    span = f"{percent(row.efficiency)}{known}"
    speed = count_text(row.tokens_per_s)
    return f"{row.devices}", mode, milliseconds(row.step_s), speed, span, milliseconds(row.lost_s), added, each


def _linear(curves: Sequence[Curve]) -> list[Curve]:
    """Extrapolate the smallest size linearly; nothing for a single size."""
    sizes = [x for curve in curves for x in curve.x]
    if len(set(sizes)) < 2:
        return []
    first, last = min(sizes), max(sizes)
    each = max(curve.y[curve.x.index(first)] for curve in curves if first in curve.x) / first
    return [
        Curve(
            name="linear",
            group="linear, from the best at the smallest size",
            x=(first, last),
            y=(each * first, each * last),
            ideal=True,
        )
    ]


def _predicted(document: dict[str, Any]) -> list[Curve]:
    """Read the document's predicted curves; points without seconds are left out."""
    found = []
    for curve in document.get("curves") or ():
        points = [p for p in curve.get("points", ()) if p.get("tokens_per_s") and p.get("step_s")]
        if not points:
            continue
        mode = curve["mode"]
        bounds = all(p.get("low_s") and p.get("high_s") for p in points)
        per_s = [(p["tokens_per_s"], p["step_s"]) for p in points]
        low = tuple(t * s / p["high_s"] for (t, s), p in zip(per_s, points, strict=True)) if bounds else ()
        high = tuple(t * s / p["low_s"] for (t, s), p in zip(per_s, points, strict=True)) if bounds else ()
        x, y = tuple(float(p["devices"]) for p in points), tuple(t for t, _ in per_s)
        found.append(
            Curve(name=f"{mode}, predicted", group=f"{mode} scaling", x=x, y=y, low=low, high=high, predicted=True)
        )
    return found


def read_links(path: Path) -> BenchSamples:
    """Read bus bandwidth by message size, axis and collective, and the fits as a table.

    Raises:
        UserError: the file is not a calibration file of ``bench comm``; lists all problems.
    """
    if path.suffix == ".json":
        beside = path.with_suffix(".toml")
        raise UserError(f"--links '{path}' are raw samples; give the calibration file of that measurement: '{beside}'")
    try:
        file = read_calibration(path)
    except UserError as error:
        raise UserError(*(problem.replace("--calibration", "--links", 1) for problem in error.problems)) from None
    curves, rows = [], []
    several = len({link.axis for link in file.measured}) > 1
    for link in file.measured:
        factor = bus_factor(link.collective, link.ranks)
        name = f"{link.collective} on {link.axis}" if several else link.collective
        sizes = tuple(float(size) for size in link.sizes_bytes)
        speeds = tuple(factor * s / t / 1e9 for s, t in zip(link.sizes_bytes, link.median_s, strict=True))
        curves.append(Curve(name=name, group=name, x=sizes, y=speeds))
        rows.append(_link_row(link))
    head = ("collective", "axis", "ranks", "latency", "95 %", "bus bandwidth", "95 %")
    notes = (f"Measured on {counted(file.ranks, 'rank')} of {file.device_name}, {file.backend}, {file.date}",)
    source = f"{path.name} (shardwise bench comm)"
    return BenchSamples(source=source, curves=tuple(curves), columns=head, rows=tuple(rows), notes=notes)


def _link_row(link: MeasuredLink) -> tuple[str, ...]:
    latency, bus = link.latency_interval_s, link.bus_interval_bytes_per_s
    return (
        link.collective,
        link.axis,
        f"{link.ranks}",
        microseconds(link.latency_s),
        "–" if latency is None else f"{microseconds(latency[0])} to {microseconds(latency[1])}",
        gigabytes(link.bus_bytes_per_s),
        "–" if bus is None else f"{gigabytes(bus[0])} to {gigabytes(bus[1])}",
    )


def microseconds(seconds: float | None) -> str:
    """Format ``48 µs``; ``unknown`` for ``None``, a latency that was not identified."""
    return (
        UNKNOWN if seconds is None else f"{number_text(seconds * 1e6)} µs" if seconds < 1e-3 else milliseconds(seconds)
    )


def gigabytes(bytes_per_s: float | None) -> str:
    """Format ``1.21 GB/s``; ``unknown`` for ``None``."""
    return UNKNOWN if bytes_per_s is None else f"{number_text(bytes_per_s / 1e9)} GB/s"
