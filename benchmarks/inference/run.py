"""Predictions of ``shardwise plan --serve`` against published measurements: ``rows.csv`` to ``README.md``.

``python benchmarks/inference/run.py --write`` writes the page; without it the page is only compared. ``--fit`` searches
the constants of ``cost/time/serving_time.py`` again and prints them.

A row is one of: ``decode`` (tokens/s of all sequences), ``itl_ms`` (milliseconds between tokens, while prompts of the
other sequences are read in between), ``first_token_ms``, ``throughput`` (output tokens/s of a static batch, its prompts
included), ``saturated`` (the same at maximum load; the batch is not published and taken as the most that fits, at most
`MOST_SEQUENCES`), ``weights_gib`` and ``cache_tokens`` (what an engine logged of its memory).
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.cost.memory.serving_memory import ENGINE_SHARE, served_weights, workspace_bytes
from shardwise.cost.time import serving_time
from shardwise.cost.time.machine import machine_of
from shardwise.cost.time.serving_time import Server
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.kv_cache import load_kv_cache
from shardwise.model.load_model import load_profile
from shardwise.units import GIB

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
MOST_SEQUENCES = 2048
TIMED = ("decode", "itl_ms", "first_token_ms", "throughput")
CONSTANTS = ("READ_PART", "LAYER_S", "ALL_REDUCE_S", "FIRST_TOKEN_S")
GRID = (
    (0.7, 0.75, 0.8, 0.85),
    (16e-6, 24e-6, 32e-6, 40e-6, 48e-6),
    (8e-6, 12e-6, 16e-6),
    (0.0, 3e-3, 6e-3),
)
Row = dict[str, Any]


def read_rows() -> list[Row]:
    """Rows of ``rows.csv`` with numbers as numbers."""
    with (HERE / "rows.csv").open(newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for row in rows:
        row["quant"] = row["quant"] or None
        for key in ("tp", "batch", "input", "output"):
            row[key] = float(row[key]) if "." in row[key] else int(row[key] or 0)
        row["kv_bytes"], row["value"] = float(row["kv_bytes"]), float(row["value"])
    return rows


@lru_cache(maxsize=256)
def server(model: str, gpu: str, tp: int, quant: Any, kv_bytes: float) -> Server:
    """The replica that a row describes."""
    cluster = parse_cluster(f"{tp}x{gpu}")
    profile = load_profile(model, seq_len=1024)
    return Server(
        profile=profile,
        cache=load_kv_cache(model),
        weights=served_weights(profile, quant, tp),
        machine=machine_of(cluster, "fp8" if quant == "fp8" and "fp8" in cluster.gpu.peak_flops else "bf16"),
        tp=tp,
        quant=quant,
        kv_itemsize=kv_bytes,
    )


def server_of(row: Row) -> Server:
    return server(row["model"], row["gpu"], row["tp"], row["quant"], row["kv_bytes"])


def most_sequences(row: Row) -> int:
    """Sequences of the row's mean length that fit, at most `MOST_SEQUENCES`."""
    one, context = server_of(row), row["input"] + row["output"] // 2
    memory = one.machine.cluster.device_memory_bytes * ENGINE_SHARE
    room = memory - one.weights.held_bytes - workspace_bytes(one.profile, context, MOST_SEQUENCES, one.tp)
    return max(1, min(MOST_SEQUENCES, int(room / one.cache.sequence_bytes(context, one.kv_itemsize, one.tp))))


