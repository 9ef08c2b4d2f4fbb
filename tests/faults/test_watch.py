"""The watchdog over real gloo ranks: who the others wait for, why, and on which line; and no false alarm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch

from shardwise.measure.step_time.timing import PHASES as PARTS
from shardwise.watch import monitor
from shardwise.watch.abort_hold import HOLD_S, any_held
from shardwise.watch.heartbeat import PHASES, Beat, Heartbeat, ranks_here, read_beat
from shardwise.watch.monitor import Monitor
from shardwise.watch.nodes import FRESH_S, Nodes
from shardwise.watch.rank_facts import RankFacts
from shardwise.watch.rank_state import CollectiveCall, Frame, RankState, Responder, ask, collectives, tell_end
from shardwise.watch.slow_rank import SlowRank
from shardwise.watch.verdict import Reason, Verdict, judge, went_on
from tests.cli.configs import ROOT, environment, losses, write_config
from tests.commands import shardwise
from tests.slurm import free_ports


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
    Fault("shape", 1, ("all_reduce(float [5]) at", "in _shape `dist"), Reason.SHAPES, ranks=(0, 1)),
    Fault("exit", 1, ("rank 1 ended with exit code 0 in the middle of the run",)),
    Fault("leave", 1, ("sys.exit was called in step 6 at", "in _leave: it ended with exit code 0", "(on rank 1)")),
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
        [*command, "-m", "tests.hanging_loop", str(tmp_path), "collective"],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("shardwise: all ranks were ended")]
    assert len(said) == 1 and "rank 1 in all_reduce(float [3])" in said[0], done.stderr
    assert "hanging_loop.py:22 in main `dist.all_reduce(torch.ones(3))`" in said[0]
    assert done.returncode and "exitcode  : 3" in done.stderr
    assert (tmp_path / "watch.json").exists() and not list(tmp_path.glob("shardwise-watch-*"))


@pytest.mark.turns(3)
def test_two_nodes_tell_each_other(tmp_path: Path) -> None:
    """On neither node alone would one see who waits for whom: rank 1 sleeps on one, rank 0 waits on the other."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "watch"]
    agents = [
        subprocess.Popen(
            [*command, "--rdzv-conf", f"is_host={int(node == 0)}", "-m", "tests.hanging_loop", str(tmp_path), "sleep"],
            cwd=ROOT,
            env={**environment(), "TMPDIR": str(tmp_path)},
            text=True,
            stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]
    stream = agents[0].stderr
    assert stream is not None
    said = next((line for line in stream if "nothing has moved" in line), "")
    for agent in agents:
        agent.terminate()
    rest = [agent.communicate(timeout=60)[1] for agent in agents]
    assert "rank 1 on " in said and "is in other code in step 6, phase" in said, said
    assert "`time.sleep(1000.0)`; rank 0 on" in said and "waits for it in" in said, said
    assert "nothing has moved" not in rest[1]  # rank 0's console says it, once


@pytest.mark.parametrize(
    ("kind", "says", "ranks"),
    [
        ("exit", "rank 1 has ended in step 6, phase forward without a word", [1]),  # of which torchrun says nothing
        ("order", "ranks wait for each other", [0, 1]),  # its forward makes groups: not while rank 0 plans alone
        ("shape", "ranks are in different shapes of one collective", [0, 1]),  # gloo would abort one, and leave no word
    ],
)
def test_under_torchrun(tmp_path: Path, kind: str, says: str, ranks: list[int]) -> None:
    kwargs = {"kind": kind, "rank": 1, "step": 6}
    config = write_config(
        tmp_path, model={"factory": "tests.faulty:model", "kwargs": kwargs}, parallel={"nproc": None, "strategy": "ddp"}
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shardwise", "train", str(config)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=200)
    assert f"shardwise: {says}" in done.stderr or f"none could go on: {says}" in done.stderr, done.stderr
    assert json.loads((tmp_path / "run" / "watch.json").read_text())["events"][0]["ranks"] == ranks


def test_a_slow_rank_is_named_and_training_goes_on(tmp_path: Path) -> None:
    kwargs = {"kind": "slow", "rank": 1, "step": 6}
    config = write_config(
        tmp_path,
        model={"factory": "tests.faulty:model", "kwargs": kwargs},
        parallel={"nproc": 2, "strategy": "fsdp"},
        train={"steps": 14, "output": str(tmp_path / "run")},
    )
    done = shardwise("train", str(config))
    said = [line for line in (done.stdout + done.stderr).splitlines() if "is slow:" in line]
    assert len(said) == 1 and said[0].startswith("rank 1 is slow: in the last "), done.stdout + done.stderr
    assert "; forward takes it 5" in said[0]
    [event] = json.loads((tmp_path / "run" / "watch.json").read_text())["events"]
    assert (event["reason"], event["ranks"]) == ("slow rank", [1])


def step_times(slow: int | None, wait_s: float = 0.9) -> tuple[int | None, dict[str, np.ndarray]]:
    rows = [dict.fromkeys(PARTS, 0.0) | {"forward": 0.1, "slowest_rank": wait_s * (slow is not None)} for _ in range(3)]
    if slow is not None:
        rows[slow] |= {"forward": 0.1 + wait_s, "slowest_rank": 0.0}
    return slow, {part: np.array([row[part] for row in rows]) for part in rows[0]}


def test_who_is_slow(tmp_path: Path) -> None:
    lines: list[str] = []
    judge_steps = lambda *steps: [one.judge(*step_times(*step)) for step in steps]  # noqa: E731
    one = SlowRank(lines.append, tmp_path / "watch.json")
    judge_steps((1,), (1,), (1,))  # the first steps may compile
    judge_steps((1,), (2,), (1,), (2,), (1, 0.1), (1, 0.1), (1, 0.1), (1,), (1,), (None,), (1,), (1,))
    assert not lines
    judge_steps((1,), (1,), (None,), (1,))
    [line] = lines
    assert line.startswith("rank 1 is slow: in the last 3 steps the others waited for it 900 ms of 1")
    assert "; forward takes it 1" in line and line.endswith(", and them 100 ms")
    judge_steps(*[(None,)] * 10)
    assert lines[1:] == ["rank 1 is as fast as the others again"]
    judge_steps(*[(2, 0.01)] * 50)  # short steps: what takes less than two seconds may be chance
    assert len(lines) == 2


# the judge, on facts


def call(number: int, name: str = "all_reduce", size: int = 3, group: str = "0", **more: Any) -> CollectiveCall:
    more = {"pending": True, "members": (0, 1, 2, 3), **more}
    return CollectiveCall(group, "default_pg", number, name, ((size,),), ("Float",), created_ns=number, **more)


def facts(
    rank: int,
    *calls: CollectiveCall,
    status: str = psutil.STATUS_SLEEPING,
    phase: str = "forward",
    file: str = "u.py",
    step: int = 7,
) -> RankFacts:
    beat = Beat(rank, 100 + rank, step, phase, 0, 0, {})
    return RankFacts(beat, status, False, RankState(rank, (Frame(file, 3, "f", "x"),), calls))


@pytest.mark.parametrize(
    ("ranks", "reason", "blamed"),
    [
        ([facts(0, call(5)), facts(1, call(4, pending=False))], Reason.CODE, (1,)),
        ([facts(0, call(5)), facts(1, phase="data")], Reason.LOADER, (1,)),
        ([facts(0, call(5)), facts(1, file="x/torch/utils/data/dataloader.py")], Reason.LOADER, (1,)),
        ([facts(0, call(5)), facts(1, file="x/shardwise/checkpoint/save.py")], Reason.DISK, (1,)),
        ([facts(0, call(5)), facts(1, status=psutil.STATUS_STOPPED)], Reason.STOPPED, (1,)),
        ([facts(0, call(5)), facts(1, status="")], Reason.GONE, (1,)),
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
        ([facts(0, call(5)), facts(1, call(5, size=4), step=8)], Reason.BATCHES, (1,)),
        ([facts(0, call(5)), facts(1, call(5)), facts(2, phase="end", status="")], Reason.BATCHES, (0, 1)),
        ([facts(0, call(5, members=(0, 1))), facts(1), facts(2, phase="end", status="")], Reason.CODE, (1,)),
        ([facts(0, call(5)), replace(facts(1, phase="end"), state=None)], None, ()),  # not watched any more
        ([facts(0), facts(1)], None, ()),
        ([facts(0, call(5, pending=False)), facts(1, call(4, pending=False))], None, ()),
    ],
)
def test_who_holds_the_others_up(ranks: list[RankFacts], reason: Reason | None, blamed: tuple[int, ...]) -> None:
    found = judge(ranks)
    assert (None if found is None else (found.reason, found.ranks)) == (None if reason is None else (reason, blamed))


def test_nodes_that_say_nothing_are_named() -> None:
    found = judge([facts(0, call(5)), facts(1, call(5))], silent=[2, 3])
    assert found is not None and (found.reason, found.ranks) == (Reason.LINK, (2, 3))
    assert "ranks 0 and 1 wait in all_reduce(float [3])" in found.text and "the node of ranks 2 and 3" in found.text
    assert judge([facts(0, call(5)), facts(1, call(5, pending=False))], silent=[2, 3]) is None
    assert judge([facts(0), facts(1)], silent=[2, 3]) is None


def test_a_shape_that_did_no_harm_is_not_blamed() -> None:
    """A last batch may be smaller on one rank; what they hang in later is another matter."""
    smaller = [call(5, pending=False, size=4), call(6)]
    found = judge([facts(0, call(5, pending=False), call(6)), facts(1, *smaller)])
    assert found is not None and found.reason is Reason.LINK
    found = judge([facts(0, call(5)), facts(1, *smaller[:1])])
    assert found is not None and found.reason is Reason.SHAPES


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([facts(0, call(5)), facts(1), facts(2)], "ranks 1 and 2 are in other code"),
        ([facts(0, call(5)), facts(1, status=""), facts(2, status="")],
         "ranks 1 and 2 have ended in step 7, phase forward without a word (processes 101 "
         "and 102); the others wait for them"),
        ([facts(0, call(5)), facts(1, status=psutil.STATUS_STOPPED), facts(2, status=psutil.STATUS_STOPPED)],
         "ranks 1 and 2 are stopped (SIGSTOP) in step 7, phase forward, and the others wait for them; "
         "kill -CONT 101 102 lets them go on"),
        ([facts(0, call(5)), facts(1, phase="data"), facts(2, phase="data")],
         "ranks 1 and 2 wait for their data loader"),
    ],
)  # fmt: skip
def test_several_ranks_in_plain_words(ranks: list[RankFacts], says: str) -> None:
    found = judge(ranks)
    assert found is not None and says in found.text


