"""Read a run's folder into its `RunRecord`, and report what is missing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import statistics
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.price import training_cost
from shardwise.cost.time.step_time import StepTime
from shardwise.diagnosis.finding import Finding
from shardwise.errors import UserError
from shardwise.measure.step_time.timing import Timing
from shardwise.measure.utilisation import Utilisation
from shardwise.plan.plan import Plan
from shardwise.receipts.receipt import Receipt
from shardwise.report.html.environment_section import ENVIRONMENT
from shardwise.report.html.run_record import (
    BenchSamples,
    Column,
    Figures,
    LoggedEvaluation,
    Memory,
    RunRecord,
    SavedCheckpoint,
    Series,
    State,
)
from shardwise.train.metrics import read_metrics

METRICS, SUMMARY, JOB, PLAN = "metrics.jsonl", "summary.json", "job.json", "plan.toml"
TIMING, FINDINGS, LOCK = "timing.json", "findings.json", ".lock"
NO_JOB = "the config, the prediction and the plan's reason are unknown"
NO_SUMMARY = "the run has not come to its end, and its receipts are unknown"
ROWS = 600
"""Most rows of a series: more are neither visible on a screen nor quick to draw."""

_T = TypeVar("_T")
_MEANS = ("time", "loss", "learning_rate", "grad_norm", "step_time_s", "tokens_per_s")


class _Lenient(BaseModel):
    """File of a run as far as the report reads it; everything in it may be missing."""

    model_config = ConfigDict(extra="ignore")


class _Cluster(_Lenient):
    device_memory_bytes: int | None = None
    price_per_device_hour: float | None = None


class _Job(_Lenient):
    config: dict[str, dict[str, Any]] = {}
    plan: dict[str, Any] | None = None
    estimate: Estimate | None = None
    step_time: StepTime | None = None
    cluster: _Cluster | None = None

    @property
    def steps(self) -> int | None:
        """Planned steps; ``None`` if epochs were planned."""
        found = self.config.get("train", {}).get("steps")
        return found if isinstance(found, int) else None


class _Peaks(_Lenient):
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    device: int | None = None


class _Measured(_Lenient):
    parameters: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    peaks: _Peaks | None = None
    process_peak: int | None = None


class _Summary(_Lenient):
    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    heldout_bits_per_byte: float | None = None
    heldout: dict[str, float | None] = {}
    price_per_device_hour: float | None = None
    memory: _Measured | None = None
    timing: Any = None
    findings: Any = None
    utilisation: Any = None
    receipts: dict[str, Any] = {}


@dataclass
class _Files:
    """Files of a run folder; unusable ones are recorded as sentences."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    def document(self, name: str, without: str) -> Any:
        """Read a JSON file; ``None``, and a sentence that ends in ``without``, if it is unusable."""
        path = self.folder / name
        try:
            return json.loads(path.read_text(), parse_constant=lambda _: None)
        except FileNotFoundError:
            self.problems.append(f"{name} is not there: {without}")
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read ({_one_line(error)}): {without}")
        return None

    def fact(self, name: str, kind: type[_T] | TypeAdapter[_T], value: Any, without: str) -> _T | None:
        """Validate ``value``; ``None``, and a sentence, if it is invalid."""
        if value is None:
            return None
        adapter: TypeAdapter[_T] = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            self.problems.append(f"{name} is not understood ({where}: {first['msg']}): {without}")
            return None


