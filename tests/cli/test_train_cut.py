"""`shardwise train` of the example under strategies that cut the model: the loss of ddp, and true receipts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import configs

EXAMPLE = configs.ROOT / "examples" / "stdlib.toml"
SHORT = ("data.path=python:json", "data.seq_len=32", "train.eval_samples=8", "checkpoint.every=0", "train.steps=8")
SHORT += ("optimizer.warmup_steps=2",)  # few steps, but large ones
CUT = [("fsdp+tp2", 4), ("ddp+pp2", 2), ("fsdp+tp2+pp2", 8)]


def run(folder: Path, strategy: str, world: int, *words: str) -> dict[str, Any]:
    output = f"train.output={folder / strategy}"
    options = ("--strategy", strategy, "--nproc", str(world), "--json")
    out, _ = configs.train(EXAMPLE, *options, output, *SHORT, *words)
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    return document


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("plain"), "ddp", 2)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_the_loss_is_that_of_ddp(plain: dict[str, Any], tmp_path: Path, strategy: str, world: int) -> None:
    found = run(tmp_path, strategy, world)
    assert found["steps"] == plain["steps"] == 8
    assert found["tokens"] == plain["tokens"]
    assert abs(found["loss"] - plain["loss"]) < 1e-3
    assert abs(found["heldout_bits_per_byte"] - plain["heldout_bits_per_byte"]) < 1e-3
    job = json.loads((tmp_path / strategy / "job.json").read_text())
    assert sum(job["plan"].get("stage_blocks") or [0]) == (4 if "pp2" in strategy else 0)
    assert {name: receipt["ok"] for name, receipt in found["receipts"].items()} == {"effects": True, "fit": True}


def test_what_the_model_does_not_allow_is_said_before_ranks_start(tmp_path: Path) -> None:
    words = ("--strategy", "ddp+tp4", "--nproc", "4", f"train.output={tmp_path / 'run'}", *SHORT)
    _, err = configs.train(EXAMPLE, *words, exit_code=2)
    assert "6" in err and "tp" in err and "Traceback" not in err
    assert not (tmp_path / "run" / "logs").exists()
