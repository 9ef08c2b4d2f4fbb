"""A trace on request: the file, the summary, the phases in it, and a run that is none the worse for it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.distributed.process_group import join
from shardwise.errors import ConfigError
from shardwise.measure.profiler.profile_steps import StepTrace, summary_file, trace_file
from shardwise.measure.profiler.summary import TraceSummary
from shardwise.measure.profiler.trace_text import words
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.report.terminal import print_trace
from shardwise.train.config import TrainTable
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from tests.models import decoder, ragged_batches
from tests.worlds import run_world

Found = tuple[list[dict[str, Any]], list[str], list[int], list[str]]


def train(folder: str, strategy: str, table: TrainTable, first: int, steps: int, profiler_at: int) -> Found:
    """Steps with a trace; what each write gave, the notes, the steps that it disturbs, and the weights' digest."""
    ranks = join("cpu")
    dims = dims_for(parse_strategy(strategy), ranks.world_size)
    plan = Plan(strategy=strategy, dims=dims, micro_batch=2, grad_accum=2)
    session = Session(ranks=ranks, planner=lambda *_: plan)
    session.steps_done = first
    trace = StepTrace(table.model_copy(update={"output": folder}), ranks.rank, ranks.world_size)
    session.observers.append(trace)
    model: Any = decoder()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    written = []
    windows = [ragged_batches(2, seed=number) for number in range(steps)]
    for step in session.run_windows(windows):
        step.run(model, token_loss_sum)
        step.update(optimizer)
        profiler = torch.profiler.profile() if step.number + 1 == profiler_at else None
        if profiler is not None:  # somebody else's, over the next step's start
            profiler.start()
            session.observers[:0] = [Stopper(profiler)]
        if (summary := trace.write()) is not None:
            written.append(summary.model_dump())
    disturbed = [number for number in range(1, first + steps + 1) if trace.disturbs(number)]
    weights = [repr(float(p.detach().double().sum())) for p in model.parameters()] if strategy == "ddp" else []
    session.close()
    return written, trace.notes, disturbed, weights


class Stopper:
    """Ends a profiler at the end of a step."""

    def __init__(self, profiler: Any) -> None:
        self.profiler = profiler

    def on_step_start(self, *_: Any) -> None: ...
    def on_gradients(self, *_: Any) -> None: ...

    def on_step_end(self, session: Session, step: Any) -> None:
        self.profiler.stop()
        session.observers.remove(self)  # type: ignore[arg-type]


def table(**keys: Any) -> TrainTable:
    return TrainTable(steps=100, **keys)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_steps_that_were_asked_for_on_the_ranks_that_were(tmp_path: Path, strategy: str) -> None:
    asked = table(profile="6:2", profile_ranks=[1])
    (none, _, _, _), (written, notes, disturbed, _) = run_world(train, 2, str(tmp_path), strategy, asked, 0, 9, 0)
    assert none == [] and len(written) == 1 and notes == [] and disturbed == [6, 7]
    summary = TraceSummary.model_validate(written[0])
    file = trace_file(tmp_path, 1)
    assert summary.file == file.name and not trace_file(tmp_path, 0).exists()
    assert TraceSummary.model_validate_json(summary_file(file).read_text()) == summary
    assert (summary.device, summary.rank, summary.first_step, summary.steps) == ("cpu", 1, 6, 2)
    assert {"forward", "backward", "optimizer"} <= set(summary.phases_s)
    assert summary.kinds["product"] > 0 and sum(summary.kinds.values()) == pytest.approx(1.0)
    assert 0 < summary.busy_s < summary.window_s and summary.gap_s <= summary.idle_s + 1e-9
    assert summary.overhead.plain_step_s and summary.overhead.traced_step_s and summary.overhead.write_s
    rows = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    marks = [row["name"] for row in rows if str(row.get("name")).startswith("shardwise: ")]
    assert marks.count("shardwise: forward") == marks.count("shardwise: backward") == 4, "two micro batches a step"
    assert any(row.get("name") == "gloo:all_to_all" for row in rows), "other threads are in it"
    text = "\n".join(words(summary))
    assert "Steps 6 to 7 on rank 1" in text and "A traced step took" in text and "× one without" in text


def test_a_trace_changes_no_weight(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = run_world(train, 2, str(tmp_path / "plain"), "ddp", table(), 0, 6, 0)
    traced = run_world(train, 2, str(tmp_path), "ddp", table(profile="4:2"), 0, 6, 0)
    assert [found[3] for found in plain] == [found[3] for found in traced]
    assert list((tmp_path / "plain").iterdir()) == []
    assert len(traced[0][0]) == 1


def test_a_run_that_goes_on_traces_once_it_is_warm(tmp_path: Path) -> None:
    ((written, notes, disturbed, _),) = run_world(train, 1, str(tmp_path), "ddp", table(profile="22:2"), 20, 6, 0)
    assert written[0]["first_step"] == 24 and disturbed == [24, 25]
    assert len(notes) == 1 and "begins at step 24, not 22" in notes[0]


def test_steps_that_are_past_are_said(tmp_path: Path) -> None:
    ((written, notes, disturbed, _),) = run_world(train, 1, str(tmp_path), "ddp", table(profile="8:2"), 20, 6, 0)
    assert written == [] and disturbed == []
    assert notes == ["train.profile asks for step 8, but this run resumes after step 20"]


def test_the_users_own_profiler_goes_first(tmp_path: Path) -> None:
    ((written, notes, disturbed, _),) = run_world(train, 1, str(tmp_path), "ddp", table(profile="5"), 0, 7, 5)
    assert disturbed == [5], "the same as on ranks that have no other profiler, which wait after this step"
    assert written == [] and notes == ["step 5 is not traced: another profiler is on"]


def test_a_trace_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    ((written, notes, _, _),) = run_world(train, 1, missing, "ddp", table(profile="4"), 0, 6, 0)
    assert written == [] and len(notes) == 1 and "cannot be written" in notes[0]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="names 2, 5, and the ranks are 0 to 1"):
        StepTrace(table(profile="9", profile_ranks=[0, 2, 5]), 0, 2)


def test_the_summary_is_printed(tmp_path: Path) -> None:
    from rich.console import Console

    ((written, _, _, _),) = run_world(train, 1, str(tmp_path), "ddp", table(profile="4"), 0, 6, 0)
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_trace(TraceSummary.model_validate(written[0]), console)
        text = console.export_text()
    assert "busiest operators" in text and "trace.json.gz" in text and "rank 0: operators ran" in text
