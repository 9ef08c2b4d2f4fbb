"""Each source before, now and left out, and the source that is kept apart."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import holdout
import memory
import speed
from rows import Row, load_held_back
from targets import worst_first

Document = dict[str, Any]
BEFORE = Path(__file__).parent / "data" / "before.csv"  # medians of 23 November 2026, by the tables of that day


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def left_out_document() -> Document:
    """Median errors of step times by source, by factors inside a step that were fitted without it (`holdout.py`)."""
    found: dict[str, list[float]] = defaultdict(list)
    for held in holdout.held_back():
        found[held.source] += held.errors
    everything = [abs(error) for errors in found.values() for error in errors]
    rows = [
        {"source": source, "rows": len(errors), "left_out": _digits(statistics.median(map(abs, errors)))}
        for source, errors in sorted(found.items())
    ]
    return {"schema": 1, "median": _digits(statistics.median(everything)), "rows": rows}


def before() -> dict[tuple[str, str], Document]:
    """Medians of `BEFORE` by what was predicted and source."""
    with BEFORE.open(newline="") as file:
        return {
            (one["what"], one["source"]): {"rows": int(one["rows"]), "told": float(one["told"])}
            for one in csv.DictReader(file)
        }


def held_back_document() -> Document:
    """Every row of the source that is kept apart: step time, interval and whether it fits."""
    rows = load_held_back()
    timed, problems = speed.predict(rows)
    found = []
    for one in timed:
        row, measured = one.row, one.measured_s
        told, untold = memory.score(row), memory.score(row, told=False)
        stated = row.memory_kind == "fits"  # its recipe recomputes and offloads nothing that a plan does not say
        found.append(
            {
                "label": row.label,
                "framework": row.framework,
                "gpu": row.gpu,
                "kind": kind_of(row),
                "measured_s": _digits(measured),
                "predicted_s": _digits(one.predicted.step_s),
                "error": _digits(one.error),
                "untold_error": _digits(speed.seconds_of(row, plain=True).step_s / measured - 1),
                "null_error": _digits(one.null_error),
                "inside": one.predicted.low_s <= measured <= one.predicted.high_s,
                "fits": told.fits if stated else None,
                "untold_fits": untold.fits if stated else None,
            }
        )
    return {"schema": 1, "problems": problems, "rows": worst_first(found)}


def kind_of(row: Row) -> str:
    """Whether its model is a mixture of experts, and how tokens are sent to them."""
    if not any(unit.experts for unit in row.base.units):
        return "dense models"
    program = row.workload.program
    if program.overlaps_dispatch:
        return "mixtures, exchange hidden"
    return "mixtures, " + ("a copy for each expert" if program.expert_dispatch == "copies" else "once to each rank")