def read_run(
    folder: Path, *, scaling: BenchSamples | None = None, links: BenchSamples | None = None, ended: bool = False
) -> RunRecord:
    """Read all numbers of the run in ``folder``, which may be finished, running, or dead.

    ``ended``: the caller is the run itself, whose last step is done although a process still has the folder's lock.

    Raises:
        UserError: there is no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"'{folder}' is not a folder; give a run folder (train.output of its config)")
    if not any((folder / name).exists() for name in (METRICS, SUMMARY, JOB)):
        raise UserError(
            f"'{folder}' contains no run: neither {METRICS} nor {SUMMARY} nor {JOB} is in it; "
            "give the folder that train.output names"
        )
    files = _Files(folder)
    lines = _metrics(files)
    steps = [line for line in lines if "loss" in line]
    job = files.fact(JOB, _Job, files.document(JOB, NO_JOB), NO_JOB) or _Job()
    summary = files.fact(SUMMARY, _Summary, files.document(SUMMARY, NO_SUMMARY), NO_SUMMARY) or _Summary()
    timed = summary.timing or files.document(TIMING, "where the time went is unknown")
    timing = files.fact(TIMING, Timing, timed, "it is left out")
    sources = summary.findings or files.document(FINDINGS, "no diagnosis was made")
    findings = files.fact(FINDINGS, TypeAdapter(tuple[Finding, ...]), sources, "they are left out")
    use = files.fact(SUMMARY, Utilisation, summary.utilisation, "the use of the devices is left out")
    done = int(steps[-1]["step"]) if steps else summary.steps or 0
    through = summary.steps or done
    plan = _plan(files, job)
    saves = tuple(_save(line) for line in lines if "checkpoint_bytes" in line or "checkpoint_stall_s" in line)
    memory = _memory(job, summary)
    state, text = _state(done, summary, job, locked=not ended and _is_locked(folder))
    environment = files.document(ENVIRONMENT, "the versions and devices it ran with are unknown")
    return RunRecord(
        name=folder.resolve().name,
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        made_by=f"shardwise {_version()}",
        state=state,
        state_text=text,
        missing=(*files.problems, *_stale(through, done)),
        through_step=through if through < done else None,
        figures=_figures(steps, saves, _FigureSources(summary, job, timing, memory, plan, use), done),
        series=series_of(steps),
        evaluations=tuple(
            LoggedEvaluation(step=line["step"], heldout_bits_per_byte=line["heldout_bits_per_byte"])
            for line in lines
            if _finite(line.get("heldout_bits_per_byte")) is not None
        ),
        saves=saves,
        timing=timing,
        findings=findings,
        memory=memory,
        receipts=_receipts(summary),
        plan=plan,
        config=job.config,
        environment=files.fact(ENVIRONMENT, dict[str, str], environment, "it is left out"),
        utilisation=use,
        scaling=scaling,
        links=links,
    )


@dataclass(frozen=True)
class _FigureSources:
    """Sources of the figures, beside the logged lines."""

    summary: _Summary
    job: _Job
    timing: Timing | None
    memory: Memory
    plan: Plan | None
    use: Utilisation | None


def _figures(
    steps: Sequence[dict[str, Any]], saves: Sequence[SavedCheckpoint], sources: _FigureSources, done: int
) -> Figures:
    timing, summary = sources.timing, sources.summary
    predicted = sources.job.step_time
    warm = steps[1:] if len(steps) > 1 else steps
    step_s = timing.median_step_s if timing else _median(line.get("step_time_s") for line in warm)
    seconds = _step_seconds(steps)
    pauses = [save.stall_s for save in saves if save.stall_s is not None]
    pause = sum(pauses) if pauses else None
    devices = None if sources.plan is None else sources.plan.dims.world_size
    hours = None if seconds is None or devices is None else (seconds + (pause or 0.0)) * devices / 3600
    price = summary.price_per_device_hour
    if price is None and sources.job.cluster is not None:
        price = sources.job.cluster.price_per_device_hour
    estimate = sources.memory.predicted
    return Figures(
        steps=done,
        steps_planned=sources.job.steps,
        tokens=_full(steps[-1].get("tokens")) if steps else summary.tokens,
        labels=_full(steps[-1].get("labels")) if steps else None,
        first_loss=_finite(steps[0]["loss"]) if steps else None,
        last_loss=_finite(steps[-1]["loss"]) if steps else summary.loss,
        heldout_bits_per_byte=summary.heldout_bits_per_byte,
        heldout={name: value for name, value in summary.heldout.items() if value is not None},
        samples_per_s=_median(line.get("samples_per_s") for line in warm),
        tokens_per_s=timing.tokens_per_s if timing else _median(line.get("tokens_per_s") for line in warm),
        step_s=step_s,
        step_predicted_s=None if predicted is None else predicted.step_s,
        step_predicted_low_s=None if predicted is None else predicted.low_s,
        step_predicted_high_s=None if predicted is None else predicted.high_s,
        mfu=None if sources.use is None else sources.use.mfu,
        mfu_predicted=None if predicted is None else predicted.mfu,
        flops_per_s=None if sources.use is None else sources.use.model_flops_per_s,
        peak_bytes=max(sources.memory.peaks.values(), default=None),
        peak_predicted_bytes=None if estimate is None else estimate.allocated,
        step_seconds=seconds,
        pause_seconds=pause,
        device_hours=hours,
        price_per_device_hour=price,
        cost=None if hours is None else training_cost(hours, 1, price),
    )


def series_of(steps: Sequence[dict[str, Any]], rows: int = ROWS) -> Series:
    """Convert the logged steps to columns, in ``rows`` rows at most; see `Series`."""
    size = max(1, math.ceil(len(steps) / rows))
    last = [steps[min(start + size, len(steps)) - 1] for start in range(0, len(steps), size)]
    return Series(
        lines_per_row=size,
        step=tuple(int(line["step"]) for line in last),
        tokens=tuple(_finite(line.get("tokens")) for line in last),
        parts_s=_inner_columns([_inner(line, "parts") for line in steps], size),
        between_s=_inner_columns([_inner(line, "between_s") for line in steps], size),
        **{name: _column(steps, name, size) for name in _MEANS},
    )


def _inner(line: dict[str, Any], key: str) -> dict[str, Any]:
    value = line.get(key)
    return value if isinstance(value, dict) else {}


def _inner_columns(tables: Sequence[dict[str, Any]], size: int) -> dict[str, Column]:
    """Build a column for each name that has a number anywhere, in order of appearance."""
    names = dict.fromkeys(name for table in tables for name in table)
    columns = {name: _column(tables, name, size) for name in names}
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _column(tables: Sequence[dict[str, Any]], name: str, size: int) -> Column:
    values = [_finite(table.get(name)) for table in tables]
    return tuple(_mean(values[start : start + size]) for start in range(0, len(values), size))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _median(values: Iterable[Any]) -> float | None:
    known = [value for value in map(_finite, values) if value is not None]
    return statistics.median(known) if known else None


def _finite(value: Any) -> float | None:
    """Return a finite number unchanged; ``None`` for anything else."""
    if type(value) is float or (isinstance(value, int | float) and not isinstance(value, bool)):
        with contextlib.suppress(OverflowError):  # an integer too large for a float
            return value if math.isfinite(value) else None
    return None


def _full(value: Any) -> int | None:
    """Return an integer; ``None`` for anything else."""
    found = _finite(value)
    return None if found is None or found != int(found) else int(found)


def _step_seconds(steps: Sequence[dict[str, Any]]) -> float | None:
    """Sum the seconds of all logged steps; each line covers the steps since the line before it."""
    if not steps or any(_finite(line.get("step_time_s")) is None for line in steps):
        return None
    ends = [int(line["step"]) for line in steps]
    before = ends[0] - (ends[1] - ends[0]) if len(ends) > 1 else 0  # a log that began in another folder
    starts = [max(0, before), *ends]
    return math.fsum(line["step_time_s"] * (end - start) for line, start, end in zip(steps, starts, ends, strict=False))


def _metrics(files: _Files) -> list[dict[str, Any]]:
    path = files.folder / METRICS
    try:
        lines = [line for line in read_metrics(path) if isinstance(line, dict) and isinstance(line.get("step"), int)]
    except OSError as error:
        files.problems.append(f"{METRICS} cannot be read ({_one_line(error)}): loss and throughput are unknown")
        return []
    if not any("loss" in line for line in lines):
        files.problems.append(f"{METRICS} contains no step: loss and throughput are unknown")
    return lines


def _save(line: dict[str, Any]) -> SavedCheckpoint:
    return SavedCheckpoint(
        step=line["step"],
        num_bytes=_full(line.get("checkpoint_bytes")),
        stall_s=_finite(line.get("checkpoint_stall_s")),
        write_s=_finite(line.get("checkpoint_write_s")),
    )


def _plan(files: _Files, job: _Job) -> Plan | None:
    """Return the plan of the job, or else the same one from the folder."""
    if job.plan is not None:
        return files.fact(JOB, Plan, job.plan, "the plan is left out")
    try:
        found = tomllib.loads((files.folder / PLAN).read_text())
    except FileNotFoundError:
        files.problems.append(f"{PLAN} is not there: the plan is unknown")
        return None
    except (OSError, ValueError) as error:
        files.problems.append(f"{PLAN} cannot be read ({_one_line(error)}): the plan is unknown")
        return None
    return files.fact(PLAN, Plan, found, "the plan is left out")


def _memory(job: _Job, summary: _Summary) -> Memory:
    """Combine the job's predicted and the summary's measured memory."""
    found = summary.memory or _Measured()
    peaks = found.peaks or _Peaks()
    rest = {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer}
    return Memory(
        predicted=job.estimate,
        at_rest={name: value for name, value in rest.items() if value is not None},
        peaks=peaks.allocated,
        reserved=peaks.reserved,
        device_used_bytes=peaks.device,
        device_memory_bytes=None if job.cluster is None else job.cluster.device_memory_bytes,
        process_peak_bytes=found.process_peak,
    )


def _receipts(summary: _Summary) -> dict[str, Receipt | None]:
    """Return the receipts of the summary; ``None`` for one that was not checked."""
    found: dict[str, Receipt | None] = {}
    for name, receipt in summary.receipts.items():
        try:
            found[name] = Receipt.model_validate({"title": name, **receipt})
        except (TypeError, ValidationError):
            found[name] = None
    return found


def _state(done: int, summary: _Summary, job: _Job, *, locked: bool) -> tuple[State, str]:
    """Return the state of the run, as a word and as a sentence."""
    of = f" of {job.steps}" if job.steps else ""
    if summary.steps is not None and summary.steps >= max(done, job.steps or 0):
        return "finished", f"all {done} steps are done"
    if locked:
        return "running", f"step {done}{of} is the last one logged, and a process still uses the folder"
    if not job.config and summary.steps is None:
        return "unknown", f"step {done} is the last one logged; how many were planned is not in the folder"
    return "unfinished", f"it stopped before its end: step {done}{of} is the last one logged"


def _is_locked(folder: Path) -> bool:
    """Return whether a process has the run's lock; False if there is none."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _stale(through: int, done: int) -> tuple[str, ...]:
    if through >= done:
        return ()
    return (
        f"{SUMMARY} ends at step {through}, and the run went on to step {done}: "
        "receipts, timing and findings are those of the earlier part",
    )


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).splitlines()[0]


def _version() -> str:
    try:
        return version("shardwise")
    except PackageNotFoundError:
        return "unknown"
