"""docs/extending.md: its own blocks, put into a copy of the source, plan, train on two ranks, and read a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardwise
from shardwise.plan.optimizers import OPTIMIZERS
from tests.cli import configs

PAGE = (configs.ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```\w+\n# (src/shardwise/\S+?)(, at the end)?\n((?:.*\n)*?)```", PAGE)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the source with every block of the page that begins with a file's name."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(Path(shardwise.__file__).parent, folder / "src" / "shardwise", ignore=lambda *_: ["__pycache__"])
    for name, at_the_end, text in BLOCKS:
        path = folder / name
        assert path.exists() == bool(at_the_end), f"{name}: 'at the end' is for files that there are"
        with path.open("a") as file:
            file.write(f"\n\n{text}" if at_the_end else text)
    return folder


def run(extended, *words):
    """What a command of the copy prints."""
    environment = {**os.environ, "PYTHONPATH": str(extended / "src"), "COLUMNS": "160"}
    command = [sys.executable, "-m", "shardwise", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=configs.ROOT)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_what_is_added_takes_the_files_that_the_page_says():
    new = [name for name, at_the_end, _ in BLOCKS if not at_the_end]
    old = [name for name, at_the_end, _ in BLOCKS if at_the_end]
    assert new == ["src/shardwise/optim/lion.py", "src/shardwise/checkpoint/readers/npz.py"]
    assert old == [
        "src/shardwise/plan/optimizers.py",
        "src/shardwise/hardware/gpus.toml",
        "src/shardwise/checkpoint/readers/detect.py",
    ]
    assert "lion" not in OPTIMIZERS


def test_the_added_optimizer_is_planned_on_the_added_gpu(extended):
    words = ["gpt2", "--cluster", "8xToy-9000", "--seq-len", 1024, "--strategy", "ddp", "--json", "--optimizer"]
    lion, adamw = (json.loads(run(extended, "plan", *words, name)) for name in ("lion", "adamw"))
    held = [found["candidates"][0]["memory_bytes"] for found in (lion, adamw)]
    parameters = held[0]["parameters"]
    assert lion["workload"]["optimizer"] == "lion" and held[0]["optimizer"] == parameters
    assert held[1]["optimizer"] == pytest.approx(2 * parameters, rel=1e-4)
    times = [found["candidates"][0]["time_parts_s"]["optimizer"] for found in (lion, adamw)]
    assert 0 < times[0] < times[1]


@pytest.mark.turns(6)
def test_the_added_optimizer_trains_on_two_ranks_and_the_receipts_agree(extended, tmp_path):
    config = (configs.ROOT / "examples" / "stdlib.toml").read_text()
    table = '[optimizer]\nname = "lion"\nlr = 3e-4\nkwargs = { cautious = true }\n'
    (tmp_path / "lion.toml").write_text(re.sub(r"\[optimizer\]\n(?:.+\n)*", table, config))
    words = ["data.path=python:email", "data.seq_len=64", "train.eval_samples=8", "train.steps=2", "checkpoint.every=0"]
    found = {}
    for strategy in ("ddp", "fsdp"):
        output = tmp_path / strategy
        run(
            extended, "train", tmp_path / "lion.toml", *words, f"parallel.strategy={strategy}", f"train.output={output}"
        )
        found[strategy] = summary = json.loads((output / "summary.json").read_text())
        assert summary["strategy"] == strategy and summary["steps"] == 2
        effects = summary["receipts"]["effects"]
        assert effects["ok"] and "optimizer state held" in {line["name"] for line in effects["lines"]}, effects
        assert json.loads((output / "job.json").read_text())["config"]["optimizer"]["name"] == "lion"
    losses = [summary["heldout_bits_per_byte"] for summary in found.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_added_reader_is_inspected_as_any_other(extended, tmp_path):
    np.savez(tmp_path / "weights.npz", **{"body.weight": np.ones((3, 2), np.float32), "body.bias": np.zeros(3)})
    found = json.loads(run(extended, "checkpoint", "inspect", tmp_path / "weights.npz", "--json").splitlines()[-1])
    assert "NumPy archive" in json.dumps(found) and "body.weight" in json.dumps(found)


def test_an_optimizer_refuses_what_it_does_not_take(extended):
    code = (
        "from shardwise.train.config import OptimizerTable as T\n"
        "print(T(name='lion').betas, T(name='lion', betas=[0.5, 0.6]).betas, T().betas)\n"
        "for keys in ({'momentum': 0.9}, {'kwargs': {'cautios': True}}):\n"
        "    try: T(name='lion', **keys)\n"
        "    except ValueError as error: print(str(error).splitlines()[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(extended / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    lines = done.stdout.splitlines()
    assert lines[0] == "[0.9, 0.99] [0.5, 0.6] [0.9, 0.95]", done.stderr
    assert "'momentum' does nothing for lion, only for sgd" in lines[1]
    assert "'kwargs' of lion are cautious, not cautios" in lines[2]
