"""Ranks that are forked from a process with torch loaded are what ranks started anew would be."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise import environment
from shardwise.errors import RankError
from shardwise.launch import fork_server
from shardwise.launch.local import run_local
from tests.commands import PRELOADED

MODULE = """
import json, os, signal, sys
import torch, numpy, random

def main():
    threads = len(os.listdir("/proc/self/task"))
    found = {
        "environment": dict(os.environ), "words": sys.argv[1:], "folder": os.getcwd(), "name": __name__,
        "path": os.path.samefile(sys.path[0] or ".", os.getcwd()),
        "own session": os.getsid(0) == os.getpid() == os.getpgid(0), "parent": os.getppid() == int(sys.argv[1]),
        "stdin": os.read(0, 1).decode(), "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "terminate": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "threads": torch.get_num_threads(),
        "main": sys.modules["__main__"].MARK,
    }
    found["environment"].pop("SHARDWISE_PARENT_FD", None)
    for name in ("MASTER_PORT", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        found["environment"].pop(name, None)
    draws = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if n not in "012"]
    files = sorted(os.readlink(link).split(":")[0] for link in links if os.path.lexists(link))
    print(json.dumps([found, draws, files]), flush=True)
    if len(sys.argv) > 2 and os.environ["RANK"] == "1":
        eval(sys.argv[2])
    return 0

MARK = 7
if __name__ == "__main__":
    from shardwise.launch.rank import guarded
    guarded(main)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "one_rank.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server() -> Iterator[fork_server.ForkServer]:
    found = fork_server.start(PRELOADED)
    if found is None:
        pytest.skip("ranks are forked on Linux without GPUs alone")
    yield found


def said(folder: Path, *words: str) -> list[Any]:
    """What rank 1 found, in its log."""
    command = [sys.executable, "-m", "one_rank", str(os.getpid()), *words]
    run_local(command, 2, threads=2, logs=folder / "logs")
    return list(json.loads((folder / "logs" / "rank-1.log").read_text()))


def test_a_forked_rank_is_as_one_that_is_started_anew(
    folder: Path, server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked, forked_draws, forked_files = said(folder)
    assert psutil.Process(server.pid).children() == [], "ranks are the command's children, not the server's"
    monkeypatch.setattr(fork_server, "running", lambda: None)
    anew, draws, files = said(folder)
    assert forked == anew
    assert forked["threads"] == 2 and forked["parent"] and forked["own session"] and forked["name"] == "__main__"
    assert forked_draws != draws, "nobody draws what another rank draws, unless it is seeded"
    assert forked_files.count("socket") == files.count("socket"), "the server's own socket is closed"


def test_ranks_draw_apart(folder: Path, server: fork_server.ForkServer) -> None:
    _, first, _ = said(folder)
    _, again, _ = said(folder)
    assert not set(first) & set(again)


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("os.kill(os.getpid(), 11)", "rank 1 was killed by SIGSEGV"),
        ("os._exit(5)", "rank 1 ended with exit code 5"),
        ("[].pop()", "rank 1 raised IndexError: pop from empty list"),
        ("os.kill(os.getpid(), 9)", r"rank 1 was killed by SIGKILL .*it had used up to \d\d\d\.\d\d MiB"),
    ],
)
def test_how_a_forked_rank_ends_is_told(folder: Path, server: fork_server.ForkServer, deed: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        said(folder, deed)


def test_a_child_that_a_forked_rank_leaves_is_ended_and_reaped(folder: Path, server: fork_server.ForkServer) -> None:
    said(folder, "print(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '60'), file=open('left', 'w'))")
    assert not psutil.pid_exists(int((folder / "left").read_text()))


def test_another_environment_is_started_anew(
    folder: Path, server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.setattr(server, "_socket", None)  # it is not even asked
    found, _, _ = said(folder)
    assert found["environment"]["HF_HOME"] == str(folder)


def test_what_libraries_set_at_import_does_not_prevent_a_fork(
    server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.SET_BY_LIBRARIES:
        monkeypatch.setenv(name, "1")
    assert server.suits(environment.snapshot())


def test_other_programs_are_started_anew(server: fork_server.ForkServer) -> None:
    for command in (["/bin/true"], [sys.executable, "script.py"], [sys.executable]):
        assert server.spawn(command, dict(os.environ), None, 0) is None


def test_a_server_that_died_is_done_without(folder: Path) -> None:
    lost = fork_server.ForkServer(["json", "no.such.module"])
    before = list(fork_server._servers)
    fork_server._servers[:] = [lost]
    try:
        os.kill(lost.pid, signal.SIGKILL)
        lost._process.wait()
        assert said(folder)[0]["words"] == [str(os.getpid())]
    finally:
        fork_server._servers[:] = before
        lost.close()
