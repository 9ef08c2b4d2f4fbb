"""The five-line change: counted, and run in one process and under torchrun."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.run.start import start
from tests.cli import configs
from tests.cli.test_readme import fits
from tests.models import decoder, ragged_batches
from tests.worlds import run_world

PLAIN = configs.ROOT / "examples" / "plain_loop.py"
OWN = configs.ROOT / "examples" / "own_loop.py"


def test_the_change_is_an_import_and_five_lines() -> None:
    plain, own = PLAIN.read_text().splitlines(), OWN.read_text().splitlines()
    changed = [line[2:].strip() for line in difflib.ndiff(plain, own) if line.startswith("+ ") and line[2:].strip()]
    assert "import shardwise" in changed
    assert len(changed) <= 6, changed
    assert 40 <= len(plain) <= 62
    assert "shardwise" not in PLAIN.read_text()


@pytest.mark.turns(3)
def test_in_one_process_it_computes_what_its_twin_computes() -> None:
    found = [_epochs(_run([str(path)])) for path in (PLAIN, OWN)]
    assert len(found[0]) == 6
    assert found[0][-1] < found[0][0] / 2
    assert all(abs(a - b) <= 2e-3 for a, b in zip(*found, strict=True)), found


@pytest.mark.turns(3)
def test_under_torchrun() -> None:
    text = _run(["-m", "torch.distributed.run", "--nproc-per-node", "2", str(OWN)])
    losses = _epochs(text)
    assert len(losses) == 12  # each rank prints its own
    assert max(losses[-2:]) < min(losses[:2])
    assert "receipt: effects" in text
    assert "4 distinct" in text


def _run(words: list[str], folder: Path = configs.ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=configs.environment() | {"OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _epochs(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", text)]


def adopts() -> tuple[bool, bool]:
    """The world of the test exists already: it is used, and still there afterwards."""
    session = start("fsdp", receipts=False)
    model = decoder()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = dist.get_world_size()
    for step in session.steps(ragged_batches(4)):
        for inputs, labels in step:
            step.backward(
                torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
            )
        step.update(optimizer)
    session.close()
    return dist.is_initialized(), before == dist.get_world_size() == session.ranks.world_size


def test_an_existing_group_is_adopted_and_left() -> None:
    assert run_world(adopts, 2) == [(True, True)] * 2


def test_a_world_of_one_leaves_no_group_behind() -> None:
    assert not dist.is_initialized()
    session = start("ddp", receipts=False)
    assert dist.is_initialized()
    session.close()
    assert not dist.is_initialized()


@pytest.mark.turns(6)
def test_the_complete_loop_of_the_page_and_its_second_run(tmp_path: Path) -> None:
    page = (configs.ROOT / "docs" / "own-loop.md").read_text()
    (first, expected), (second, after) = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", page)
    words = first.replace("examples/", f"{configs.ROOT}/examples/").split()
    assert words[0] == "torchrun"
    found = numberless(_run(["-m", "torch.distributed.run", *words[1:]], tmp_path))
    assert not fits(found, [*numberless(expected), "..."])  # the receipt is on stderr, which comes after stdout here
    run = tmp_path / "runs" / "mine"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 1
    assert lines[-1]["step"] == 256 and lines[-1]["tokens"] == 8 * 1000 and lines[-1]["learning_rate"] < 1e-6
    report = json.loads((run / "report.json").read_text())
    assert (report["state"], report["plan"]["strategy"]) == ("finished", "fsdp")
    assert report["timing"]["steps"] == 253 and report["receipts"]["effects"]["lines"]
    written = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    words = second.replace("examples/", f"{configs.ROOT}/examples/").split()
    assert not fits(_run(words[1:], tmp_path).splitlines(), after.splitlines())
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()} == written


def numberless(text: str) -> list[str]:
    """Lines without their numbers, and without what a column is filled up with: a number may end in a zero, or not."""
    lines = (re.sub(r"\d+(\.\d+)?( (ms|s|k|M)\b)?", "#", line) for line in text.splitlines())
    return [re.sub(r" +(?=│|$)", "", line) for line in lines]
