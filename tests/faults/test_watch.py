"""The watchdog over real gloo ranks: who the others wait for, why, and on which line; and no false alarm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardwise.watch import monitor
from shardwise.watch.heartbeat import PHASES, Beat, Heartbeat, read_beat
from shardwise.watch.monitor import Monitor
from shardwise.watch.rank_state import CollectiveCall, Frame, RankState
from shardwise.watch.verdict import RankFacts, Reason, Verdict, judge
from tests.cli.configs import ROOT, environment, losses, write_config
from tests.commands import shardwise


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    with mock.patch.object(monitor, "RECOVER_S", 0.5), mock.patch.object(monitor, "QUIET_S", 1.5):
        yield


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    says: tuple[str, ...]
    reason: Reason | None = None
    ranks: tuple[int, ...] = (1,)
    world: int = 2
    strategy: str = "ddp"


FAULTS = [
    Fault("sleep", 1, ("rank 1 is in other code in step 6, phase forward", "in _sleep `time.sleep"), Reason.CODE),
    Fault("stop", 1, ("rank 1 is stopped (SIGSTOP) in step 6", "kill -CONT"), Reason.STOPPED),
    Fault("native", 1, ("rank 1 does not answer: native code holds the interpreter",), Reason.NATIVE),
    Fault("loader", 1, ("rank 1 waits for its data loader in step 7, phase data",), Reason.LOADER),
    Fault("order", 1, ("ranks wait for each other", "in _order"), Reason.ORDER, ranks=(0, 1)),
    Fault("extra", 2, ("rank 2 in all_reduce(float [3])", "in _extra"), Reason.COLLECTIVES, (2,), 4, "fsdp"),
    Fault("shape", 1, ("ranks met in different collectives", "rank 0: ", "rank 1: ", "faulty.py")),
    Fault("exit", 1, ("rank 1 ended with exit code 0 in the middle of the run",)),
    Fault("segfault", 1, ("rank 1 was killed by SIGSEGV", "it stood at", "in _segfault")),
]


@pytest.mark.turns(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_the_rank_the_reason_and_the_line(tmp_path: Path, fault: Fault) -> None:
    kwargs = {"kind": fault.kind, "rank": fault.rank, "step": 6}
    config = write_config(
        tmp_path,
        model={"factory": "tests.faulty:model", "kwargs": kwargs},
        parallel={"nproc": fault.world, "strategy": fault.strategy},
    )
    done = shardwise("train", str(config), exit_code=3)
    for words in fault.says:
        assert words in done.stderr, done.stderr
    assert "resume with: shardwise train" in done.stderr
    report = tmp_path / "run" / "watch.json"
    if fault.reason is None:  # a rank that ends needs no watchdog
        assert not report.exists()
        return
    event = json.loads(report.read_text())["events"][0]
    assert (event["reason"], tuple(event["ranks"])) == (fault.reason, fault.ranks)
    assert len(event["all_ranks"]) == fault.world and event["node"]


def test_no_alarm_where_a_first_step_takes_long_or_an_evaluation_or_a_checkpoint(tmp_path: Path) -> None:
    kwargs = {"kind": "slow_first", "rank": 1, "step": 1}
    config = write_config(
        tmp_path,
        model={"factory": "tests.faulty:model", "kwargs": kwargs},
        train={"steps": 30, "eval_every": 5, "output": str(tmp_path / "run")},
    )
    with mock.patch.object(monitor, "QUIET_S", 0.2):
        done = shardwise("train", str(config))
    assert "nothing has moved" not in done.stderr and not (tmp_path / "run" / "watch.json").exists()


def test_a_run_is_the_same_without_it(tmp_path: Path) -> None:
    for name in ("with", "without"):
        train = {"steps": 4, "log_every": 1, "watch": name == "with", "output": str(tmp_path / name / "run")}
        (tmp_path / name).mkdir()
        shardwise("train", str(write_config(tmp_path / name, train=train)))
    assert (tmp_path / "with" / "run" / "watch").exists()
    assert not (tmp_path / "without" / "run" / "watch").exists()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")  # to the last bit


@pytest.mark.turns(6)
def test_a_loop_of_ones_own_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.hanging_loop", str(tmp_path)],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("shardwise: all ranks were ended")]
    assert len(said) == 1 and "rank 1 in all_reduce(float [3])" in said[0], done.stderr
    assert "hanging_loop.py:19 in main `dist.all_reduce(torch.ones(3))`" in said[0]
    assert done.returncode and "exitcode  : 3" in done.stderr
    assert (tmp_path / "watch.json").exists() and not list(tmp_path.glob("shardwise-watch-*"))


# the judge, on facts


def call(number: int, name: str = "all_reduce", size: int = 3, group: str = "0", **more: Any) -> CollectiveCall:
    more = {"pending": True, "members": (0, 1, 2, 3), **more}
    return CollectiveCall(group, "default_pg", number, name, ((size,),), ("Float",), created_ns=number, **more)


def facts(
    rank: int, *calls: CollectiveCall, letter: str = "S", phase: str = "forward", file: str = "u.py"
) -> RankFacts:
    beat = Beat(rank, 100 + rank, 7, phase, 0, 0, {})
    return RankFacts(beat, letter, False, RankState(rank, (Frame(file, 3, "f", "x"),), calls))


@pytest.mark.parametrize(
    ("ranks", "reason", "blamed"),
    [
        ([facts(0, call(5)), facts(1, call(4, pending=False))], Reason.CODE, (1,)),
        ([facts(0, call(5)), facts(1, phase="data")], Reason.LOADER, (1,)),
        ([facts(0, call(5)), facts(1, file="x/torch/utils/data/dataloader.py")], Reason.LOADER, (1,)),
        ([facts(0, call(5)), facts(1, file="x/shardwise/checkpoint/save.py")], Reason.DISK, (1,)),
        ([facts(0, call(5)), facts(1, letter="T")], Reason.STOPPED, (1,)),
        ([facts(0, call(5)), facts(1, letter="")], Reason.GONE, (1,)),
        ([facts(0, call(5)), replace(facts(1), state=None)], Reason.NATIVE, (1,)),
        ([facts(0, call(5)), facts(1, call(5, size=4))], Reason.SHAPES, (0, 1)),
        ([facts(0, call(5)), facts(1, call(5)), facts(2, call(5, "all_gather"))], Reason.COLLECTIVES, (2,)),
        (
            [
                facts(0, call(5), call(1, group="9", pending=False)),
                facts(1, call(2, group="9"), call(4, pending=False)),
            ],
            Reason.ORDER,
            (0, 1),
        ),
        (  # 2 waits for 0, which waits for 1: as under hsdp
            [
                facts(0, call(9, group="in", members=(0, 1))),
                facts(1, call(8, group="in", members=(0, 1), pending=False)),
                facts(2, call(5, group="across", members=(0, 2))),
            ],
            Reason.CODE,
            (1,),
        ),
        ([facts(0, call(5, "recv", peer=True)), facts(1)], Reason.CODE, (1,)),
        ([facts(0, call(5, "recv", peer=True)), facts(1, call(5, "send", size=4, peer=True))], Reason.LINK, (0, 1)),
        ([facts(0, file="x/torch/distributed/pipelining/schedules.py"), facts(1)], Reason.CODE, (1,)),
        ([facts(0, call(5)), facts(1, call(5))], Reason.LINK, (0, 1)),
        ([facts(0), facts(1)], None, ()),
        ([facts(0, call(5, pending=False)), facts(1, call(4, pending=False))], None, ()),
    ],
)
def test_who_holds_the_others_up(ranks: list[RankFacts], reason: Reason | None, blamed: tuple[int, ...]) -> None:
    found = judge(ranks)
    assert (None if found is None else (found.reason, found.ranks)) == (None if reason is None else (reason, blamed))


def test_ranks_of_one_node_do_not_tell_that_a_link_is_cut() -> None:
    assert judge([facts(0, call(5)), facts(1, call(5))], whole=False) is None


# deadlines


def quiet(tmp_path: Path, verdict: Verdict, *, works: bool, longest_s: float, quiet_s: float) -> bool:
    one = Monitor(tmp_path, (0, 1), tmp_path / "watch.json")
    beat = Beat(1, 1, 7, "forward", 0, 0, {"forward": int(longest_s * 1e9)})
    return one._believes(verdict, [RankFacts(beat, "S", works, None)], quiet_s)


@pytest.mark.parametrize(
    ("reason", "works", "longest_s", "quiet_s", "believed"),
    [
        (Reason.CODE, False, 0.1, 2.0, True),  # it sleeps twenty times as long as ever
        (Reason.CODE, False, 10.0, 25.0, False),  # it has taken ten seconds before
        (Reason.CODE, False, 10.0, 31.0, True),
        (Reason.LOADER, False, 0.0, 30.0, False),  # nobody knows yet how long that takes
        (Reason.LOADER, False, 0.0, 61.0, True),
        (Reason.CODE, True, 0.1, 10.0, False),  # it computes
        (Reason.CODE, True, 0.1, 21.0, True),
        (Reason.CODE, True, 0.0, 300.0, False),  # a compile
        (Reason.SHAPES, True, 100.0, 2.0, True),  # no waiting ends that
    ],
)
def test_a_wait_is_held_against_what_the_run_has_shown(
    tmp_path: Path, reason: Reason, works: bool, longest_s: float, quiet_s: float, believed: bool
) -> None:
    found = Verdict(reason, (1,), "")
    assert quiet(tmp_path, found, works=works, longest_s=longest_s, quiet_s=quiet_s) is believed


def test_a_heartbeat_is_read_from_another_process_view(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, 3)
    assert read_beat(tmp_path, 3) == Beat(3, os.getpid(), 0, "start", beat._since, 0, dict.fromkeys(PHASES, 0))
    for _ in range(4):
        beat.phase("data")
        beat.phase("forward")
        time.sleep(0.002)
    found = read_beat(tmp_path, 3)
    assert found is not None and (found.step, found.phase) == (4, "forward")
    assert found.step_ns > 2_000_000 and found.longest_ns["forward"] > 2_000_000
    assert read_beat(tmp_path, 4) is None
    (tmp_path / "rank-5.beat").write_bytes(b"SW")
    assert read_beat(tmp_path, 5) is None


def test_it_says_when_the_ranks_go_on(tmp_path: Path) -> None:
    one = Monitor(tmp_path, (0,), tmp_path / "watch.json")
    one.verdict, one._named_at = Verdict(Reason.STOPPED, (0,), "rank 0 is stopped"), time.monotonic() - 12
    Heartbeat(tmp_path, 0).phase("data")
    assert one.check() == ["the ranks go on after 12.0 s"]
    assert json.loads((tmp_path / "watch.json").read_text())["events"][0]["recovered_after_s"] > 11
