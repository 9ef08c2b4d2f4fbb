"""``shardwise doctor`` as a user runs it: alone, with a rank that stops, under torchrun on one host and on two."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import netns
from tests.cli import configs
from tests.commands import shardwise

DOCTOR = [sys.executable, "-m", "shardwise", "doctor"]
LAUNCHED = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardwise", "doctor"]


def run(command: list[str], *words: str, env: dict[str, str] | None = None, **options: Any) -> tuple[int, str, str]:
    """Run to the end; exit code, stdout, stderr."""
    done = subprocess.run(
        [*command, *words],
        cwd=configs.ROOT,
        env={**configs.environment(), **(env or {})},
        text=True,
        capture_output=True,
        timeout=150,
        **options,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def here(*words: str) -> tuple[int, str, str]:
    """The command in this process; exit code, stdout, stderr."""
    done = shardwise("doctor", *words, exit_code=None)
    return done.returncode, done.stdout, done.stderr


def levels(document: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["level"] for check in document["checks"]}


def test_the_document(tmp_path: Path) -> None:
    code, out, err = here("--nproc", "2", "--folder", str(tmp_path), "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["schema"] == 1 and document["healthy"] == (code == 0), err
    found = levels(document)
    assert found["ranks"] == "ok", err
    assert {"devices", "versions", "cores", "memory", "open files", "shared memory", "disk speed"} <= set(found)
    assert all(check["fix"] for check in document["checks"] if check["level"] in ("warning", "error"))
    assert document["ranks"]["world_size"] == 2 and document["machine"]["ranks"] == 2
    assert "all 2 ranks answer, and add up right" in err, "what is for people is on stderr"
    assert list(tmp_path.iterdir()) == []


def test_ranks_cannot_have_for_ever() -> None:
    code, _, err = here("--timeout", "inf")
    assert code == 2 and "86400" in err


def test_a_limit_that_is_too_low_is_an_error(tmp_path: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    code, out, err = run(DOCTOR, "--nproc", "1", "--folder", str(tmp_path), preexec_fn=lower)
    assert code == 1, err
    assert "a process may open 200 files" in out and "the hard limit is 200" in out
    assert "open files" in err and "1 error" in err


@pytest.mark.turns(2)
def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    """The setting is found by name; the ranks, who take it at its word, cannot talk, and are not called silent."""
    words = ["--nproc", "2", "--folder", str(tmp_path), "--json"]
    code, out, err = run(DOCTOR, *words, env={"GLOO_SOCKET_IFNAME": "eth77"})
    document = json.loads(out.splitlines()[-1])
    assert code == 1, err
    wrong = {check["name"]: check["text"] for check in document["checks"] if check["level"] == "error"}
    assert {"settings", "ranks"} <= set(wrong)
    assert "GLOO_SOCKET_IFNAME=eth77" in wrong["settings"] and "failed in join" in wrong["ranks"]
    assert document["ranks"]["silent"] == []


def test_a_users_mistakes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = here("--folder", str(tmp_path / "file"))
    assert code == 2 and "is a file" in err
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    code, _, err = run(DOCTOR, "--nproc", "2", env={**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"})
    assert code == 2 and "--nproc 2: the launcher has started 1 rank already" in err


@pytest.mark.turns(6)
def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    words = ["--nproc", "2", "--folder", str(tmp_path), "--timeout", "6", "--json"]
    process = subprocess.Popen(
        [*DOCTOR, *words],
        cwd=configs.ROOT,
        env=configs.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        rank = one_rank(process.pid, 1)
        os.kill(rank, signal.SIGSTOP)
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 1, err
    document = json.loads(out.splitlines()[-1])
    assert document["ranks"]["silent"] == [1] and levels(document)["ranks"] == "error"
    assert "rank 1" in document["ranks"]["problem"] and "its process is stopped" in document["ranks"]["problem"]
    assert not psutil.pid_exists(rank)


def one_rank(parent: int, rank: int) -> int:
    """The id of a rank's process, as soon as it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(parent).children():
            try:
                if child.environ().get("RANK") == str(rank):
                    return child.pid
            except psutil.Error:
                continue
        time.sleep(0.01)
    raise AssertionError("the rank was never started")


@pytest.mark.turns(2)
def test_under_torchrun(tmp_path: Path) -> None:
    code, out, err = run(LAUNCHED, "--folder", str(tmp_path), "--json")
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    assert document["ranks"]["world_size"] == 2 and levels(document)["ranks"] == "ok"
    assert [check["name"] for check in document["checks"]].count("disk speed") == 1, "one rank looks at the host"


@pytest.mark.turns(6)
@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
def test_two_hosts(tmp_path: Path) -> None:
    with netns.two_hosts(rate=None) as hosts:
        one, other = hosts.torchrun(
            ["-m", "shardwise", "doctor", "--folder", str(tmp_path), "--json"], cwd=configs.ROOT
        )
    assert one.returncode == other.returncode == 0, one.stderr + other.stderr
    document = json.loads(one.stdout.splitlines()[-1])
    assert other.stdout == "", "only one rank speaks"
    assert levels(document)["ranks"] == "ok"
    assert [check["name"] for check in document["checks"]].count("memory") == 2, "each host is looked at"


@pytest.mark.turns(6)
def test_the_other_host_never_comes(tmp_path: Path) -> None:
    """One torchrun of two: the ranks of this host answer, the other host's are named."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["--folder", str(tmp_path), "--timeout", "3", "--json"]
    code, out, err = run(DOCTOR, *words, env={**place, **meeting})
    document = json.loads(out.splitlines()[-1])
    assert code == 1, err
    assert document["ranks"]["silent"] == [1]
    assert "rank 1 did not start" in document["ranks"]["problem"]


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
