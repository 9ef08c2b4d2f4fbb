"""Runs that fail after their ranks have started: the exit code, one clear message, and nothing lost or left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from shardwise.checkpoint.format import newest
from tests.cli import configs
from tests.commands import start_servers

FEW = {"train": {"steps": 4, "eval_samples": 8}, "checkpoint": {"every": 1}}


def bad_run(folder: Path, *words: str, exit_code: int, **changes: dict[str, Any]) -> str:
    """Run the command with two ranks; what it says on stderr. Its end is the end of all its processes."""
    config = configs.write_config(folder, **{**FEW, **changes})
    start_servers()
    before = set(psutil.Process().children(recursive=True))
    _, said = configs.train(config, *words, exit_code=exit_code)
    assert set(psutil.Process().children(recursive=True)) <= before
    return said


def opened(checkpoint: Path | None) -> dict[str, bytes]:
    """Every tensor of a checkpoint, read anew; its manifest must know each file."""
    assert checkpoint is not None
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    named = {shard["file"] for entry in manifest["tensors"].values() for shard in entry["shards"]}
    files = sorted(checkpoint.glob("*.safetensors"))
    assert named == {file.name for file in files}
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            found |= {f"{file.name}/{key}": content.get_tensor(key).numpy().tobytes() for key in content.keys()}  # noqa: SIM118
    assert any("model/embed.weight" in name for name in found)
    return found


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose first update is absurd, so that the second loss is no number: its weights decay beyond fp32."""
    folder = tmp_path_factory.mktemp("diverged")
    decay = {"factory": "torch.optim:SGD", "kwargs": {"weight_decay": 1e34}}
    wild = {"optimizer": {**decay, "warmup_steps": 0, "clip_norm": "none"}}
    return folder, bad_run(folder, exit_code=1, **wild)


def test_a_loss_that_is_no_number_stops_the_run(diverged: tuple[Path, str]) -> None:
    folder, said = diverged
    assert "Traceback" not in said
    assert re.search(r"shardwise: step 2: the loss is (nan|inf)", said)
    assert "Try a lower optimizer.lr" in said
    last = newest(folder / "run" / "checkpoints")
    assert last is not None and last.name == "step-00000001"
    assert opened(last)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"train": FEW["train"] | {"seed": 1}}, "train.seed was 0, is 1"),
        ({"data": {"path": "python:wsgiref"}}, "the data (content) was"),
        ({"data": {"seq_len": 16, "shuffle": False}}, "data.seq_len was 32, is 16; data.shuffle was True, is False"),
    ],
    ids=["seed", "data", "samples"],
)
def test_what_would_repeat_samples_is_refused(
    diverged: tuple[Path, str], changes: dict[str, dict[str, Any]], what: str
) -> None:
    folder, _ = diverged
    checkpoints = folder / "run" / "checkpoints"
    before = {path.name: opened(path) for path in checkpoints.glob("step-*")}
    said = bad_run(folder, exit_code=2, **changes)
    assert "Traceback" not in said
    assert what in said
    assert "undo the change or choose another train.output" in said
    assert str(checkpoints / "step-00000001") in said
    assert {path.name: opened(path) for path in checkpoints.glob("step-*")} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for checkpoints with room for one of them."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_costs_no_checkpoint(small_disk: Path, tmp_path: Path) -> None:
    model = {"factory": "tests.golden.models:tiny", "kwargs": {"width": 256}}  # 3 MiB with the optimizer's state
    said = bad_run(tmp_path, exit_code=3, model=model)
    assert "Traceback" not in said
    wrote = re.search(r"could not write '(.+?)': No space left on device", said)
    assert wrote and wrote[1].startswith(str(small_disk))
    assert re.search(r"the checkpoint needs 3\.\d+ MiB and [\d.]+ [KM]iB are free; make room or choose", said)
    assert "Earlier checkpoints are untouched" in said
    assert [path.name for path in small_disk.glob("*step-*")] == ["step-00000001"]
    assert opened(newest(small_disk))


def test_a_forward_that_raises_on_one_rank_is_blamed_on_it(tmp_path: Path) -> None:
    said = bad_run(tmp_path, exit_code=3, model={"factory": "tests.golden.models:fails_on_rank_one"})
    lines = (configs.ROOT / "tests" / "golden" / "models.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "raise ValueError" in line)
    assert "shardwise: rank 1 raised ValueError: rank 1 was told to fail" in said
    assert f'tests/golden/models.py", line {number}, in forward' in said
    log = re.search(r"the whole of it is in (\S+)", said)
    assert log and "rank 1 was told to fail" in Path(log[1]).read_text()
    assert newest(tmp_path / "run" / "checkpoints") is None


def test_weights_of_another_model_are_told_key_by_key(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"embed.weight": torch.zeros(257, 3), "head.bias": torch.zeros(257)}, tmp_path / "model.safetensors")
    said = bad_run(tmp_path, exit_code=2, model={"weights": str(tmp_path)})
    assert "Traceback" not in said
    assert "is not of this model; give other weights" in said
    assert "embed.weight: (257, 3) in" in said and "(257, 12) in the model" in said
    assert "scale: not in" in said
    assert "head.bias: in" in said
