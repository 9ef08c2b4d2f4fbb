"""SIGTERM and SIGUSR1 of a scheduler: the step ends, it is saved, the exit code is 75, and the next start resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.launch import preemption
from tests.cli import configs
from tests.faults.test_slurm import weights


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stops."""
    folder = tmp_path_factory.mktemp("full")
    configs.train(long_config(folder))
    return folder


def long_config(folder: Path, **parallel: Any) -> Path:
    folder.mkdir(exist_ok=True)
    table = {"nproc": 2, "strategy": "fsdp", **parallel}
    changes = {"every": 0, "async_save": True}
    return configs.write_config(folder, train={"steps": 40, "log_every": 1}, parallel=table, checkpoint=changes)


def preempted(folder: Path) -> dict[str, Any]:
    """What a preempted run has left, and that it has saved what it says."""
    facts: dict[str, Any] = json.loads((folder / "run" / "preempted").read_text())
    assert (folder / "run" / "checkpoints" / f"step-{facts['step']:08d}" / "manifest.json").exists()
    return facts


def is_the_full_run(folder: Path, full: Path) -> None:
    assert not (folder / "run" / "preempted").exists()
    assert configs.losses(folder) == configs.losses(full)
    assert weights(folder) == weights(full)


@pytest.mark.turns(2)
def test_a_local_run_is_preempted_and_resumed(tmp_path: Path, full: Path) -> None:
    """By a signal to the command, to one rank alone, and to all processes at once, as Slurm sends it."""
    config = long_config(tmp_path)
    me = psutil.Process()

    def usr1_to_a_rank(ranks: list[psutil.Process]) -> None:
        ranks[-1].send_signal(signal.SIGUSR1)

    def term_to_all(ranks: list[psutil.Process]) -> None:
        for process in (*ranks, me):
            process.send_signal(signal.SIGTERM)

    _, said = configs.train_and(usr1_to_a_rank, tmp_path, 4, config, exit_code=75)
    found = preempted(tmp_path)
    assert 4 <= found["step"] < 40 and found["signal"] == "SIGUSR1" and found["when"].endswith("+00:00")
    assert said.startswith(f"shardwise: preempted by SIGUSR1 after step {found['step']} of 40, saved as '")
    assert said.endswith("the same command resumes from there\n") and "Traceback" not in said
    _, said = configs.train_and(term_to_all, tmp_path, found["step"] + 3, config, exit_code=75)
    assert preempted(tmp_path)["signal"] == "SIGTERM" and preempted(tmp_path)["step"] > found["step"]
    configs.train_and(lambda ranks: me.send_signal(signal.SIGUSR1), tmp_path, 25, config, exit_code=75)
    configs.train(config)
    is_the_full_run(tmp_path, full)


def test_ctrl_c_stays_an_interrupt(tmp_path: Path) -> None:
    config = long_config(tmp_path)
    me = psutil.Process()
    _, said = configs.train_and(lambda ranks: me.send_signal(signal.SIGINT), tmp_path, 3, config, exit_code=130)
    assert said.startswith("shardwise: stopped after step ") and not (tmp_path / "run" / "preempted").exists()


@pytest.mark.turns(3)
def test_under_torchrun_the_save_is_done_before_the_agent_ends(tmp_path: Path, full: Path) -> None:
    """The agent gets SIGTERM and forwards it; then one worker alone gets SIGUSR1."""
    config = long_config(tmp_path, nproc=None)
    first = torchrun(config)
    configs.wait_for_step(first, tmp_path, 3)
    assert configs.stop(first, signal.SIGTERM) == 1  # torchrun's own, whatever its workers' was
    found = preempted(tmp_path)
    assert found["signal"] == "SIGTERM"
    second = torchrun(config)
    configs.wait_for_step(second, tmp_path, found["step"] + 3)
    workers = {int(worker.environ()["RANK"]): worker for worker in psutil.Process(second.pid).children()}
    workers[1].send_signal(signal.SIGUSR1)
    _, said = second.communicate(timeout=100)
    assert "preempted by SIGUSR1" in said and "exitcode  : 75" in said
    configs.train(config, "--nproc", "2")
    is_the_full_run(tmp_path, full)


def torchrun(config: Path, *words: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.Popen(
        [*launcher, "-m", "shardwise", "train", str(config)],
        cwd=configs.ROOT,
        env=configs.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


RANK = """
import os, sys, time
from shardwise.launch import preemption
preemption.SAME_S = 0.3
asked = []
signals = preemption.StopSignals(asked.append)
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
print(asked, flush=True)
if sys.argv[1] == "saved":
    signals.saved = True
time.sleep(1.5)
print("end", asked, flush=True)
"""


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("state", "second", "exit_code"),
    [("saving", signal.SIGTERM, 75), ("saved", signal.SIGTERM, 0), ("saving", signal.SIGINT, 0)],
)
def test_a_second_request_abandons_the_save(tmp_path: Path, state: str, second: signal.Signals, exit_code: int) -> None:
    """Not one of the same moment, and not once all is saved."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    with subprocess.Popen([sys.executable, str(script), state], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        rank.send_signal(signal.SIGUSR1)
        assert rank.stdout.readline() == f"[{int(signal.SIGUSR1)}]\n"
        rank.send_signal(signal.SIGTERM)  # of the same request
        time.sleep(0.5)
        rank.send_signal(second)
        said = rank.stdout.read()
    assert rank.returncode == exit_code
    assert ("end" in said) is (exit_code == 0)


def test_while_it_plans_a_scheduler_stops_it_like_ctrl_c() -> None:
    before = [signal.getsignal(number) for number in preemption.PREEMPTING]
    for number in preemption.PREEMPTING:
        with pytest.raises(preemption.Terminated), preemption.terminated():
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert [signal.getsignal(number) for number in preemption.PREEMPTING] == before