# deadlines


def quiet(tmp_path: Path, verdict: Verdict, *, works: bool, longest_s: float, quiet_s: float) -> bool:
    one = Monitor(tmp_path, 2, tmp_path / "watch.json")
    beat = Beat(1, 1, 7, "forward", 0, 0, {"forward": int(longest_s * 1e9)})
    return one._believes(verdict, [RankFacts(beat, psutil.STATUS_SLEEPING, works, None)], quiet_s)


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
    one = Monitor(tmp_path, 1, tmp_path / "watch.json")
    one.verdict, one._named_at = Verdict(Reason.STOPPED, (0,), "rank 0 is stopped"), time.monotonic() - 12
    Heartbeat(tmp_path, 0).phase("data")
    assert one.check() == ["the ranks go on after 12.0 s"]
    assert json.loads((tmp_path / "watch.json").read_text())["events"][0]["recovered_after_s"] > 11


@pytest.mark.parametrize(("phase", "time_left"), [("forward", "2 min 00 s"), ("evaluation", "10 min 00 s")])
def test_it_says_how_long_the_ranks_have(tmp_path: Path, phase: str, time_left: str) -> None:
    Heartbeat(tmp_path, 0).phase(phase)
    one = Monitor(tmp_path, 1, tmp_path / "not there yet" / "watch.json")
    found = Verdict(Reason.STOPPED, (0,), "rank 0 is stopped")
    with mock.patch.object(monitor, "judge", return_value=found), mock.patch.object(monitor, "RECOVER_S", 120.0):
        said = [line for now in (100.0, 200.0) for line in one._look(one._beats(), now, now)]
    assert said == [
        "nothing has moved for 3 min 20 s: rank 0 is stopped",
        f"all ranks are ended in {time_left} unless they go on; their stacks: {one.report}",
    ]
    assert json.loads(one.report.read_text())["events"][0]["reason"] == "stopped"


