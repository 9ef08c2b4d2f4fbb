"""A failure under torchrun: said once, by the rank that failed first, also in torchrun's own summary."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli import configs

RANK = """
import os, sys
from pathlib import Path
from shardwise.errors import DataError, Preempted
from shardwise.launch.rank import guarded

rank = int(os.environ["RANK"])

def fails():
    raise DataError("data.path = 'x' is not there; name another")

def bug():
    return 1 // 0

def lost():
    raise RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:1")

def shared():
    raise Preempted("preempted by SIGTERM after step 3")

guarded({"fails": fails, "bug": bug, "lost": lost, "shared": shared}[sys.argv[1]], Path(sys.argv[2]))
"""


def run(tmp_path: Path, what: str, rank: int, local_rank: int) -> tuple[int, str, dict[str, object]]:
    """A rank that fails: its exit code, what it prints, and what torchrun's agent reads."""
    script, file = tmp_path / "rank.py", tmp_path / "agent.json"
    script.write_text(textwrap.dedent(RANK))
    env = configs.environment() | {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(local_rank)}
    env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURMD_NODENAME": "n2"}
    env |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_ERROR_FILE": str(file)}
    command = [sys.executable, str(script), what, str(tmp_path / "logs")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, json.loads(file.read_text())["message"]


@pytest.mark.parametrize(
    ("what", "rank", "code", "printed"),
    [
        ("fails", 3, 2, "rank 3 on n2: data.path = 'x' is not there; name another\n"),
        ("shared", 0, 75, "preempted by SIGTERM after step 3\n"),
        ("shared", 3, 75, ""),
        ("lost", 3, 3, ""),
    ],
)
def test_what_a_rank_prints(tmp_path: Path, what: str, rank: int, code: int, printed: str) -> None:
    found, said, told = run(tmp_path, what, rank, rank % 2)
    assert (found, said) == (code, printed)
    assert "Traceback" not in str(told["message"]) or what == "lost"
    assert "Traceback" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


def test_a_bug_has_its_traceback_everywhere_and_comes_before_what_it_caused(tmp_path: Path) -> None:
    _, said, cause = run(tmp_path, "bug", 3, 1)
    assert said.startswith("rank 3 on n2: Traceback") and "ZeroDivisionError" in said
    assert "ZeroDivisionError" in str(cause["message"])
    _, said, symptom = run(tmp_path, "lost", 2, 0)
    assert "Connection closed by peer" in said, "one rank of each node says it"
    times = [int(one["extraInfo"]["timestamp"]) for one in (cause, symptom)]  # type: ignore[index]
    assert times[0] < times[1]


@pytest.mark.turns(3)
def test_torchruns_summary_has_the_sentence(tmp_path: Path) -> None:
    """Rank 0 finds the mistake, and the other one only waits for it."""
    config = configs.write_config(tmp_path, data={"path": str(tmp_path / "nowhere")}, parallel={"nproc": None})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "shardwise", "train", str(config)],
        cwd=configs.ROOT,
        env=configs.environment() | {"OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=150,
    )
    console, _, summary = done.stderr.partition("Root Cause (first observed failure)")
    sentence = f"data.path '{tmp_path / 'nowhere'}'"
    assert console.count(sentence) == 1 and sentence in summary, done.stderr
    assert "exitcode  : 2" in summary and "To enable traceback see" not in done.stderr
    assert "could not prepare" not in console.partition("torch/distributed")[0]
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
