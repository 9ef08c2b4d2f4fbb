"""``shardwise train`` as a user runs it: the command, real ranks, kill -9, Ctrl-C, torchrun."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardwise.run.job import prepare_job
from shardwise.run.rank_main import run_job
from shardwise.train.config import read_config
from tests.cli import configs
from tests.turns import by_turns
from tests.worlds import run_world

STRATEGIES = {"ddp": 4, "zero1": 2, "zero2": 4, "fsdp": 4, "hsdp": 4} | {
    "zero2+offload": 2,
    "fsdp+offload": 2,
    "hsdp+offload": 4,
}
"""Each on so many ranks."""


def rank_of_job(text: str) -> None:
    from shardwise.run.job import Job

    run_job(Job.model_validate_json(text))


def train_here(folder: Path, strategy: str, world: int, **changes: dict[str, object]) -> dict[str, object]:
    """What the command does, on the test world's ranks: seconds cheaper."""
    folder.mkdir(exist_ok=True)
    overrides = [f"parallel.strategy={strategy}", f"parallel.nproc={world}"]
    config = read_config(configs.write_config(folder, **changes), overrides)
    job = prepare_job(config, lambda text: None).job
    run_world(rank_of_job, world, job.to_json())
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.turns(1)
def test_every_strategy_ends_at_the_same_loss(tmp_path: Path) -> None:
    """And starts at the same: the first loss, before any update, is that of the same weights."""
    found, first = {}, {}
    without_luck = {"model": {"kwargs": {"dropout": 0.0}}, "train": {"steps": 14}, "checkpoint": {"every": 0}}
    for strategy in by_turns(list(STRATEGIES), 3, "strategies"):
        world = STRATEGIES[strategy]
        summary = train_here(tmp_path / strategy, strategy, world, **without_luck)
        receipts = summary["receipts"]
        assert receipts["effects"]["ok"], receipts
        assert receipts["fit"]["ok"], receipts
        assert summary["strategy"] == strategy
        found[strategy], first[strategy] = summary["loss"], float(configs.losses(tmp_path / strategy)[1])
    alone = train_here(tmp_path / "alone", "ddp", 1, **without_luck)
    assert all(abs(loss - alone["loss"]) < 1e-3 for loss in found.values()), (found, alone["loss"])
    full = float(configs.losses(tmp_path / "alone")[1])
    assert all(abs(loss - full) < 1e-6 for loss in first.values()), (first, full)
    assert alone["loss"] < 4.5  # it learns: a uniform guess is log(257) = 5.55


def test_first_weights_do_not_depend_on_the_strategy(tmp_path: Path) -> None:
    """Bit for bit where one batch is not split."""
    seen = {}
    for strategy in ("ddp", "fsdp", "zero2", "zero1"):
        train_here(tmp_path / strategy, strategy, 1, train={"steps": 2}, model={"kwargs": {"dropout": 0.0}})
        seen[strategy] = configs.losses(tmp_path / strategy)[1]
    assert len(set(seen.values())) == 1, seen