def test_nobody_else_is_obeyed(tmp_path: Path) -> None:
    """Users of a machine see each other's abstract sockets: a request needs the secret in a file of this user."""
    folder = tmp_path / "watch"
    folder.mkdir()
    responder = Responder(folder, 1)
    try:
        assert ask(folder, [1, 2], 5.0)[1].rank == 1
        key = folder / "rank-1.key"
        assert key.stat().st_mode & 0o777 == 0o600
        name, secret = key.read_text().split()
        key.write_text(f"{name} {'00' * (len(secret) // 2)}")
        assert ask(folder, [1], 0.3) == {}
        tell_end(folder, 1)  # of another secret; else this process ends
        time.sleep(0.1)
    finally:
        responder.close()


def test_a_heartbeat_that_cannot_be_written_is_removed(tmp_path: Path) -> None:
    """One that stays would look like a rank that does not move."""
    beat = Heartbeat(tmp_path, 0)
    beat.phase("a phase of tomorrow")
    found = read_beat(tmp_path, 0)
    assert found is not None and found.phase == "other"
    with mock.patch("os.pwrite", side_effect=OSError(28, "No space left on device")):
        beat.phase("data")
    assert ranks_here(tmp_path) == [] and read_beat(tmp_path, 0) is None
    beat.phase("forward")
    beat.close()


