"""``shardwise bench step --against``: Shardwise's step beside that of other trainers, measured in one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shardwise.bench.plots import draw_against
from shardwise.bench.quartiles import Quartiles
from shardwise.bench.step.against import OURS, AgainstTask, StepContender, plans_against
from shardwise.bench.step.peers import read_peers
from shardwise.bench.step.step_bench import check_comparable
from shardwise.cli.train import threads
from shardwise.launch.on_ranks import on_ranks
from shardwise.run.job import Job, prepare_job
from shardwise.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from shardwise.train.config import Config

WORK = "shardwise.bench.step.against:time_against"


def bench_against(
    config: Config,
    against: str,
    strategies: list[str] | None,
    steps: int,
    output: Path,
    *,
    as_json: bool,
) -> None:
    """Measure, print a table, and keep the samples.

    Raises:
        UserError: a peer is unknown or missing, or the config is not one that all of them can run.
    """
    peers, console = read_peers(against), Console(stderr=as_json, highlight=False)
    check_comparable(config)
    fp32 = config.parallel.model_copy(update={"precision": "fp32"})
    config = config.model_copy(update={"parallel": fp32})
    job = prepare_job(config, lambda text: console.print(f"data: {text}"), as_json=as_json).job
    task = AgainstTask(job=job, plans=plans_against(job, strategies), peers=peers)
    names = ", ".join(plan.strategy for plan in task.plans)
    console.print(f"timing {steps} steps of shardwise, {', '.join(peers)} under {names}, turn by turn")
    raw = _on_ranks(task, job)
    rows = [StepContender(**row) for row in raw["rows"]]
    console.print("measuring memory and traffic, each in processes of its own")
    rows = [row.model_copy(update=found) for row, found in zip(rows, _alone(task, job, rows), strict=True)]
    raw = {**raw, "rows": [row.model_dump() for row in rows], "median_ratio": medians(rows)}
    for table in tables_of(rows):
        console.print(table)
    for row in rows:
        if row.void:
            console.print(f"{row.strategy}, {row.name}: {row.void}")
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"step_against_{raw['device'].replace(' ', '-').lower()}_{raw['ranks']}-ranks_{raw['date']}.json"
    file.write_text(json.dumps(raw, indent=1) + "\n")
    console.print(f"raw samples: {file}")
    if draw_against(raw, file.with_suffix(".png")):
        console.print(f"plot: {file.with_suffix('.png')}")
    else:
        console.print("no plot: matplotlib is not installed (pip install 'shardwise[plots]')", markup=False)
    if as_json:
        print(json.dumps({"schema": 1, **raw}))


def _on_ranks(task: AgainstTask, job: Job) -> dict[str, Any]:
    world = job.plan.dims.world_size
    raw: dict[str, Any] = on_ranks(WORK, task, world, device=job.plan.device, threads=threads(job))[0]
    return raw


def _alone(task: AgainstTask, job: Job, rows: list[StepContender]) -> Iterator[dict[str, Any]]:
    """Yield memory and traffic of each row; nothing for one that does not run."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in dict.fromkeys(row.name for row in rows if row.step_s):
        runs = {row.strategy for row in rows if row.name == name and row.step_s}
        plans = tuple(plan for plan in task.plans if plan.strategy in runs)
        for plan in plans:
            one = task.model_copy(update={"plans": (plan,), "alone": name})
            found[name, plan.strategy] = _on_ranks(one, job)["rows"][0]
    for row in rows:
        yield found.get((row.name, row.strategy), {})


def _of_strategy(rows: list[StepContender]) -> Iterator[tuple[StepContender, StepContender]]:
    """Yield each row with Shardwise's of the same strategy."""
    ours = {row.strategy: row for row in rows if row.name == OURS}
    for row in rows:
        yield row, ours[row.strategy]


def medians(rows: list[StepContender]) -> dict[str, dict[str, float]]:
    """Median ratio of each peer's seconds to Shardwise's, by strategy and peer; void rows are left out."""
    found: dict[str, dict[str, float]] = {}
    for row, ours in _of_strategy(rows):
        if row is not ours and not row.void:
            found.setdefault(row.strategy, {})[row.name] = statistics.median(row.ratios(ours))
    return found


def tables_of(rows: list[StepContender]) -> Iterator[Table]:
    """Build a table for each strategy: time, ratio with quartiles, CPU time, memory and traffic of each contender."""
    for strategy in dict.fromkeys(row.strategy for row in rows):
        title = f"{strategy}: ratio of step times; above 1.00 Shardwise is faster"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
        for column in ("", "step", "ratio", "quartiles", "CPU", "memory", "sent"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for row, ours in _of_strategy([row for row in rows if row.strategy == strategy]):
            table.add_row(*_cells(row, ours))
        yield table


def _cells(row: StepContender, ours: StepContender) -> Iterator[str]:
    yield f"{row.name} {row.version}".strip() if row.name != "hand" else row.name
    if not row.step_s:
        yield "not run"
        return
    ratios = Quartiles.of(row.ratios(ours))
    shown = row is not ours and not row.void
    yield seconds_text(statistics.median(row.step_s))
    yield f"{ratios.median:.3f}" if shown else "void" if row.void else ""
    yield str(ratios) if shown else ""
    yield seconds_text(statistics.median(row.cpu_s))
    yield "unknown" if row.peak_bytes is None else bytes_text(row.peak_bytes)
    yield "unknown" if row.sent_bytes is None else bytes_text(row.sent_bytes)
