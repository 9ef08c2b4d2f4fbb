"""``shardwise report`` of real runs: what training writes is what the report reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.report.html.run_record import RunRecord
from tests.cli.configs import start_train, train, wait_for_step, write_config
from tests.commands import shardwise
from tests.reports import write_links, write_scaling


def report(folder: Path, *words: str) -> dict[str, Any]:
    """The document of ``shardwise report --json``."""
    done = shardwise("report", str(folder), *words, "--json")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_finished_run(tmp_path):
    train(write_config(tmp_path, train={"eval_every": 4}))
    document = report(
        tmp_path / "run", "--scaling", str(write_scaling(tmp_path)), "--links", str(write_links(tmp_path))
    )
    record = RunRecord.model_validate(document)
    assert (record.state, record.figures.steps, record.figures.steps_planned) == ("finished", 12, 12)
    assert not [line for line in record.missing if "understood" in line or "cannot be" in line]
    assert record.timing is not None and record.timing.world_size == 2
    told = record.figures
    assert told.step_seconds and told.device_hours and told.tokens_per_s and told.last_loss
    assert told.cost is None and told.mfu is None, "no price and no peak is known of a CPU"
    assert len(record.evaluations) == 3 and len(record.saves) >= 4
    assert len(record.series.step) == 12
    assert {"forward", "backward"} <= record.series.parts_s.keys()
    timed = record.timing
    assert sum(timed.seconds(part) for part in timed.parts) == pytest.approx(timed.step_s, rel=0.03)
    assert record.receipts.keys() == {"effects", "fit"} and all(
        found and found.ok for found in record.receipts.values()
    )
    assert record.plan is not None and record.scaling is not None and record.links is not None
    page = (tmp_path / "run" / "report.html").read_text()
    assert "checked claims hold" in page and 'data-figure="parts"' in page and 'data-figure="scaling"' in page


@pytest.mark.turns(2)
def test_a_killed_run(tmp_path):
    process = start_train(write_config(tmp_path, train={"steps": 4000}))
    try:
        wait_for_step(process, tmp_path, 5)
    finally:
        process.kill()
        process.communicate(timeout=60)
    record = RunRecord.model_validate(report(tmp_path / "run"))
    assert record.state in ("unfinished", "running")  # ranks let go of the folder a moment after their parent
    assert record.figures.steps >= 5 and record.figures.steps_planned == 4000
    assert record.receipts == {} and any(line.startswith("summary.json is not there") for line in record.missing)
    assert record.plan is not None and record.memory.predicted is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none",), "is not a folder"),
        ((".",), "contains no run"),
        ((".", "--scaling", "a.json", "--links", "b.toml"), "2 problems"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(tmp_path, words, said):
    done = shardwise("report", *words, cwd=tmp_path, exit_code=2)
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