def test_command_end_to_end(tmp_path: Path) -> None:
    config = configs.write_config(tmp_path)
    out, err = configs.train(config, "--json", "--strategy", "fsdp")
    document = json.loads(out.splitlines()[-1])
    assert document["schema"] == 1
    assert document["steps"] == 12
    assert document["strategy"] == "fsdp"
    assert document["receipts"]["effects"]["ok"]
    assert document["receipts"]["fit"]["ok"]
    assert math.isfinite(document["heldout_bits_per_byte"])
    assert "global batch 8 = micro batch 4 × accumulation 1 × dp 2" in err
    assert "starting" not in err + out, "a program reads along"
    assert "order-1 baseline" in err
    assert len(configs.losses(tmp_path)) == 12
    assert (tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").exists()
    started = (tmp_path / "run" / "logs" / "rank-1.log").stat().st_mtime_ns
    again, news = configs.train(config, "--json", "--strategy", "fsdp")
    assert json.loads(again) == document
    assert "finished" in news
    assert (tmp_path / "run" / "logs" / "rank-1.log").stat().st_mtime_ns == started, "no rank was started"


@pytest.mark.turns(2)
def test_a_killed_command_resumes_bit_identically(tmp_path: Path) -> None:
    """kill -9 of a rank and of the command itself; the losses and weights never notice.

    Fifty kills, of all strategies and at aimed moments, are in tests/faults/test_kill_and_resume.py.
    """
    full, broken = tmp_path / "whole", tmp_path / "broken"
    full.mkdir()
    broken.mkdir()
    changes = {"train": {"steps": 30, "eval_samples": 8}, "checkpoint": {"every": 4}}
    configs.train(configs.write_config(full, **changes), "--strategy", "fsdp")
    config = configs.write_config(broken, **changes)
    ranks: list[psutil.Process] = []

    def kill_the_last(running: list[psutil.Process]) -> None:
        ranks.extend(running)
        assert len(ranks) == 2
        ranks[-1].kill()

    configs.train_and(kill_the_last, broken, 6, config, "--strategy", "fsdp", exit_code=3)
    process = configs.start_train(config, "--strategy", "fsdp")
    configs.wait_for_step(process, broken, 18)
    ranks += psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    _gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    configs.train(config, "--strategy", "fsdp")
    assert configs.losses(broken) == configs.losses(full)
    last = Path("run") / "checkpoints" / "step-00000030"
    assert configs.hashes(broken / last) == configs.hashes(full / last)


@pytest.mark.turns(2)
def test_interrupt_saves_and_resumes(tmp_path: Path) -> None:
    full, broken = tmp_path / "whole", tmp_path / "broken"
    full.mkdir()
    broken.mkdir()
    changes = {"train": {"steps": 200, "eval_samples": 8}, "checkpoint": {"every": 0}}
    config = configs.write_config(broken, **changes)
    process = configs.start_train(config)
    configs.wait_for_step(process, broken, 20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped after step" in err
    assert "Traceback" not in err
    report = json.loads((broken / "run" / "report.json").read_text())
    assert report["state"] == "unfinished" and report["timing"] and report["findings"]

    def look(ranks: list[psutil.Process]) -> None:
        assert not (broken / "run" / "timing.json").exists(), "an earlier part does not speak for this one"

    configs.train_and(look, broken, report["figures"]["steps"] + 5, config)
    configs.train(configs.write_config(full, **changes))
    assert configs.losses(broken) == configs.losses(full)


@pytest.mark.turns(2)
def test_under_torchrun(tmp_path: Path) -> None:
    """A second time there is nothing to do: it tells the same, and the first run's summary stays."""
    config = configs.write_config(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    told = []
    for _ in range(2):
        done = subprocess.run(
            [*launcher, "-m", "shardwise", "train", str(config), "--json"],
            cwd=configs.ROOT,
            env=configs.environment(),
            text=True,
            capture_output=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    assert told[0]["steps"] == 12
    assert told[0]["receipts"]["effects"]["ok"]
    assert told[1] == told[0]
    assert "finished before: all 12 steps are done" in done.stderr


def test_the_end_of_a_run_survives_its_folder(tmp_path: Path) -> None:
    """Nothing can be written there any more, and the folder's name looks like markup: the run is as good as any."""
    folder = tmp_path / "run[/bold]"
    for name in ("environment.json", "timing.json", "findings.json", "summary.json", "report.json"):
        (folder / f"{name}.tmp").mkdir(parents=True)
    changes = {"steps": 8, "output": str(folder), "eval_samples": 8, "trackers": ["tensorboard"]}
    config = configs.write_config(tmp_path, train=changes, parallel={"nproc": 1}, checkpoint={"every": 0})
    out, err = configs.train(config, "--json")
    assert json.loads(out.splitlines()[-1])["receipts"]["effects"]["ok"]
    assert err.count("cannot be written") == 4 and "the versions of this run are not kept" in err
    assert "Traceback" not in err and f"checkpoints are in '{folder}'" in err


def test_epochs_end_with_a_partial_window(tmp_path: Path) -> None:
    """Every sample once, the last global batch smaller; the number of trained labels says so."""
    summary = train_here(
        tmp_path / "one", "fsdp", 2, train={"epochs": 1, "steps": None, "global_batch": 64}, checkpoint={"every": 0}
    )
    facts = json.loads(next((tmp_path / "one" / "run" / "data").rglob("corpus.json")).read_text())
    assert summary["tokens"] == facts["parts"]["train"]["num_tokens"] - 1


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_resume_on_four_ranks_is_bit_identical(tmp_path: Path, strategy: str) -> None:
    """From three ranks on the order of a sum matters, and DDP orders its buckets by the first backward it sees."""
    changes = {"optimizer": {"schedule": "constant"}, "checkpoint": {"every": 0}}
    train_here(tmp_path / "whole", strategy, 4, train={"steps": 12}, **changes)
    train_here(tmp_path / "broken", strategy, 4, train={"steps": 5}, **changes)
    train_here(tmp_path / "broken", strategy, 4, train={"steps": 12}, **changes)
    assert configs.losses(tmp_path / "broken") == configs.losses(tmp_path / "whole")
    last = Path("run") / "checkpoints" / "step-00000012"
    assert configs.hashes(tmp_path / "broken" / last) == configs.hashes(tmp_path / "whole" / last)


def test_the_best_evaluation_at_the_end_of_a_run_counts_where_it_goes_on(tmp_path):
    train = {"eval_every": 2, "best_metric": "heldout_loss", "global_batch": 4}
    given = {"parallel": {"nproc": 1}, "checkpoint": {"every": 2, "keep": 1}}
    configs.train(configs.write_config(tmp_path, train=train | {"steps": 4}, **given))
    best = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]
    assert best["step"] == 4
    worse = {"lr": 1.0, "warmup_steps": 0}
    configs.train(configs.write_config(tmp_path, train=train | {"steps": 6}, optimizer=worse, **given))
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]
    assert (found["step"], found["value"]) == (4, best["value"])
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
