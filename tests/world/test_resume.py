"""What may be between two starts of one run: other keys, moved data, a damaged or a lost checkpoint, Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.format import newest
from shardwise.errors import Interrupted
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import read_config
from shardwise.train.metrics import read_metrics
from tests.cli import configs
from tests.faults.kills import write_texts
from tests.worlds import WorldError, run_world


def train_here(text: str, stop_after: int | None, slow_disk_s: float) -> tuple[list[str], list[dict[str, Any]]]:
    """The loop of `shardwise train` on this rank: what it said, and the options of the optimizer at the end."""
    from shardwise.distributed.process_group import join
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.loop import TrainingRun
    from shardwise.train.resume import options_of
    from shardwise.train.session import Session

    sync = os.fsync
    os.fsync = lambda handle: (time.sleep(slow_disk_s), sync(handle))[1]
    job = Job.model_validate_json(text)
    session = Session(ranks=join(job.plan.device), planner=lambda *_: job.plan)
    session.observers.append(_Stopper(stop_after))
    reporter = _Listener()
    options: list[dict[str, Any]] = []
    try:
        TrainingRun(job.config, job.plan, open_corpus(job.corpus), session, reporter).train()
    except Interrupted as stop:
        reporter.said.append(str(stop))
    options = options_of(session.optimizer)
    session.close()
    return reporter.said, options


class _Stopper:
    """An observer that asks for the end after a step, as Ctrl-C does."""

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after = stop_after

    def on_step_end(self, session: Any, step: Any) -> None:
        if step.number == self.stop_after:
            session.stop()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class _Listener:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def train(
    folder: Path, strategy: str, world: int, *overrides: str, stop_after: int | None = None, slow_disk_s: float = 0.0
) -> tuple[str, dict[str, Any]]:
    """Begin or go on: what rank 0 said, a line each, and the options of the optimizer's first group."""
    folder.mkdir(exist_ok=True)
    texts = write_texts(folder / "texts")  # the same content, but of another time
    changes: dict[str, dict[str, Any]] = {
        "data": {"path": str(texts), "heldout_fraction": 0.2},
        "train": {"steps": 8, "global_batch": 6, "eval_every": 3, "eval_samples": 4},
        "checkpoint": {"every": 4},
    }
    mine = [f"parallel.strategy={strategy}", f"parallel.nproc={world}", *overrides]
    job = prepare_job(read_config(configs.write_config(folder, **changes), mine), lambda text: None).job
    said, options = run_world(train_here, world, job.to_json(), stop_after, slow_disk_s)[0]
    return "\n".join(said), options[0]


@pytest.mark.turns(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_options_of_the_optimizer_count_on_resume(tmp_path: Path, strategy: str) -> None:
    train(tmp_path, strategy, 2, "train.steps=4")
    said, options = train(tmp_path, strategy, 2, "train.steps=6", "optimizer.lr=1e-4", "optimizer.betas=[0.5, 0.75]")
    assert "resuming after step 4 of 6" in said
    assert "optimizer.lr 0.01 → 0.0001; optimizer.betas [0.9, 0.95] → [0.5, 0.75]" in said
    assert "4 steps total → 6, which the cosine schedule follows" in said
    assert options["betas"] == (0.5, 0.75)
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert options["lr"] == rates[-1]
    assert rates[4] <= 1e-4


def test_what_changed_is_said_and_nothing_where_nothing_did(tmp_path: Path) -> None:
    train(tmp_path, "ddp", 2, stop_after=2)
    said, _ = train(tmp_path, "ddp", 2, stop_after=4)
    assert "resuming after step 2 of 8" in said
    assert "changed since then" not in said
    said, _ = train(tmp_path, "fsdp", 3, "train.global_batch=9")
    assert "changed since then: ddp on 2 ranks → fsdp on 3 ranks (dropout draws other numbers)" in said
    assert "global batch 6 → 9" in said


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    full, broken = tmp_path / "whole", tmp_path / "broken"
    train(full, "fsdp", 2)
    train(broken, "fsdp", 2)
    last = newest(broken / "run" / "checkpoints")
    shard = last / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 16
    shard.write_bytes(data)
    way_out = f"without '{last}' the same command resumes from 'step-00000004'"
    with pytest.raises(WorldError, match=re.escape(way_out)) as caught:
        train(broken, "fsdp", 2)
    assert str(shard) in str(caught.value)
    shutil.rmtree(last)
    said, _ = train(broken, "fsdp", 2)
    assert "resuming after step 4 of 8" in said
    assert configs.losses(broken) == configs.losses(full)
    assert configs.hashes(last) == configs.hashes(full / "run" / "checkpoints" / last.name)


def test_a_damaged_only_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, "ddp", 1, "checkpoint.every=0")
    (newest(tmp_path / "run" / "checkpoints") / "manifest.json").write_text('{"schema": 2}')
    with pytest.raises(WorldError, match="the same command restarts: there is no earlier one"):
        train(tmp_path, "ddp", 1)


