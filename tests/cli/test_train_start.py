"""Between the command and the first step: how many ranks, what is said meanwhile, and what ends it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from unittest import mock

import pytest

from shardwise.errors import Interrupted
from shardwise.launch.rank import BEFORE_WORK
from shardwise.run.job import Job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.commands import shardwise

A100 = ("NVIDIA A100-SXM4-80GB", 80 * 1024**3)


@pytest.mark.parametrize("name", ["stdlib", "lora", "qlora"])
def test_an_example_names_no_number_of_ranks(name: str) -> None:
    assert read_config(configs.ROOT / "examples" / f"{name}.toml").parallel.nproc is None


@pytest.mark.parametrize(("gpus", "ranks"), [(0, min(2, os.cpu_count() or 1)), (1, 1), (4, 4)])
def test_one_rank_for_each_gpu_and_two_on_a_cpu(
    gpus: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["train", "examples/stdlib.toml", "data.path=python:json", f"train.output={tmp_path / 'run'}"]
    with (
        mock.patch("shardwise.hardware.cluster._nvml_devices", lambda: [A100] * gpus),
        mock.patch("shardwise.cli.train.launch") as launch,
    ):
        shardwise(*words)
    job = launch.call_args.args[0]
    assert isinstance(job, Job)
    assert job.plan.device == ("cuda" if gpus else "cpu")
    assert job.plan.dims.world_size == ranks


@pytest.mark.parametrize("status", [0, 3])
def test_make_train_says_how_long_it_took(status: int, tmp_path: Path) -> None:
    """From the command to the held-out number, where it gets there."""
    (tmp_path / "shardwise").write_text(f'#!/bin/sh\necho "shardwise $@"\nexit {status}\n')
    (tmp_path / "shardwise").chmod(0o755)
    (tmp_path / "ready").touch()
    words = ["make", "--no-print-directory", "train", f"BIN={tmp_path}", f"READY={tmp_path / 'ready'}"]
    done = subprocess.run(words, cwd=configs.ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("shardwise train examples/stdlib.toml\n")
    assert (done.returncode == 0) == (status == 0)
    assert bool(re.search(r"\nmake train: \d+ s after installation\n", done.stdout)) == (status == 0)


def test_what_takes_a_while_is_announced_and_another_model_is_refused_with_the_advice_first(tmp_path: Path) -> None:
    """One run, with a factory in a file, serves them all."""
    (tmp_path / "model.py").write_text("from tests.golden.models import tiny as build\n")
    factory = f"{tmp_path / 'model.py'}:build"
    config = configs.write_config(tmp_path, model={"factory": factory}, train={"steps": 2, "eval_samples": 8})
    out, _ = configs.train(config, "--strategy", "zero3")
    lines = out.splitlines()
    assert "strategy: zero3 is fsdp here, PyTorch's implementation of the same sharding; deepspeed-zero3 runs" in out
    waits = [lines.index(line) for line in ("starting 2 ranks ...", "building the model ...", "step 1 ...")]
    assert waits == sorted(waits)
    run = tmp_path / "run"
    done = shardwise("checkpoint", "convert", str(run), str(tmp_path / "out"), "--to", "shardwise", "--model", factory)
    assert "verified by a forward pass" in done.stdout

    more = ["model.kwargs.blocks=9", "train.steps=3"]
    _, said = configs.train(config, *more, exit_code=2)
    assert said.startswith(
        f"shardwise: checkpoint '{run / 'checkpoints' / 'step-00000002'}' does not fit the model and optimizer; undo "
        "the change to the model or the optimizer, or choose another output folder"
    )
    assert len(said.splitlines()) <= 12
    _, said = configs.train(config, *more, f"model.weights={run}", f"train.output={tmp_path / 'other'}", exit_code=2)
    assert said.startswith(f"shardwise: '{run / 'checkpoints' / 'step-00000002'}' is not of this model; give other")
    assert len(said.splitlines()) <= 12


def test_versions_without_importing_torch() -> None:
    done = shardwise("--version")
    assert done.stdout == f"shardwise {version('shardwise')}, torch {version('torch')}, Python {python_version()}\n"
    assert "Usage: shardwise [OPTIONS] COMMAND" in shardwise("--help").stdout


TWICE = """
import sys
from unittest import mock
import shardwise.cli.main, shardwise.__main__ as command

def interrupted():
    try:
        exec("raise KeyboardInterrupt")  # Python notes that it came from source, and ends itself with SIGINT
    except KeyboardInterrupt:
        sys.exit(130)

with mock.patch.object(shardwise.cli.main, "main", interrupted):
    command.main()
"""


def test_an_interrupt_has_one_status_wherever_it_comes() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=configs.ROOT, env=configs.environment(), timeout=60)
    assert done.returncode == 130
    with mock.patch("shardwise.cli.main.import_module", side_effect=KeyboardInterrupt):
        done = shardwise("train", "examples/stdlib.toml", exit_code=130)
    assert done.stderr == "shardwise: interrupted\n"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (BEFORE_WORK, "interrupted before the first step: nothing was trained or saved; the same command starts again"),
        (
            "interrupted; rank 0 had to be killed",
            "rank 0 had to be killed\nno checkpoint was saved yet; start again with",
        ),
        ("stopped after step 3 of 9; the same command resumes", "stopped after step 3 of 9; the same command resumes"),
    ],
)
def test_an_interrupt_says_what_is_saved(ended: str, told: str, tmp_path: Path) -> None:
    config = configs.write_config(tmp_path)
    with mock.patch("shardwise.launch.local.run_local", side_effect=Interrupted(ended)):
        _, said = configs.train(config, exit_code=130)
    assert told in said and len(said.splitlines()) <= 2
