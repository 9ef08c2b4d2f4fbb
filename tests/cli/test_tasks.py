"""Tasks on the command line: the example of the page reaches its accuracy, and what a verb does not know is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.cli import configs
from tests.commands import shardwise
from tests.task_models import write_task

PAGE = (configs.ROOT / "docs" / "tasks.md").read_text()
SCRIPT, CONFIG = re.search(r"```python\n(.*?)```.*?```toml\n(.*?)```", PAGE, re.DOTALL).groups()
SHOWN = re.search(r"accuracy:\n\n```\n(.*?)```", PAGE, re.DOTALL)[1]
ACCURACY = 0.93


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example, run on two ranks: its folder, and what it printed."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, check=True)
    (folder / "digits.toml").write_text(CONFIG)
    return folder, shardwise("train", "digits.toml", cwd=folder).stdout


@pytest.mark.turns(6)
def test_digits_are_told_apart(digits: tuple[Path, str]) -> None:
    folder, said = digits
    summary = json.loads((folder / "runs" / "digits" / "summary.json").read_text())
    assert summary["heldout"]["accuracy"] >= ACCURACY
    assert summary["heldout_bits_per_byte"] is None and "tokens" not in summary
    page = (folder / "runs" / "digits" / "report.html").read_text()
    assert "right, loss 0." in page and "samples/s," in page
    for line in SHOWN.splitlines():
        shape = re.escape(line).replace(r"\.\.\.", ".*")
        shape = re.sub(r"\d[\d.,]*(?:\\ k)?", r"[\\d.,]+(?: [km])?", shape)
        if "images/s" in line:
            shape = shape.partition("images/s")[0] + "images/s"
        assert re.search(shape, said), (line, shape)


def test_the_receipts_of_a_task_are_those_of_any_run(digits: tuple[Path, str]) -> None:
    summary = json.loads((digits[0] / "runs" / "digits" / "summary.json").read_text())
    assert summary["receipts"]["effects"]["ok"] and summary["receipts"]["fit"]
    assert summary["timing"]["tokens_per_s"] is None, "an image is no token"
    lines = [json.loads(line) for line in (digits[0] / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert all(line["samples_per_s"] > 0 for line in steps) and steps[-1]["labels"] == 12 * 1432
    assert lines[-1]["heldout_accuracy"] == summary["heldout"]["accuracy"]


def test_a_finished_run_says_so(digits: tuple[Path, str]) -> None:
    said = shardwise("train", "digits.toml", cwd=digits[0]).stdout
    assert "finished" in said and "accuracy" in said


def write_config(folder: Path, kind: str, **tables: dict[str, Any]) -> str:
    document = write_task(folder, kind)
    for name, keys in tables.items():
        document.setdefault(name, {}).update(keys)
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(document))
    return str(path)


@pytest.mark.parametrize("words", [["verify"], ["plan"], ["data", "preview"], ["bench", "checkpoint"]])
def test_verbs_that_know_causal_models_only(tmp_path: Path, words: list[str]) -> None:
    told = shardwise(*words, write_config(tmp_path, "vit"), exit_code=2).stderr
    assert f"shardwise {' '.join(words)} knows causal language models" in told
    assert "the task of this config is image-classification" in told


@pytest.mark.parametrize("kind", ["bert sequences", "bert tokens", "bert masked", "t5"])
def test_the_plan_of_a_dry_run(tmp_path: Path, kind: str) -> None:
    config = write_config(tmp_path, kind, parallel={"nproc": 2, "strategy": "fsdp", "device": "cpu"})
    said = shardwise("train", config, "--dry-run").stdout
    assert "24 training rows, 0 held out" in said and "plan: fsdp" in said and "nothing was started" in said


def test_an_encoder_with_a_decoder_is_not_cut(tmp_path: Path) -> None:
    config = write_config(tmp_path, "t5", parallel={"nproc": 2, "strategy": "ddp+pp2", "device": "cpu"})
    assert "a skip connection" in shardwise("train", config, exit_code=2).stderr