def test_a_long_silence_is_looked_at_less_and_less(tmp_path: Path) -> None:
    """An evaluation or a compile may last an hour; its ranks are not asked twice a second for so long."""
    for rank in (0, 1):
        Heartbeat(tmp_path, rank)
    one = Monitor(tmp_path, 2, tmp_path / "watch.json")
    waits = []
    for quiet_s in (2.0, 20.0, 600.0):
        now = time.monotonic() + quiet_s
        with mock.patch("time.monotonic", return_value=now):
            one.check()
        waits.append(round(one._next - now, 1))
    assert waits == [0.5, 2.0, 5.0]


def test_a_node_is_silent_only_if_it_was_watched() -> None:
    store = torch.distributed.HashStore()
    first, second = Nodes(store, 2), Nodes(store, 2)
    mine, other = facts(0, call(5)), facts(1)
    assert first.still([mine]) == ([], None)  # nobody knows whether there is a second
    second.moving([1])
    assert first.still([mine]) == ([], None)
    with mock.patch("time.monotonic", return_value=time.monotonic() + FRESH_S + 1):
        assert first.still([mine]) == ([], [1])  # it has said nothing since
    first.moving([0])
    second.still([other])
    first.still([mine])  # what was there before may be of long ago
    assert second.still([other]) == ([mine], [])
    assert first.still([mine]) == ([other], [])
    second.moving([1])
    assert first.still([mine]) == ([], None)
    assert judge([mine], silent=None) is None
    found = judge([replace(facts(0, call(5)), unanswered=("10.0.0.2",))], silent=None)
    assert found is not None and "rank 0 waits in all_reduce(float [3])" in found.text
    assert found.text.endswith("nothing sent to 10.0.0.2 is acknowledged: a link is cut")


