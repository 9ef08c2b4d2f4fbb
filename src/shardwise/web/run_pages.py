"""Pages of the local server: runs, one run, runs side by side, and this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shardwise.environment import history_file, visible_devices
from shardwise.errors import ShardwiseError, UserError
from shardwise.hardware.cluster import detect
from shardwise.hardware.cpu import processor_name
from shardwise.measure.history import History, read_history
from shardwise.report.html.observed_folder import read_folder
from shardwise.report.html.page import render
from shardwise.report.html.run_record import RunRecord
from shardwise.report.html.sample_files import read_links
from shardwise.report.html.text import fixed, milliseconds, number, percent
from shardwise.units import bytes_text, count_text, counted, money_text
from shardwise.web.live_metrics import COLUMNS
from shardwise.web.run_list import RunFolder, RunList, too_large

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_COMPARED = 4
STATES = {
    "finished": "finished",
    "live": "live",
    "unfinished": "not finished",
    "observed": "observed",
    "unknown": "not read",
}
BUILD_SITE = "make site"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("shardwise.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes_text": bytes_text, "ago": ago, "counted": counted, "ratio": _ratio, "day": _day}
    environment.globals |= {"states": STATES}
    return environment


def rendered_page(template: str, **facts: Any) -> bytes:
    """Lay out a page; every text is escaped, and what is no Unicode is replaced."""
    return _environment().get_template(template).render(facts).encode("utf-8", "replace")


def ago(at: float | None) -> str:
    """Format how long ago a Unix time was: ``12 s ago``, ``3 min ago``, ``5 h ago``, ``2 days ago``."""
    if at is None:
        return "unknown"
    seconds = max(0.0, time.time() - at)
    for size, noun in ((86400, "day"), (3600, "h"), (60, "min")):
        if seconds >= size:
            value = int(seconds // size)
            return f"{counted(value, noun) if noun == 'day' else f'{value} {noun}'} ago"
    return f"{seconds:.0f} s ago"


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} ×"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def runs_page(runs: RunList, root: str, planner: bool) -> bytes:
    """List the runs below the root."""
    return rendered_page("runs.html.j2", here="runs", runs=runs, root=root, planner=planner, most=MOST_COMPARED)


def run_page(run: RunFolder, planner: bool) -> bytes:
    """Show one run: its live metrics, and its report below."""
    return rendered_page(
        "run.html.j2",
        here="runs",
        run=run,
        large="" if run.problem else too_large(run.path),
        planner=planner,
        columns=json.dumps(COLUMNS),
    )


def compare_page(runs: Sequence[RunFolder], planner: bool) -> bytes:
    """Show key figures, loss and reports of up to `MOST_COMPARED` runs side by side."""
    records: list[RunRecord | None] = []
    problems = []
    for run in runs:
        try:
            records.append(read_record(run))
        except UserError as error:
            records.append(None)
            problems.append(str(error))
    series = [
        {"name": run.name, "points": [[x, y] for x, y in zip(record.series.step, record.series.loss, strict=True)]}
        for run, record in zip(runs, records, strict=True)
        if record is not None
    ]
    return rendered_page(
        "compare.html.j2",
        here="runs",
        runs=runs,
        rows=_figure_rows(records),
        problems=problems,
        series=json.dumps(series),
        planner=planner,
    )


def read_record(run: RunFolder) -> RunRecord:
    """Read a run's record under the name that is shown.

    Raises:
        UserError: it cannot be read, or is too large.
    """
    problem = run.problem or too_large(run.path)
    if problem:
        raise UserError(f"{run.name}: {problem}")
    try:
        return read_folder(run.path).model_copy(update={"name": run.name})
    except ShardwiseError as error:
        raise UserError(f"{run.name}: {error}") from None
    except (ValidationError, ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"{run.name}: its files are not understood ({type(error).__name__})") from None


def report_html(run: RunFolder) -> bytes:
    """Make the report of a run anew, in memory; files of the folder are never sent as they are.

    Raises:
        UserError: see `read_record`.
    """
    record = read_record(run)
    try:
        return render(record).encode("utf-8", "replace")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{run.name}: its numbers cannot be drawn ({type(error).__name__})") from None


def _figure_rows(records: Sequence[RunRecord | None]) -> list[tuple[str, list[str]]]:
    def row(name: str, value: Any) -> tuple[str, list[str]]:
        return name, ["unknown" if record is None else value(record) for record in records]

    rows = [
        row("state", lambda r: STATES["observed"] if r.notes else r.state),  # runs have no notes
        row("strategy", lambda r: "unknown" if r.plan is None else r.plan.strategy),
        row("ranks", _ranks),
        row("precision", lambda r: "unknown" if r.plan is None else r.plan.precision),
        row("steps", lambda r: f"{r.figures.steps:,}"),
        row("last loss", lambda r: fixed(r.figures.last_loss)),
        row("held-out bits per byte", lambda r: fixed(r.figures.heldout_bits_per_byte)),
        row("throughput", lambda r: "unknown" if r.per_s is None else f"{count_text(r.per_s)} {r.noun}/s"),
        row("step time", lambda r: milliseconds(r.figures.step_s)),
        row("step time, predicted", lambda r: milliseconds(r.figures.step_predicted_s)),
        row("peak memory", lambda r: bytes_text(r.figures.peak_bytes)),
        row("peak memory, predicted", lambda r: bytes_text(r.figures.peak_predicted_bytes)),
        row("MFU", lambda r: percent(r.figures.mfu)),
        row("device hours", lambda r: number(r.figures.device_hours)),
        row("cost", lambda r: money_text(r.figures.cost)),
    ]
    return rows


def _ranks(record: RunRecord) -> str:
    """Return the number of ranks, by the plan or by what was timed."""
    if record.plan is not None:
        return f"{record.plan.dims.world_size:,}"
    return "unknown" if record.timing is None else f"{record.timing.world_size:,}"


def machine_page(calibration: Path | None, planner: bool) -> bytes:
    """Show devices, measured links and the history of predictions."""
    links, links_problem = None, ""
    if calibration is not None:
        try:
            links = read_links(calibration)
        except UserError as error:
            links_problem = str(error).replace("--links", "--calibration")
    file = history_file()
    history = History() if file is None else read_history(file)
    return rendered_page(
        "machine.html.j2",
        here="machine",
        devices=_devices(),
        links=links,
        links_problem=links_problem,
        history=history.runs[:-21:-1],
        ignored=history.ignored_lines,
        kept=file is not None,
        planner=planner,
    )


def _devices() -> list[tuple[str, str]]:
    try:
        found = detect(visible=visible_devices())
    except ShardwiseError as error:
        return [("devices", str(error))]
    rows = []
    if found.device == "cuda":
        rows.append(("GPUs", f"{found.devices_per_node} × {found.device_name}"))
        rows.append(("memory of a GPU", bytes_text(found.device_memory_bytes)))
        link = "none, there is one GPU" if found.devices_per_node == 1 else "unknown"
        if found.link is not None:
            link = f"{found.link.kind} ({found.link.source})"
        rows.append(("link between GPUs", link))
    else:
        rows.append(("GPUs", "none found"))
    rows.append(("processor", processor_name()))
    rows.append(("cores for this process", str(found.cores_per_node)))
    rows.append(("host memory", bytes_text(found.host_memory_bytes)))
    return rows


def planner_missing_page() -> bytes:
    """Say how the planner page is built."""
    return rendered_page("planner_missing.html.j2", here="planner", planner=False, command=BUILD_SITE)


def message_page(title: str, text: str) -> bytes:
    """Show one sentence."""
    return rendered_page("message.html.j2", here="", planner=False, title=title, text=text)
