"""``shardwise train`` on DeepSpeed: the loss of fsdp, resume, the swap folder, and what is said when it cannot be."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.checkpoint.format import newest
from shardwise.errors import PlanError, UserError
from shardwise.parallel.engines import deepspeed_available as deepspeed_ready
from shardwise.parallel.engines import deepspeed_nvme as deepspeed_drive
from shardwise.plan.plan import Plan, runnable
from shardwise.plan.strategy import runnable_strategy
from tests.cli import configs

HAS = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS, reason="DeepSpeed is not installed (pip install 'shardwise[deepspeed]')")


@pytest.mark.turns(2)
@needs_deepspeed
def test_it_stands_at_the_loss_of_fsdp_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    losses, hashes = {}, {}
    for name, strategy, stop in (
        ("fsdp", "fsdp", 12),
        ("whole", "deepspeed-zero3", 12),
        ("cut", "deepspeed-zero3", 6),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = configs.write_config(folder, parallel={"strategy": strategy})
        if stop < 12:
            configs.train_and(lambda ranks: ranks[0].kill(), folder, stop, config, exit_code=3)
        out, _ = configs.train(config, "--json")
        document = json.loads(out.splitlines()[-1])
        assert document["strategy"] == strategy and document["receipts"]["effects"]["ok"]
        losses[name], hashes[name] = document["loss"], configs.hashes(Path(str(newest(folder / "run" / "checkpoints"))))
        if strategy != "fsdp":
            assert document["timing"]["parts"]["clip"] is None
            assert "DeepSpeed clips" in document["timing"]["unmeasured"]["clip"]
    assert losses["whole"] == pytest.approx(losses["fsdp"], abs=1e-3)
    assert losses["cut"] == losses["whole"] and hashes["cut"] == hashes["whole"]


def test_deepspeed_that_is_not_there_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"not installed; pip install 'shardwise\[deepspeed\]'"):
        deepspeed_ready.import_deepspeed()


def test_each_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    problems = deepspeed_ready.tool_problems()
    assert len(problems) == 2 and "pip install ninja" in problems[0] and "apt install libaio-dev" in problems[1]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler' is not there" in deepspeed_ready.tool_problems()[0]


def test_a_lock_that_a_killed_build_has_left_is_taken_away_and_a_live_one_is_not(tmp_path: Path) -> None:
    said: list[str] = []
    assert not deepspeed_ready.free_lock(tmp_path, said.append)
    (tmp_path / "lock").touch()
    time.sleep(0.3)
    assert deepspeed_ready.free_lock(tmp_path, said.append, quiet_s=0.2)
    assert "was killed" in said[-1] and not (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()
    builder = tmp_path / "ninja"
    builder.symlink_to(shutil.which("sleep") or "/bin/sleep")
    process = subprocess.Popen([str(builder), "60"], cwd=tmp_path)
    try:
        with pytest.raises(UserError, match="locked by another build"):
            deepspeed_ready.free_lock(tmp_path, said.append, quiet_s=0.0, limit_s=0.5)
    finally:
        process.kill()
        process.wait()


def test_a_swap_folder_that_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, said in ((None, "set parallel.nvme_path"), (str(tmp_path / "gone"), "does not exist"), (str(file), "no")):
        assert said in deepspeed_drive.path_problems(path)[0]
    assert not deepspeed_drive.path_problems(str(tmp_path))

    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(deepspeed_drive.tempfile, "TemporaryFile", refuse)
    assert "cannot be written to: Permission denied" in deepspeed_drive.path_problems(str(tmp_path))[0]
    deepspeed_drive.check_room(str(tmp_path), 1)
    with pytest.raises(UserError, match=r"are swapped there, and .* are free; make room"):
        deepspeed_drive.check_room(str(tmp_path), 1 << 60)


def test_a_slow_drive_is_told_with_its_speed_and_the_seconds_of_a_step(tmp_path: Path) -> None:
    speed = deepspeed_drive.drive_speed(str(tmp_path))
    assert speed is not None and min(speed) > 0 and not list(tmp_path.iterdir())
    assert deepspeed_drive.slow_text("/swap", 1, 1, (2e9, 3e9)) == ""
    text = deepspeed_drive.slow_text("/swap", 10**9, 2 * 10**9, (1e8, 2e8))
    assert "writes 0.10 GB/s and reads 0.20 GB/s" in text and "in about 20.0 s" in text


def test_two_runs_do_not_swap_to_one_folder(tmp_path: Path) -> None:
    first = deepspeed_drive.SwapFolder(str(tmp_path), holds=True)
    with pytest.raises(UserError, match="another run swaps there now"):
        deepspeed_drive.SwapFolder(str(tmp_path), holds=True)
    (tmp_path / deepspeed_drive.FOLDER / "rank0").mkdir(parents=True)
    first.close()
    assert not (tmp_path / deepspeed_drive.FOLDER).exists()
    deepspeed_drive.SwapFolder(str(tmp_path), holds=True).close()


@pytest.mark.parametrize(
    "strategy, options, said",
    [
        ("deepspeed-zero2", {"precision": "fp16"}, "precision fp16 can be planned"),
        ("deepspeed-zero2", {"compile": True}, "take compile out"),
        ("deepspeed-zero3", {"prefetch": 2}, "take 'prefetch' out"),
        ("deepspeed-zero3+nvme", {}, "set parallel.nvme_path"),
        ("deepspeed-zero3", {"nvme_path": "/x"}, "does nothing without"),
    ],
)
def test_what_deepspeed_does_by_itself_is_refused_in_a_plan(strategy: str, options: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        runnable(Plan(strategy=strategy, **options))


@pytest.mark.parametrize("strategy", ["deepspeed-zero3+tp2", "deepspeed-zero2+pp2", "deepspeed-zero3+lora"])
def test_what_is_not_run_on_deepspeed_is_said(strategy: str) -> None:
    with pytest.raises(PlanError, match="deepspeed"):
        runnable_strategy(strategy)


@pytest.mark.soak
@needs_deepspeed
@pytest.mark.timeout(900)  # the first use on a machine compiles for a minute or two, on a busy one for longer
def test_nvme_swaps_to_real_files_and_stands_at_the_same_loss(tmp_path: Path) -> None:
    missing = deepspeed_ready.tool_problems()
    if missing:
        pytest.skip("; ".join(missing))
    swap = tmp_path / "swap"
    swap.mkdir()
    found = {}
    model = {"factory": "tests.models:wide_bytes"}
    for strategy, more in (("fsdp", {}), ("deepspeed-zero3+nvme", {"nvme_path": str(swap)})):
        folder = tmp_path / strategy
        folder.mkdir()
        config = configs.write_config(
            folder,
            model=model,
            parallel={"strategy": strategy, **more},
            train={"steps": 4},
            checkpoint={"every": 0},
            optimizer={"lr": 1e-3},
        )
        process = configs.start_train(config, "--json")
        out, err = process.communicate(timeout=800)
        assert process.returncode == 0, f"{out}\n{err}"
        found[strategy] = json.loads(out.splitlines()[-1])
    lines = {line["name"]: line for line in found["deepspeed-zero3+nvme"]["receipts"]["effects"]["lines"]}
    assert lines["swapped to NVMe"]["ok"] is True, lines["swapped to NVMe"]
    assert "0 of" in lines["optimizer state held in memory"]["found"]
    assert found["deepspeed-zero3+nvme"]["loss"] == pytest.approx(found["fsdp"]["loss"], abs=1e-3)
    assert not (swap / deepspeed_drive.FOLDER).exists()  # taken away at the end
