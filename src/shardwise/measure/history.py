"""Prediction history of this machine: predicted and measured values, one JSON line per run.

Stored in the user's data folder (`shardwise.environment.history_file`), never in a repository, never sent
anywhere. A line has a device's name, versions and numbers: no path, no name of a model or a data set. No torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.environment import history_file
from shardwise.hardware.gpus import find_gpu
from shardwise.train.metrics import read_metrics

KEPT_RUNS = 500
"""Lines that are kept when the file is truncated, which happens at twice as many."""

MIN_RUNS = 3
"""Smallest number of runs for a correction."""


class PastRun(BaseModel):
    """Past run.

    Peaks are allocated bytes on the fullest rank, steps are seconds; predictions are those of the cost
    model before any correction. ``base`` is the strategy without its ``+`` parts.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    schema_version: int = 1
    time_s: float
    device: str
    torch: str
    shardwise: str
    base: str
    world_size: int
    planned_peak: int | None = None
    found_peak: int | None = None
    planned_step_s: float | None = None
    found_step_s: float | None = None

    @property
    def peak_ratio(self) -> float | None:
        """Measured over predicted peak; None if either is missing."""
        return _ratio(self.found_peak, self.planned_peak)

    @property
    def step_ratio(self) -> float | None:
        """Measured over predicted step time; None if either is missing."""
        return _ratio(self.found_step_s, self.planned_step_s)


class Ratio(BaseModel):
    """Measured over predicted: the median of ``count`` runs, and the range of their middle half."""

    model_config = ConfigDict(frozen=True)

    median: float
    low: float
    high: float
    count: int


class Correction(BaseModel):
    """Correction of similar predictions from the history; ``None`` parts below `MIN_RUNS` runs."""

    model_config = ConfigDict(frozen=True)

    peak: Ratio | None = None
    step: Ratio | None = None


class History(BaseModel):
    """Runs that could be read, oldest first, and the number of unreadable lines."""

    model_config = ConfigDict(frozen=True)

    runs: tuple[PastRun, ...] = ()
    ignored_lines: int = 0

    def correction(self, device: str, base: str) -> Correction:
        """Compute the correction from runs on ``device`` under ``base`` with the installed versions."""
        wanted = (device_key(device), base, *_versions())
        alike = [run for run in self.runs if (run.device, run.base, run.torch, run.shardwise) == wanted]
        peaks, steps = (run.peak_ratio for run in alike), (run.step_ratio for run in alike)
        return Correction(peak=_summary(peaks), step=_summary(steps))


def device_key(name: str) -> str:
    """Normalize a device's name: that of the hardware table, if it has the device."""
    gpu = find_gpu(name)
    return name if gpu is None else gpu.name


def read_history(file: Path | None = None) -> History:
    """Read the history; a missing or unreadable file is empty, a broken line is counted."""
    path = file or history_file()
    if path is None:
        return History()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return History()
    runs = [_parsed(line) for line in lines if line.strip()]
    found = tuple(run for run in runs if run is not None)
    return History(runs=found, ignored_lines=len(runs) - len(found))


def remember(
    *,
    device: str,
    base: str,
    world_size: int,
    planned_peak: int | None = None,
    found_peak: int | None = None,
    planned_step_s: float | None = None,
    found_step_s: float | None = None,
    file: Path | None = None,
) -> str:
    """Add a run to the history; return the error text, empty on success.

    Safe beside other runs: the line is written by one call under a lock. A run without measurements is not added.
    """
    path = file or history_file()
    if path is None or (found_peak is None and found_step_s is None):
        return ""
    torch_version, own_version = _versions()
    run = PastRun(
        time_s=round(time.time(), 3),
        device=device_key(device),
        torch=torch_version,
        shardwise=own_version,
        base=base,
        world_size=world_size,
        planned_peak=planned_peak,
        found_peak=found_peak,
        planned_step_s=planned_step_s,
        found_step_s=found_step_s,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _append(path, (run.model_dump_json(exclude_none=True) + "\n").encode())
            _trim(path)
    except OSError as error:
        return f"the history '{path}' cannot be written: {error.strerror}; set SHARDWISE_HISTORY=off or another file"
    return ""


def median_step_s(metrics: Path, after_step: int) -> float | None:
    """Median step seconds in ``metrics.jsonl``, from the third line after ``after_step`` on.

    The first steps still allocate and are inspected by the receipts; evaluations and checkpoints are excluded.
    ``None`` with fewer than three such lines.
    """
    lines = [line for line in read_metrics(metrics) if line.get("step", 0) > after_step]
    times = [float(line["step_time_s"]) for line in lines if "step_time_s" in line]
    steady = times[3:]
    return statistics.median(steady) if len(steady) >= 3 else None


def _ratio(found: float | None, planned: float | None) -> float | None:
    if found is None or not planned or planned < 0 or found <= 0:
        return None
    ratio = found / planned
    return ratio if math.isfinite(ratio) else None


def _summary(ratios: Iterable[float | None]) -> Ratio | None:
    known = sorted(ratio for ratio in ratios if ratio is not None)
    if len(known) < MIN_RUNS:
        return None
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive")
    return Ratio(median=middle, low=low, high=high, count=len(known))


def _versions() -> tuple[str, str]:
    return _version("torch"), _version("shardwise")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _parsed(line: str) -> PastRun | None:
    try:
        run = PastRun.model_validate_json(line)
    except ValidationError:
        return None
    return run if run.schema_version == 1 else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _append(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a run killed while writing spoils only its own line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _trim(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > 2 * KEPT_RUNS:
        spare = path.with_name(f"{path.name}.tmp")
        spare.write_bytes(b"".join(lines[-KEPT_RUNS:]))
        os.replace(spare, path)
