"""Report of ``bench comm``: the table, the verdicts, and its three output files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.bench.comm.fit_links import fit
from shardwise.bench.comm.judge_links import LinkVerdict, judge, latency_text, rate_text, uneven_groups
from shardwise.bench.plots import draw_links
from shardwise.cost.link_calibration import CalibrationFile, MeasuredLink
from shardwise.errors import MachineError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.measure.comm_facts import CommFit, CommSamples
from shardwise.units import bytes_text

BENT = 0.5  # of a median: minimum error of latency and bandwidth that is reported


def conclude(
    cluster: ClusterSpec, facts: dict[str, Any], found: Sequence[CommSamples], output: Path, console: Console
) -> dict[str, Any]:
    """Fit, compare, print, write the files into ``output``; returns the document of ``--json``.

    The files are the samples, the calibration and the plot.

    Raises:
        MachineError: a file cannot be written.
    """
    fits = [fit(one) for one in found]
    verdicts = [judge(one, its, cluster) for one, its in zip(found, fits, strict=True)]
    notes = uneven_groups(found) + _left_out(found, fits)
    name = "_".join(
        [
            f"links_{str(facts['device_name']).replace(' ', '-').lower()}_{facts['ranks']}-ranks",
            *([f"{facts['nodes']}-nodes"] if facts["nodes"] > 1 else []),
            str(facts["strategy"]),
            str(facts["date"]),
        ]
    )
    file = calibration_file(facts, found, fits)
    samples, calibration = output / f"{name}.json", output / f"{name}.toml"
    document = as_document(facts, found, fits, verdicts, notes) | {
        "samples_file": str(samples),
        "calibration_file": str(calibration),
    }
    try:
        samples.write_text(json.dumps(document, indent=1) + "\n")
        calibration.write_text(file.to_toml())
    except OSError as error:
        raise MachineError(f"'{error.filename}' cannot be written: {error.strerror}; choose another --output") from None
    console.print(link_table(found, fits, facts))
    for verdict in verdicts:
        if verdict.ratio is not None or verdict.collective == "send":
            console.print(verdict.text, markup=False)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"raw samples: {samples}", markup=False)
    console.print(f"calibration: {calibration} (shardwise plan MODEL --calibration {calibration})", markup=False)
    plot = samples.with_suffix(".png")
    plot_note = f"plot: {plot}" if draw_links(document, plot) else "no plot: matplotlib is not installed"
    console.print(plot_note, markup=False)
    return document


def calibration_file(facts: dict[str, Any], found: Sequence[CommSamples], fits: Sequence[CommFit]) -> CalibrationFile:
    """Build the calibration file for ``plan``."""
    measured = [
        MeasuredLink(
            collective=one.collective,
            axis=one.axis,
            where=one.where,
            ranks=one.ranks,
            per_node=one.per_node,
            groups=len(one.groups),
            sizes_bytes=one.sizes_bytes,
            median_s=one.median_s,
            **its.model_dump(exclude={"misfit"}),
        )
        for one, its in zip(found, fits, strict=True)
    ]
    return CalibrationFile.model_validate({"schema": 1, "kind": "links", **facts, "measured": measured})


def as_document(
    facts: dict[str, Any],
    found: Sequence[CommSamples],
    fits: Sequence[CommFit],
    verdicts: Sequence[LinkVerdict],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Build the JSON document: all measurements and results, also the file of raw samples."""
    return {
        "schema": 1,
        "kind": "links",
        **facts,
        "measured": [
            {
                **one.model_dump(mode="json"),
                "median_s": one.median_s,
                "algorithm_bytes_per_s": one.algorithm_bytes_per_s,
                "bus_bytes_per_s_by_size": one.bus_bytes_per_s,
                **its.model_dump(mode="json"),
            }
            for one, its in zip(found, fits, strict=True)
        ],
        "links": [verdict.model_dump(mode="json") for verdict in verdicts],
        "notes": list(notes),
    }


def link_table(found: Sequence[CommSamples], fits: Sequence[CommFit], facts: dict[str, Any]) -> Table:
    """Build a table with a row for each collective on each axis."""
    title = f"{facts['ranks']} ranks, {facts['backend']}, {facts['device_name']}: latency and bandwidth, 95 % intervals"
    table = Table(title=title, title_justify="left")
    columns = ("axis", "ranks", "collective", "latency", "", "bus bandwidth", "", "largest", "algbw", "busbw")
    for column in columns:
        table.add_column(column, justify="left" if column in ("axis", "collective") else "right", no_wrap=True)
    for one, its in zip(found, fits, strict=True):
        per_node = "" if one.where == "node" else f" ({one.per_node} a node)"
        table.add_row(
            one.axis,
            f"{one.ranks}{per_node}",
            one.collective,
            latency_text(its.latency_s),
            _interval(its.latency_interval_s, latency_text),
            rate_text(its.bus_bytes_per_s),
            _interval(its.bus_interval_bytes_per_s, rate_text),
            bytes_text(one.sizes_bytes[-1]),
            rate_text(one.algorithm_bytes_per_s[-1]),
            rate_text(one.bus_bytes_per_s[-1]),
        )
    return table


def _interval(ends: tuple[float, float] | None, text: Any) -> str:
    return "" if ends is None else f"{text(ends[0])} to {text(ends[1])}"


def _left_out(found: Sequence[CommSamples], fits: Sequence[CommFit]) -> list[str]:
    """List sizes above the time limit, and values that the sizes do not determine."""
    lines = []
    for one, its in zip(found, fits, strict=True):
        what = f"{one.collective} on {one.axis}"
        if one.left_out_bytes:
            lines.append(
                f"{what}: {bytes_text(one.left_out_bytes[0])} and more would not have fitted into --seconds; give more"
            )
        if its.bus_bytes_per_s is None:
            fix = "" if one.left_out_bytes else "; raise --max-size"
            lines.append(f"{what}: even the largest message is mostly latency, bandwidth unknown{fix}")
        elif its.latency_s is None:
            lines.append(f"{what}: even the smallest message is mostly bytes, latency unknown; lower --min-size")
        elif its.misfit is not None and its.misfit > BENT:
            lines.append(
                f"{what}: latency and bandwidth miss a size by {its.misfit:.0%}; plan reads the measured sizes instead"
            )
    return lines