def test_an_evaluation_moves_though_it_is_one_phase(tmp_path: Path) -> None:
    """Its collectives go on: nobody hangs, however long it takes."""
    one = Monitor(tmp_path, 2, tmp_path / "watch.json")
    quiet = [
        one._quiet([facts(0, call(number)), facts(1, call(number - 1))], quiet=now, now=now)
        for number, now in ((5, 600.0), (9, 605.0), (9, 610.0), (9, 615.0), (10, 620.0))
    ]
    assert quiet == [600.0, 0.0, 5.0, 10.0, 0.0]


def test_a_save_in_the_background_waits_for_itself_alone() -> None:
    entry = {
        "process_group": ["0", ""], "is_p2p": False, "collective_seq_id": 1, "profiling_name": "gloo:all_reduce",
        "input_sizes": [[3]], "input_dtypes": ["Float"], "retired": False, "time_created_ns": 1,
    }  # fmt: skip
    done = threading.Event()
    saver = threading.Thread(target=done.wait)
    saver.start()
    threads = [threading.main_thread().ident, saver.ident, 77]  # the last: one of a backward, which Python has not made
    entries = [{**entry, "collective_seq_id": n, "thread_id": str(thread)} for n, thread in enumerate(threads)]
    with mock.patch("torch._C._distributed_c10d._dump_fr_trace_json", return_value=json.dumps({"entries": entries})):
        found = collectives()
    done.set()
    saver.join()
    assert [call.number for call in found] == [0, 2]


ABORTED = """
import ctypes, sys, threading, time
from pathlib import Path
from shardwise.watch import abort_hold

abort_hold.HOLD_S = 0.5
folder, where = Path(sys.argv[1]), sys.argv[2]
hold = abort_hold.AbortHold(folder, 1)
if where == "closed":
    hold.close()
end = ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]
if where == "main":
    end()
threading.Thread(target=end).start()
time.sleep(0.25)
print(abort_hold.any_held(folder), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("where", "seen"), [("thread", "True"), ("main", ""), ("closed", "")])
def test_a_thread_that_aborts_waits_first(tmp_path: Path, where: str, seen: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABORTED, str(tmp_path), where],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGABRT and done.stdout.strip() == seen
    assert "terminate called" in done.stderr  # the earlier handler has had its say


def test_a_rank_that_was_held_long_ago_hides_nothing(tmp_path: Path) -> None:
    held = tmp_path / "rank-0.held"
    held.touch()
    assert any_held(tmp_path)
    os.utime(held, (time.time() - HOLD_S - 1,) * 2)
    assert not any_held(tmp_path)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("kind", "says", "ranks"),
    [
        ("batch", "rank 1 is in step 9, and rank 0 in step 8: more batches than the others have", [1]),
        ("lost", "rank 1 failed in step 9, and rank 0 had ended after step 8: more batches", [1]),
        ("shape", "ranks are in different shapes of one collective", [0, 1]),
        ("none", "", []),
    ],
)
def test_beside_a_plain_loop(tmp_path: Path, kind: str, says: str, ranks: list[int]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.plain_loop_faults", kind, str(tmp_path)],
        cwd=ROOT,
        env={**environment(), "TMPDIR": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("shardwise: ")]
    assert len(said) == bool(says) and says in "".join(said), done.stderr
    report = tmp_path / "watch.json"
    found = json.loads(report.read_text())["events"][0]["ranks"] if report.exists() else []
    assert (found, done.returncode != 0) == (ranks, bool(says))


def test_more_batches_than_ranks_that_have_ended() -> None:
    beats = [facts(0, phase="end").beat, facts(1, phase="failed", step=8).beat]
    found = went_on(beats)
    assert found is not None and found.ranks == (1,)
    assert went_on([facts(0, phase="end").beat, facts(1, phase="failed").beat]) is None  # lost in the same step
    assert went_on([facts(0, phase="failed").beat, facts(1, phase="failed", step=8).beat]) is None
