"""The doctor's self-test on real gloo ranks that are stopped, killed, late or wrong: the right one is named."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from shardwise.doctor.start_ranks import check_ranks

SHORT_S, START_S = 4.0, 60.0
"""A test of a silent rank takes the first; the second is for ranks to start on a busy machine."""


def sabotaged(monkeypatch, what: str, world: int = 2, timeout_s: float = SHORT_S, start_s: float = START_S):
    monkeypatch.setenv("SABOTAGE", what)
    before = {path.name for path in Path(tempfile.gettempdir()).glob("shardwise-doctor-*")}
    found = check_ranks(world, "cpu", timeout_s, start_s=start_s, work="tests.doctor_rank:main")
    assert {path.name for path in Path(tempfile.gettempdir()).glob("shardwise-doctor-*")} <= before
    return found


def test_all_answer(monkeypatch):
    found = sabotaged(monkeypatch, "9:none:none", world=3, timeout_s=60)
    assert found.problem is None and found.silent == () and [answer.word for answer in found.answers] == ["ok"] * 3
    assert found.small_s is not None and found.large_s is not None and found.large_s > 0
    assert {answer.host for answer in found.answers} == {socket.gethostname()}


@pytest.mark.turns(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named(monkeypatch, rank):
    found = sabotaged(monkeypatch, f"{rank}:all_reduce:stop")
    assert found.silent == (rank,) and found.stage == "all_reduce"
    assert found.problem is not None and found.problem.startswith(f"rank {rank} on {socket.gethostname()} (process ")
    assert "did not answer in all_reduce: its process is stopped" in found.problem
    assert [answer.word for answer in found.answers if answer.rank != rank].count(None) == 0
    assert not any(psutil.pid_exists(answer.pid) for answer in found.answers if answer.pid is not None)


def test_a_rank_that_dies_is_named_and_how(monkeypatch):
    found = sabotaged(monkeypatch, "1:all_gather:kill", world=3, timeout_s=60)
    assert found.silent == (1,) and found.problem is not None, found
    assert "rank 1 on" in found.problem and "killed by SIGKILL" in found.problem
    assert found.seconds < 50, "nobody waits for the dead until the time is up"


@pytest.mark.turns(3)
def test_a_rank_that_never_starts_is_named(monkeypatch):
    found = sabotaged(monkeypatch, "1:import:stop", start_s=8)
    assert found.silent == (1,) and found.problem is not None
    assert "did not start: its process is stopped" in found.problem


@pytest.mark.turns(3)
def test_a_rank_that_hangs_is_named(monkeypatch):
    found = sabotaged(monkeypatch, "1:join:late")
    assert found.silent == (1,) and found.stage == "join"
    assert found.problem is not None and "makes no progress" in found.problem


@pytest.mark.turns(3)
def test_all_are_stopped(monkeypatch):
    found = sabotaged(monkeypatch, "0,1:all_reduce:stop")
    assert found.silent == (0, 1) and found.problem is not None
    assert found.problem.count("stopped") == 2


def test_a_wrong_sum_is_named(monkeypatch):
    found = sabotaged(monkeypatch, "2:all_reduce:wrong", world=3, timeout_s=60)
    assert found.wrong == (2,) and found.silent == () and found.problem is not None
    assert "all_reduce on cpu: 1 of" in found.problem and "the first at 7: 43, not 42" in found.problem


def test_a_rank_that_dies_at_once_is_named(monkeypatch):
    found = sabotaged(monkeypatch, "1:import:kill")
    assert found.silent == (1,) and found.problem is not None, found
    assert "rank 1" in found.problem and "killed by SIGKILL" in found.problem


def test_a_rank_that_raises_is_quoted(monkeypatch):
    found = sabotaged(monkeypatch, "0,1:import:raise")
    assert found.problem is not None and "no such library" in found.problem and found.silent == (0, 1), found