def test_another_folder_for_checkpoints_does_not_begin_the_run_again(tmp_path: Path) -> None:
    train(tmp_path, "ddp", 2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_text()
    elsewhere = f"checkpoint.folder={tmp_path / 'elsewhere'}"
    with pytest.raises(WorldError, match=r"has metrics of 8 steps, and .* has no checkpoint to resume from"):
        train(tmp_path, "ddp", 2, "train.steps=9", elsewhere)
    assert metrics.read_text() == before
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "elsewhere")
    said, _ = train(tmp_path, "ddp", 2, "train.steps=9", elsewhere)
    assert "resuming after step 8 of 9" in said


@pytest.mark.turns(2)
def test_stopped_while_a_background_save_is_under_way(tmp_path: Path) -> None:
    """Every step is saved, and a save takes longer than a step: the last one is of the step that was stopped at."""
    full, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(full, "fsdp", 2)
    background = ("checkpoint.every=1", "checkpoint.async_save=true")
    said, _ = train(stopped, "fsdp", 2, *background, stop_after=3, slow_disk_s=0.02)
    assert "stopped after step 3 of 8" in said
    assert newest(stopped / "run" / "checkpoints").name == "step-00000003"
    said, _ = train(stopped, "fsdp", 2, *background)
    assert "resuming after step 3 of 8" in said
    assert configs.losses(stopped) == configs.losses(full)
    last = Path("run") / "checkpoints" / "step-00000008"
    assert configs.hashes(stopped / last) == configs.hashes(full / last)
    saved = [line["step"] for line in read_metrics(stopped / "run" / "metrics.jsonl") if "checkpoint_bytes" in line]
    assert saved == list(range(1, 9))


def test_data_may_move_but_not_change(tmp_path: Path) -> None:
    train(tmp_path, "ddp", 1, "train.steps=4")
    moved = shutil.copytree(tmp_path / "texts", tmp_path / "moved")
    said, _ = train(tmp_path, "ddp", 1, "train.steps=5", f"data.path={moved}")
    assert "resuming after step 4 of 5" in said
    (moved / "00.txt").write_text((moved / "00.txt").read_text().replace("a", "b", 1))
    with pytest.raises(WorldError, match=r"was trained on other samples.*: the data \(content\) was \w{32}, is"):
        train(tmp_path, "ddp", 1, "train.steps=6", f"data.path={moved}")


def test_nothing_is_left_to_do(tmp_path: Path) -> None:
    train(tmp_path, "ddp", 2)
    before = configs.losses(tmp_path), configs.hashes(newest(tmp_path / "run" / "checkpoints"))
    said, _ = train(tmp_path, "zero1", 2)
    assert "resuming after step 8 of 8" in said
    assert (configs.losses(tmp_path), configs.hashes(newest(tmp_path / "run" / "checkpoints"))) == before