def predicted(row: Row) -> float:
    """What the planner says, in the row's unit."""
    one, kind = server_of(row), row["kind"]
    if kind == "weights_gib":
        return one.weights.held_bytes / GIB
    if kind == "cache_tokens":
        return row["input"] * GIB / (one.cache.sequence_bytes(1024, one.kv_itemsize, one.tp) / 1024)
    batch = most_sequences(row) if kind == "saturated" else row["batch"]
    prefill = one.prefill_s(row["input"], batch)
    step = one.decode(batch, row["input"] + row["output"] // 2).step_s
    return in_unit(kind, batch, row["output"], prefill, step)


def in_unit(kind: str, batch: int, output: int, prefill_s: float, step_s: float) -> float:
    """Seconds as the published figure."""
    if kind == "decode":
        return batch / step_s
    if kind == "first_token_ms":
        return prefill_s * 1e3
    if kind == "itl_ms":
        return (step_s + (prefill_s if batch > 1 else 0.0) / output) * 1e3
    return batch * output / (prefill_s + output * step_s)


def ideal(row: Row) -> float:
    """The null model without its constant: data sheet rates, every weight and cache byte read once, nothing else."""
    one, gpu = server_of(row), server_of(row).machine.gpu
    peak = gpu.peak_flops.get(one.precision) * one.tp
    bandwidth = gpu.memory_bytes_per_s * one.tp
    active, held = one.profile.num_active, one.weights.held_bytes * one.tp
    batch = most_sequences(row) if row["kind"] == "saturated" else row["batch"]
    cache = one.cache.sequence_bytes(row["input"] + row["output"] // 2, one.kv_itemsize)
    prefill = 2 * active * batch * row["input"] / peak
    step = max((held + batch * cache) / bandwidth, 2 * active * batch / peak)
    return in_unit(row["kind"], batch, row["output"], prefill, step)


def is_rate(row: Row) -> bool:
    return row["kind"] not in ("itl_ms", "first_token_ms")


def error(row: Row, value: float) -> float:
    """Relative error in time: above 0 where the prediction is too slow."""
    return row["value"] / value - 1 if is_rate(row) else value / row["value"] - 1


def slower(row: Row, value: float) -> float:
    """Measured seconds over predicted ones."""
    return 1 / (1 + error(row, value))


def null_errors(rows: Sequence[Row], fitted_on: Sequence[Row]) -> list[float]:
    """Errors of the null model, its one constant from other rows."""
    scale = statistics.median(slower(row, ideal(row)) for row in fitted_on)
    return [error(row, ideal(row) / scale if is_rate(row) else ideal(row) * scale) for row in rows]


def with_constants(values: Sequence[float]) -> None:
    """Set the constants of the model."""
    for name, value in zip(CONSTANTS, values, strict=True):
        setattr(serving_time, name, value)


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """The constants of the grid with the least mean of the sources' median errors."""
    best: tuple[float, tuple[float, ...]] = (math.inf, ())
    for values in itertools.product(*GRID):
        with_constants(values)
        by_source: dict[str, list[float]] = {}
        for row in rows:
            by_source.setdefault(row["source"], []).append(abs(math.log1p(error(row, predicted(row)))))
        best = min(best, (statistics.mean(map(statistics.median, by_source.values())), values))
    return best[1]


def left_out(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Errors of each timed row with constants fitted without its source: of the model, and of the null model."""
    shipped = [getattr(serving_time, name) for name in CONSTANTS]
    ours, null = dict[int, float](), dict[int, float]()
    try:
        for source in dict.fromkeys(row["source"] for row in rows):
            others = [row for row in rows if row["source"] != source]
            asked = [(n, row) for n, row in enumerate(rows) if row["source"] == source]
            with_constants(fit(others))
            ours |= {n: error(row, predicted(row)) for n, row in asked}
            null |= dict(zip([n for n, _ in asked], null_errors([row for _, row in asked], others), strict=True))
    finally:
        with_constants(shipped)
    return [ours[n] for n in range(len(rows))], [null[n] for n in range(len(rows))]


def spread(errors: Iterable[float]) -> tuple[float, float]:
    """Middle 80 % of measured over predicted seconds."""
    deciles = statistics.quantiles([1 / (1 + one) for one in errors], n=10, method="inclusive")
    return deciles[0], deciles[-1]


def page() -> str:
    """The page, from the rows."""
    rows = read_rows()
    timed = [row for row in rows if row["kind"] in TIMED]
    full = [row for row in rows if row["kind"] == "saturated"]
    logged = [row for row in rows if row["kind"] in ("weights_gib", "cache_tokens")]
    ours, null = left_out(timed)
    full_ours = [error(row, predicted(row)) for row in full]
    full_null = null_errors(full, timed)
    low, high = spread([*ours, *full_ours])
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, one, other in zip(timed, ours, null, strict=True):
        groups.setdefault(KINDS[row["kind"]], []).append((one, other))
        groups.setdefault(f"from {re.sub(r'-v?[0-9.]+$', '', row['engine'])}", []).append((one, other))
    groups["**all, without the row's source in the fit**"] = list(zip(ours, null, strict=True))
    groups["**maximum load, not used in any fit**"] = list(zip(full_ours, full_null, strict=True))
    lines = [
        "| rows | number | median error | 90 % within | null model, median | 90 % within |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, found in groups.items():
        cells = [f"{part(found, 0, 0.5)} | {part(found, 0, 0.9)} | {part(found, 1, 0.5)} | {part(found, 1, 0.9)}"]
        lines.append(f"| {name} | {len(found)} | {cells[0]} |")
    memory = ["| what an engine logged | measured | predicted | error |", "|---|---:|---:|---:|"]
    for row in logged:
        unit = "GiB of weights on a rank" if row["kind"] == "weights_gib" else "tokens of cache"
        what = f"{row['model']} {row['quant'] or ''} tp={row['tp']}, {unit}"
        value = predicted(row)
        memory.append(
            f"| {what} ({row['source']}) | {row['value']:,.6g} | {value:,.6g} | {value / row['value'] - 1:+.1%} |"
        )
    every = [
        "| engine | GPU | tp | model | weights | what | batch | in/out | measured | predicted | error |",
        "|---" * 11 + "|",
    ]
    shipped = [
        *zip(timed, [error(row, predicted(row)) for row in timed], strict=True),
        *zip(full, full_ours, strict=True),
    ]
    for row, one in shipped:
        batch = row["batch"] or f"({most_sequences(row)})"
        cells = [row["engine"], row["gpu"], row["tp"], row["model"], row["quant"] or "16-bit", row["kind"], batch]
        cells += [f"{row['input']}/{row['output']}", f"{row['value']:,g}", f"{predicted(row):,.4g}", f"{one:+.0%}"]
        every.append("| " + " | ".join(map(str, cells)) + " |")
    sources = "\n".join(f"- {source}" for source in dict.fromkeys(row["source"] for row in rows))
    return TEXT.format(
        errors="\n".join(lines), memory="\n".join(memory), rows="\n".join(every), sources=sources, low=low, high=high,
        constants=", ".join(f"`{name}` {getattr(serving_time, name):g}" for name in CONSTANTS),
    )  # fmt: skip


def part(found: Sequence[tuple[float, float]], which: int, share: float) -> str:
    """A quantile of the sizes of errors."""
    sizes = sorted(abs(pair[which]) for pair in found)
    return f"{sizes[min(len(sizes) - 1, math.ceil(share * len(sizes)) - 1)]:.0%}"


KINDS = {
    "decode": "decode, one sequence",
    "itl_ms": "time between tokens",
    "first_token_ms": "first token",
    "throughput": "static batch, prompts included",
}
TEXT = """<!-- written by run.py from rows.csv; edit run.py, not this file -->
# How right `plan --serve` is

`python benchmarks/inference/run.py` predicts every published row of [rows.csv](rows.csv) again and compares this page;
`--write` writes it, `--fit` searches the constants of the model again. Errors are relative and of time; above 0 is
predicted too slow. The error of a row is that with constants fitted without its source.

**The null model** reads every byte of weights and cache once at the data sheet's bandwidth, computes at the data
sheet's peak, and has one constant for everything else, fitted without the row's source.

{errors}

Where the model is wrong: TensorRT-LLM 0.6 on several H100s with grouped heads (Llama-2-70B, Falcon-180B) was up to 2.5
times slower than predicted, and later engines are not; prompts of 128 tokens (a few milliseconds, which the host
determines); int8 weights of gpt-fast; at maximum load large models with long answers, where predictions are up to 38 %
too fast. Everything is a measurement of NVIDIA GPUs with engines of 2023 to 2026; nothing here was measured by us.

The middle 80 % of measured over predicted seconds is {low:.2f} to {high:.2f}; `SPREAD` of
`cost/time/serving_time.py` rounds it outwards. Constants: {constants}.

## Memory

{memory}

## Every row, with the constants that ship

A batch in brackets is not published: it is the most that is predicted to fit, at most 2,048.

{rows}

## Sources

{sources}
"""


def main() -> None:
    """Write the page, compare it, or search the constants."""
    if "--fit" in sys.argv[1:]:
        print(dict(zip(CONSTANTS, fit([row for row in read_rows() if row["kind"] in TIMED]), strict=True)))
        return
    new = page()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new)
    elif PAGE.read_text() != new:
        raise SystemExit(f"{PAGE} is old; write it anew with --write")


if __name__ == "__main__":
    main()
