"""A worker that is killed: who it was, and the command that resumes, however the ranks were started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardwise.launch.rank import lost_peer
from tests.cli import configs


def test_a_local_launch_names_the_rank_and_the_command_that_resumes(tmp_path: Path) -> None:
    config = configs.write_config(tmp_path, train={"steps": 2000}, checkpoint={"every": 1000})
    _, said = configs.train_and(lambda ranks: ranks[-1].kill(), tmp_path, 4, config, "--strategy", "ddp", exit_code=3)
    assert said.startswith("shardwise: rank 1 was killed by SIGKILL (")
    assert said.endswith(f"no checkpoint was saved yet; start again with: shardwise train {config} --strategy ddp\n")
    assert "Traceback" not in said


@pytest.mark.turns(2)
def test_a_worker_of_torchrun_ends_with_a_sentence_and_the_command(tmp_path: Path) -> None:
    config = configs.write_config(tmp_path, train={"steps": 4000}, parallel={"nproc": None}, checkpoint={"every": 3})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, "-m", "shardwise", "train", str(config), "--strategy", "fsdp"],
        cwd=configs.ROOT,
        env=configs.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    configs.wait_for_step(process, tmp_path, 5)
    workers = psutil.Process(process.pid).children()
    next(worker for worker in workers if worker.environ().get("RANK") == "1").kill()
    _, said = process.communicate(timeout=100)
    assert said.count("Traceback") == 1 and "/torch/distributed/run.py" in said.partition("Traceback")[2], said
    ours = said.partition("ChildFailedError")[0]
    assert "rank 1 has ended in step" in ours, said  # by the watchdog; rank 0 says what it met
    again = f"resume with: torchrun ... -m shardwise train {config} --strategy fsdp"
    assert f"checkpoints are untouched, the newest is '{tmp_path / 'run' / 'checkpoints' / 'step-'}"[:-1] in ours
    assert again in ours


def test_a_failed_collective_is_told_from_a_failed_download() -> None:
    assert lost_peer(RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"))
    assert not lost_peer(ConnectionResetError("Connection reset by peer"))
    assert not lost_peer(RuntimeError("shape '[2]' is invalid"))
