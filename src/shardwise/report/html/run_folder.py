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

from pydantic import TypeAdapter, ValidationError

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.price import training_cost
from shardwise.cost.time.step_time import StepTime
from shardwise.diagnosis.finding import Finding
from shardwise.errors import UserError
from shardwise.measure.step_time.timing import Timing
from shardwise.measure.utilisation import Utilisation
from shardwise.plan.plan import Plan
from shardwise.receipts.receipt import Receipt
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
from shardwise.train.run_files import RunFile

NO_JOB = "the config, the prediction and the plan's reason are unknown"
NO_SUMMARY = "the run has not come to its end, and its receipts are unknown"
ROWS = 600
"""Most rows of a series: more are neither visible on a screen nor quick to draw."""

_T = TypeVar("_T")
_MEANS = ("time", "loss", "learning_rate", "grad_norm", "step_time_s", "tokens_per_s", "samples_per_s")


@dataclass
class _Files:
    """Files of a run folder; unusable ones are recorded as sentences."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    def document(self, name: str, without: str) -> Any:
        """Read a JSON file; ``None``, and a sentence that ends in ``without``, if it is unusable.

        A number that is not finite is ``None``.
        """
        path = self.folder / name
        try:
            return json.loads(path.read_text(), parse_constant=lambda _: None, parse_float=_float)
        except FileNotFoundError:
            self.problems.append(f"{name} is not there: {without}")
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read ({_one_line(error)}): {without}")
        return None

    def table(self, name: str, without: str) -> dict[str, Any]:
        """Read a JSON file of one object; empty, and a sentence, if it is unusable."""
        return self.fact(name, dict[str, Any], self.document(name, without), without) or {}

    def fact(self, name: str, kind: type[_T], value: Any, without: str = "it is left out") -> _T | None:
        """Validate ``value``; ``None``, and a sentence, if it is invalid."""
        if value is None:
            return None
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            self.problems.append(f"{name} is not understood ({where}: {first['msg']}): {without}")
            return None


@dataclass(frozen=True)
class _Read:
    """What the files of a run say, beside the logged lines; each part is ``None`` or empty if it is unusable."""

    config: dict[str, dict[str, Any]]
    plan: Plan | None
    estimate: Estimate | None
    step_time: StepTime | None
    cluster: dict[str, Any]
    summary: dict[str, Any]
    timing: Timing | None
    findings: tuple[Finding, ...] | None
    utilisation: Utilisation | None
    environment: dict[str, str] | None

    @property
    def steps_planned(self) -> int | None:
        """Planned steps; ``None`` if epochs were planned."""
        return _full(self.config.get("train", {}).get("steps"))

    @property
    def steps_summarised(self) -> int | None:
        """Steps that the summary is about; ``None`` without one."""
        return _full(self.summary.get("steps"))


def _read(files: _Files) -> _Read:
    job = files.table(RunFile.JOB, NO_JOB)
    summary = files.table(RunFile.SUMMARY, NO_SUMMARY)
    timing = summary.get("timing") or files.document(RunFile.TIMING, "where the time went is unknown")
    findings = summary.get("findings") or files.document(RunFile.FINDINGS, "no diagnosis was made")
    environment = files.document(RunFile.ENVIRONMENT, "the versions and devices it ran with are unknown")
    return _Read(
        config=files.fact(RunFile.JOB, dict[str, dict[str, Any]], job.get("config"), "the config is left out") or {},
        plan=_plan(files, job),
        estimate=files.fact(RunFile.JOB, Estimate, job.get("estimate"), "the predicted memory is left out"),
        step_time=files.fact(RunFile.JOB, StepTime, job.get("step_time"), "the predicted step time is left out"),
        cluster=_table(job.get("cluster")),
        summary=summary,
        timing=files.fact(RunFile.TIMING, Timing, timing),
        findings=files.fact(RunFile.FINDINGS, tuple[Finding, ...], findings, "they are left out"),
        utilisation=files.fact(
            RunFile.SUMMARY, Utilisation, summary.get("utilisation"), "the use of the devices is left out"
        ),
        environment=files.fact(RunFile.ENVIRONMENT, dict[str, str], environment),
    )


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
    if not any((folder / name).exists() for name in (RunFile.METRICS, RunFile.SUMMARY, RunFile.JOB)):
        raise UserError(
            f"'{folder}' contains no run: neither {RunFile.METRICS} nor {RunFile.SUMMARY} nor {RunFile.JOB} is in it; "
            "give the folder that train.output names"
        )
    files = _Files(folder)
    lines = _metrics(files)
    steps = [line for line in lines if "loss" in line]
    read = _read(files)
    done = int(steps[-1]["step"]) if steps else read.steps_summarised or 0
    through = read.steps_summarised or done
    saves = tuple(_save(line) for line in lines if "checkpoint_bytes" in line or "checkpoint_stall_s" in line)
    memory = _memory(read)
    state, text = _state(done, read, locked=not ended and _is_locked(folder))
    return RunRecord(
        name=folder.resolve().name,
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        made_by=made_by(),
        state=state,
        state_text=text,
        missing=(*files.problems, *_stale(through, done)),
        through_step=through if through < done else None,
        figures=_figures(steps, saves, read, memory, done),
        series=series_of(steps),
        evaluations=tuple(
            LoggedEvaluation(step=line["step"], heldout_bits_per_byte=line["heldout_bits_per_byte"])
            for line in lines
            if _finite(line.get("heldout_bits_per_byte")) is not None
        ),
        saves=saves,
        timing=read.timing,
        findings=read.findings,
        memory=memory,
        receipts=_receipts(read.summary),
        plan=read.plan,
        config=read.config,
        environment=read.environment,
        utilisation=read.utilisation,
        scaling=scaling,
        links=links,
    )


def _figures(
    steps: Sequence[dict[str, Any]], saves: Sequence[SavedCheckpoint], read: _Read, memory: Memory, done: int
) -> Figures:
    timing, summary, use, predicted = read.timing, read.summary, read.utilisation, read.step_time
    warm = steps[1:] if len(steps) > 1 else steps
    seconds = _step_seconds(steps)
    pauses = [save.stall_s for save in saves if save.stall_s is not None]
    pause = sum(pauses) if pauses else None
    hours = None
    if seconds is not None and read.plan is not None:
        hours = (seconds + (pause or 0.0)) * read.plan.dims.world_size / 3600
    price = _finite(summary.get("price_per_device_hour"))
    if price is None:
        price = _finite(read.cluster.get("price_per_device_hour"))
    heldout = {name: _finite(value) for name, value in _table(summary.get("heldout")).items()}
    return Figures(
        steps=done,
        steps_planned=read.steps_planned,
        tokens=_full(steps[-1].get("tokens")) if steps else _full(summary.get("tokens")),
        labels=_full(steps[-1].get("labels")) if steps else _full(summary.get("labels")),
        first_loss=_finite(steps[0]["loss"]) if steps else None,
        last_loss=_finite(steps[-1]["loss"] if steps else summary.get("loss")),
        heldout_bits_per_byte=_finite(summary.get("heldout_bits_per_byte")),
        heldout={name: value for name, value in heldout.items() if value is not None},
        samples_per_s=_median(line.get("samples_per_s") for line in warm),
        tokens_per_s=timing.tokens_per_s if timing else _median(line.get("tokens_per_s") for line in warm),
        step_s=timing.median_step_s if timing else _median(line.get("step_time_s") for line in warm),
        step_predicted_s=None if predicted is None else predicted.step_s,
        step_predicted_low_s=None if predicted is None else predicted.low_s,
        step_predicted_high_s=None if predicted is None else predicted.high_s,
        mfu=None if use is None else use.mfu,
        mfu_predicted=None if predicted is None else predicted.mfu,
        flops_per_s=None if use is None else use.model_flops_per_s,
        peak_bytes=max(memory.peaks.values(), default=None),
        peak_predicted_bytes=None if read.estimate is None else read.estimate.allocated,
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
        parts_s=_inner_columns([_table(line.get("parts")) for line in steps], size),
        between_s=_inner_columns([_table(line.get("between_s")) for line in steps], size),
        **{name: _column(steps, name, size) for name in _MEANS},
    )


def _table(value: Any) -> dict[str, Any]:
    """Return an object of a JSON file; an empty one for anything else."""
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


def _float(text: str) -> float | None:
    return _finite(float(text))


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
    path = files.folder / RunFile.METRICS
    try:
        lines = [line for line in read_metrics(path) if isinstance(line, dict) and isinstance(line.get("step"), int)]
    except OSError as error:
        files.problems.append(f"{RunFile.METRICS} cannot be read ({_one_line(error)}): loss and throughput are unknown")
        return []
    if not any("loss" in line for line in lines):
        files.problems.append(f"{RunFile.METRICS} contains no step: loss and throughput are unknown")
    return lines


def _save(line: dict[str, Any]) -> SavedCheckpoint:
    return SavedCheckpoint(
        step=line["step"],
        num_bytes=_full(line.get("checkpoint_bytes")),
        stall_s=_finite(line.get("checkpoint_stall_s")),
        write_s=_finite(line.get("checkpoint_write_s")),
    )


def _plan(files: _Files, job: dict[str, Any]) -> Plan | None:
    """Return the plan of the job, or else the same one from the folder."""
    if job.get("plan") is not None:
        return files.fact(RunFile.JOB, Plan, job["plan"], "the plan is left out")
    try:
        found = tomllib.loads((files.folder / RunFile.PLAN).read_text())
    except FileNotFoundError:
        files.problems.append(f"{RunFile.PLAN} is not there: the plan is unknown")
        return None
    except (OSError, ValueError) as error:
        files.problems.append(f"{RunFile.PLAN} cannot be read ({_one_line(error)}): the plan is unknown")
        return None
    return files.fact(RunFile.PLAN, Plan, found, "the plan is left out")


def _memory(read: _Read) -> Memory:
    """Combine the job's predicted and the summary's measured memory."""
    found = _table(read.summary.get("memory"))
    peaks = _table(found.get("peaks"))
    return Memory(
        predicted=read.estimate,
        at_rest=_bytes(found, "parameters", "gradients", "optimizer"),
        peaks=_bytes(_table(peaks.get("allocated"))),
        reserved=_bytes(_table(peaks.get("reserved"))),
        device_used_bytes=_full(peaks.get("device")),
        device_memory_bytes=_full(read.cluster.get("device_memory_bytes")),
        process_peak_bytes=_full(found.get("process_peak")),
    )


def _bytes(table: dict[str, Any], *names: str) -> dict[str, int]:
    """Return the integers of a table, of all names or of those given."""
    found = {name: _full(table.get(name)) for name in names or table}
    return {name: value for name, value in found.items() if value is not None}


def _receipts(summary: dict[str, Any]) -> dict[str, Receipt | None]:
    """Return the receipts of the summary; ``None`` for one that was not checked."""
    found: dict[str, Receipt | None] = {}
    for name, receipt in _table(summary.get("receipts")).items():
        try:
            found[name] = Receipt.model_validate({"title": name, **receipt})
        except (TypeError, ValidationError):
            found[name] = None
    return found


def _state(done: int, read: _Read, *, locked: bool) -> tuple[State, str]:
    """Return the state of the run, as a word and as a sentence."""
    planned, summarised = read.steps_planned, read.steps_summarised
    of = f" of {planned}" if planned else ""
    if summarised is not None and summarised >= max(done, planned or 0):
        return "finished", f"all {done} steps are done"
    if locked:
        return "running", f"step {done}{of} is the last one logged, and a process still uses the folder"
    if not read.config and summarised is None:
        return "unknown", f"step {done} is the last one logged; how many were planned is not in the folder"
    return "unfinished", f"it stopped before its end: step {done}{of} is the last one logged"


def _is_locked(folder: Path) -> bool:
    """Return whether a process has the run's lock; False if there is none."""
    try:
        with (folder / RunFile.LOCK).open() as lock:
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
        f"{RunFile.SUMMARY} ends at step {through}, and the run went on to step {done}: "
        "receipts, timing and findings are those of the earlier part",
    )


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).splitlines()[0]


def made_by() -> str:
    """Return the name and the version of this program."""
    try:
        return f"shardwise {version('shardwise')}"
    except PackageNotFoundError:
        return "shardwise unknown"
