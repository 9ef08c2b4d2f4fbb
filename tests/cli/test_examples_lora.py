"""The examples that train adapters: the held-out loss falls, the receipts are true, the base stays what it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import train_example

SHORT = ("data.seq_len=128", "train.eval_every=0", "train.eval_samples=128")
"""What makes an example short; steps are beside it. Their rate is lower than the example's, which takes more steps to
pay off: the fall was 0.04 bits when this was written, and adapters that do not train give none."""


def run(name: str, base: Path, folder: Path, *words: str) -> dict[str, Any]:
    """The summary of a short run of an example on ``base``."""
    train_example(name, [f"model.weights={base}", f"train.output={folder}", *SHORT, *words])
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def digest(folder: Path) -> str:
    """Of the bytes of every checkpoint in a run folder."""
    files = sorted((folder / "checkpoints").rglob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.fixture(scope="module")
def before(small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Held-out bits per byte of the base, on what the examples train on: adapters add nothing at first."""
    still = run("lora.toml", small_base, tmp_path_factory.mktemp("still"), "train.steps=1", "optimizer.lr=1e-12")
    return float(still["heldout_bits_per_byte"])


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_an_example_learns(name: str, small_base: Path, before: float, tmp_path: Path) -> None:
    frozen = digest(small_base)
    found = run(f"{name}.toml", small_base, tmp_path, "train.steps=36", "optimizer.warmup_steps=4", "optimizer.lr=3e-3")
    assert found["strategy"] == f"fsdp+{name}"
    assert found["receipts"]["effects"]["ok"], found["receipts"]
    assert found["receipts"]["fit"]["ok"], found["receipts"]
    assert found["heldout_bits_per_byte"] < before - 0.02, (found["heldout_bits_per_byte"], before)
    assert digest(small_base) == frozen
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000036" / "manifest.json").read_text())
    assert manifest["model"]["base"]["weights"] == str(small_base)
    trained = {key for key in manifest["tensors"] if key.startswith("model/")}
    assert len(trained) == 2 * 7 * 4
    assert all(".lora_A." in key or ".lora_B." in key for key in trained)
