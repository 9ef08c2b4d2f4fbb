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
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
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
CONSTANTS = ("READ_PART", "LAYER_S", "ALL_REDUCE_S")
GRID = ((0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9), (4e-6, 8e-6, 12e-6, 16e-6, 24e-6, 32e-6), (6e-6, 12e-6, 18e-6, 24e-6))
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


def null_errors(rows: Sequence[Row], fitted_on: Sequence[Row]) -> list[float]:
    """Errors of the null model, its one constant from other rows."""
    slower = statistics.median(math.log1p(-error(r, ideal(r)) if False else _slower(r)) for r in fitted_on)
    scale = math.exp(slower)
    return [error(row, ideal(row) / scale if is_rate(row) else ideal(row) * scale) for row in rows]


def _slower(row: Row) -> float:
    """Measured time over the ideal one, minus 1."""
    return 1 / (1 + error(row, ideal(row))) - 1


def with_constants(values: Iterable[float]) -> None:
    for name, value in zip(CONSTANTS, values, strict=True):
        setattr(serving_time, name, value)


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """The constants of the grid with the least mean of the sources' median errors."""
    best = (math.inf, ())
    for values in itertools.product(*GRID):
        with_constants(values)
        by_source: dict[str, list[float]] = {}
        for row in rows:
            by_source.setdefault(row["source"], []).append(abs(math.log1p(error(row, predicted(row)))))
        score = statistics.mean(statistics.median(found) for found in by_source.values())
        best = min(best, (score, values))
    return best[1]


def left_out(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Errors of each timed row with constants fitted without its source: of the model, and of the null model."""
    shipped = [getattr(serving_time, name) for name in CONSTANTS]
    ours, null = {}, {}
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
