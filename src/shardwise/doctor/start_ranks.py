"""The self-test of ranks on this machine: start them, watch their processes, and say which one did not answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from shardwise.doctor.rank_self_test import RankAnswer, RanksTest, judged, process_state
from shardwise.errors import Interrupted, ShardwiseError
from shardwise.launch.on_ranks import on_ranks

SLOW_START_S = 30.0
"""Seconds beyond the ranks' own time-outs, for their imports."""
IDLE_S = 5.0
"""Seconds beyond their time-out, when none of them is running."""
GRACE_S = 3.0
"""Seconds that ranks have to report after a request to end."""


class RankTestTask(BaseModel):
    """Task of a rank, and the location of its result."""

    model_config = ConfigDict(frozen=True)

    folder: str
    device: Literal["cpu", "cuda"]
    timeout_s: float
    start_s: float | None = None


def check_ranks(
    world_size: int,
    device: Literal["cpu", "cuda"],
    timeout_s: float,
    *,
    start_s: float | None = None,
    work: str = f"{__name__}:answer_as_rank",
    threads: int = 1,
) -> RanksTest:
    """Start ``world_size`` local ranks, return the result, and end all, also stopped ones.

    Times are those of `shardwise.doctor.rank_self_test.self_test`; ``work`` is what runs as a rank.

    Raises:
        Interrupted: by the user.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as name:
        folder, message = Path(name), ""
        task = RankTestTask(folder=name, device=device, timeout_s=timeout_s, start_s=start_s)
        monitor = _RankMonitor(name, timeout_s, timeout_s if start_s is None else start_s)
        try:
            on_ranks(work, task, world_size, device=None, threads=threads, grace_s=GRACE_S, folder=folder)
        except Interrupted:
            if not monitor.ended_them:
                raise
        except ShardwiseError as failure:
            message = "\n".join(line for line in str(failure).splitlines() if name not in line)  # logs that are deleted
        finally:
            monitor.stop()
        found = [RanksTest.model_validate_json(path.read_text()) for path in folder.glob("answer-*.json")]
    if found:  # who waited longest has seen most
        return explained(min(found, key=lambda one: (len(one.silent), one.speaker)), message, monitor.seen, timeout_s)
    return no_answer(world_size, device, timeout_s, message, monitor, time.monotonic() - began)


def no_answer(
    world_size: int, device: str, timeout_s: float, message: str, monitor: _RankMonitor, seconds: float
) -> RanksTest:
    """Build the result where no rank left one: from `run_local`, or else their processes' state."""
    answers = tuple(
        RankAnswer(rank=rank, state=monitor.seen.get(rank, "its process was never seen")) for rank in range(world_size)
    )
    found = RanksTest(
        world_size=world_size,
        backend="NCCL" if device == "cuda" else "gloo",
        speaker=-1,
        seconds=seconds,
        answers=answers,
    )
    if not message or monitor.ended_them:
        return judged(found, timeout_s)
    named = re.match(r"ranks? ([\d, ]+)", message) or re.search(r"on ranks? ([\d, ]+)\)$", message)
    ranks = tuple(int(number) for number in named[1].split(",")) if named else tuple(range(world_size))
    fix = "its own message gives the reason; no rank can respond before that is fixed"
    return found.model_copy(update={"problem": message, "fix": fix, "stage": "start", "silent": ranks})


def explained(found: RanksTest, message: str, seen: dict[int, str], timeout_s: float) -> RanksTest:
    """Add this process's view to the ranks' verdict: the silent ones, and how one died."""
    if not found.silent:
        return found
    answers = tuple(
        answer.model_copy(update={"state": answer.state or seen.get(answer.rank, "")})
        if answer.rank in found.silent
        else answer
        for answer in found.answers
    )
    verdict = judged(found.model_copy(update={"answers": answers}), timeout_s)
    died = (
        message.splitlines()[0] if any(message.startswith(f"rank {rank} was killed") for rank in found.silent) else ""
    )
    return verdict.model_copy(update={"problem": f"{verdict.problem}; {died}"}) if died else verdict


class _RankMonitor:
    """Monitor of the ranks' processes: records their states, and kills leftovers.

    Ranks that respond end by themselves. Those left at the time-out (all stopped, for example) are killed by id after
    their state was recorded.
    """

    def __init__(self, mark: str, timeout_s: float, start_s: float) -> None:
        self.seen: dict[int, str] = {}
        self.ended_them = False
        self._mark, self._idle_s, self._most_s = mark, timeout_s + IDLE_S, timeout_s + start_s + SLOW_START_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardwise-doctor-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the monitor."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        began = idle_since = time.monotonic()
        while not self._stop.wait(0.2):
            ranks, now = self._ranks(), time.monotonic()
            for rank, process in ranks.items():
                if self._works(process):
                    idle_since = now
                    self.seen.pop(rank, None)
                else:  # the first state counts: later ones are caused by ending the ranks
                    self.seen.setdefault(rank, process_state(socket.gethostname(), process.pid))
            if now - idle_since > self._idle_s or now - began > self._most_s:
                self._end(ranks)

    def _end(self, ranks: dict[int, psutil.Process]) -> None:
        self.ended_them = True
        for rank, process in ranks.items():
            with contextlib.suppress(psutil.Error):
                self.seen.setdefault(rank, process_state(socket.gethostname(), process.pid))
                process.kill()

    def _ranks(self) -> dict[int, psutil.Process]:
        """Return the children that are ranks of this test."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(os.getpid()).children():
                with contextlib.suppress(psutil.Error, ValueError, KeyError):
                    if any(word.startswith(self._mark) for word in process.cmdline()):
                        found[int(process.environ()["RANK"])] = process
        return found

    def _works(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_TRACING_STOP)
        return False


def answer_as_rank(task: RankTestTask, _: None) -> None:
    """Test as one rank, and leave what it found in the task's folder, whatever becomes of the others.

    Raises:
        SystemExit: something is wrong, so that ranks which are still there are ended.
    """
    from shardwise.doctor.rank_self_test import self_test
    from shardwise.environment import rendezvous
    from shardwise.errors import UserError

    place = rendezvous()
    if place is None:
        raise UserError("this is a rank of shardwise doctor: run shardwise doctor")
    stop_event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_event.set())
    found = self_test(place, task.device, task.timeout_s, start_s=task.start_s, stop_event=stop_event)
    partial = Path(task.folder) / f"partial-{place.rank}"
    partial.write_text(found.model_dump_json())
    partial.replace(Path(task.folder) / f"answer-{place.rank}.json")
    if found.problem is not None:
        raise SystemExit(ShardwiseError.exit_code)
