"""Self-test of ranks: do all respond, and are all-reduce results correct?

It names the rank that did not respond. The ranks meet twice: at a key-value store, where each records its progress, and
in a process group, which is tested. A hanging collective does not show which rank is missing; the store does, for gloo
and NCCL alike. Collectives run in a separate thread, so that one which never returns blocks nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shardwise.environment import Rendezvous, uses_agent_store
from shardwise.errors import MachineError
from shardwise.measure.gpu.gpu_load import DeviceLoad, load_device

STAGES = ("start", "join", "all_reduce", "all_gather", "load", "end")
SMALL, LARGE, ROUNDS = 1024, 1 << 20, 5
"""Elements of the all-reduced tensors: 4 KiB for the latency, 4 MiB for the bandwidth."""
POLL_S = 0.05
GRACE_S = 5.0
"""Seconds that the others have to report after the first failure; they poll for it."""
TOLD_S = 1.0
FINAL = ("is stopped", "has ended", "is gone")
"""States from `process_state` of processes that will not respond."""
_KEY = "shardwise-doctor"


class RankAnswer(BaseModel):
    """Answer of one rank: host, last stage, and final result.

    The result is ``ok``, ``wrong``, ``failed``, ``waited`` (it saw others fail), or ``None`` (no answer). ``state`` is
    that of its process at that time.
    """

    model_config = ConfigDict(frozen=True)

    rank: int
    host: str | None = None
    pid: int | None = None
    stage: str | None = None
    word: str | None = None
    text: str = ""
    state: str = ""
    note: str = ""
    load: DeviceLoad | None = None


class RanksTest(BaseModel):
    """Result of the self-test on one rank (``speaker``); ``problem`` is ``None`` on success.

    ``small_s`` and ``large_s`` are the median seconds of an all_reduce of 4 KiB and of 4 MiB on the speaker, the first
    round left out; too few for a measurement of the link (`shardwise bench comm` is one).
    """

    model_config = ConfigDict(frozen=True)

    world_size: int
    backend: str
    speaker: int
    seconds: float
    problem: str | None = None
    fix: str = ""
    stage: str | None = None
    silent: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    answers: tuple[RankAnswer, ...] = ()
    small_s: float | None = None
    large_s: float | None = None


class _GaveUp(Exception):
    """Raised where this rank stops.

    ``kind`` is ``failed`` (in time), or ``waited`` (another one failed).
    """

    def __init__(self, kind: str, stage: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.stage = kind, stage


class Board:
    """Progress of each rank in the shared ``store``, which one thread uses."""

    def __init__(self, store: Any, place: Rendezvous) -> None:
        self.store, self.rank, self.world_size = store, place.rank, place.world_size
        self._per_host = place.local_world_size

    def here(self, note: str) -> None:
        """Record that this rank has started, on this host."""
        self._set("here", json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "note": note}))
        self.store.add(f"{_KEY}/started", 1)

    def enter(self, stage: str) -> None:
        """Record that this rank enters a stage."""
        self._set("stage", stage)

    def word(self, kind: str, text: str = "", load: DeviceLoad | None = None) -> None:
        """Record this rank's final result."""
        loaded = None if load is None else load.model_dump()
        self._set("word", json.dumps({"word": kind, "text": text, "load": loaded}))
        self.store.add(f"{_KEY}/words", 1)
        if kind != "ok":
            self.store.set(f"{_KEY}/failed", "yes")

    def started(self) -> int:
        """Number of ranks that have started."""
        return int(self.store.add(f"{_KEY}/started", 0))

    def words(self) -> int:
        """Number of ranks with a final result."""
        return int(self.store.add(f"{_KEY}/words", 0))

    def failed(self) -> bool:
        """Return whether any rank has failed."""
        return bool(self.store.check([f"{_KEY}/failed"]))

    def answers(self) -> tuple[RankAnswer, ...]:
        """Return the records of all ranks.

        One that has not started gets its neighbours' host, if known.
        """
        found: list[RankAnswer] = []
        hosts: dict[int, str | None] = {}
        for rank in range(self.world_size):
            here, stage, word = (self._get(rank, name) for name in ("here", "stage", "word"))
            facts = {**json.loads(here or "{}"), **json.loads(word or "{}")}
            state = process_state(facts.get("host"), facts.get("pid")) if word is None else ""
            hosts.setdefault(rank // self._per_host, facts.get("host"))
            hosts[rank // self._per_host] = hosts[rank // self._per_host] or facts.get("host")
            found.append(RankAnswer(rank=rank, stage=stage, state=state, **facts))
        return tuple(
            answer.model_copy(update={"host": answer.host or hosts[answer.rank // self._per_host]}) for answer in found
        )

    def _set(self, name: str, text: str) -> None:
        self.store.set(f"{_KEY}/{self.rank}/{name}", text)

    def _get(self, rank: int, name: str) -> str | None:
        key = f"{_KEY}/{rank}/{name}"
        return bytes(self.store.get(key)).decode() if self.store.check([key]) else None


def self_test(
    place: Rendezvous,
    device: str,
    timeout_s: float,
    *,
    start_s: float | None = None,
    note: str = "",
    stop_event: threading.Event | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> RanksTest:
    """Run the test as one rank; collective.

    Creates a process group and leaves it open until the process ends. Ranks have ``start_s`` (else ``timeout_s``) to
    start, counted from when this one did, and ``timeout_s`` for all that follows. ``note`` is shared with the others.
    Once ``stop_event`` is set (a launcher ends the world with a signal) this rank stops and reports its view. ``on_stage`` is
    called with each stage that this rank enters.

    Raises:
        MachineError: the store where the ranks meet cannot be reached.
    """
    agent = uses_agent_store()
    store = meet(place, timeout_s, hosts=place.rank == 0 and not agent)
    board = Board(meet(place, timeout_s, hosts=False), place)
    run = _Run(
        place, device, timeout_s, board, store, stop_event or threading.Event(), on_stage or (lambda stage: None)
    )
    run.start_s = timeout_s if start_s is None else start_s
    try:
        return _tested(run, note)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        who = f"the launcher's process on {place.master_addr}" if agent else f"rank 0 on {place.master_addr}"
        raise MachineError(
            f"rank {place.rank} on {socket.gethostname()}: {who}, which keeps the ranks' store, does not respond any "
            f"more; check it first ({(str(error).splitlines() or [''])[0]})"
        ) from error


def _tested(run: _Run, note: str) -> RanksTest:
    """Run the test after the rendezvous."""
    began, board, place, timeout_s = time.monotonic(), run.board, run.place, run.timeout_s
    board.here(note)
    try:
        run.all_stages()
        board.word("wrong" if run.wrong else "ok", run.wrong, run.load)
    except _GaveUp as gave_up:
        board.word(gave_up.kind, str(gave_up))
    run.wait_for_words()
    found = RanksTest(
        world_size=place.world_size,
        backend="NCCL" if run.devices[-1].type == "cuda" else "gloo",
        speaker=place.rank,
        seconds=time.monotonic() - began,
        answers=board.answers(),
        small_s=run.small_s,
        large_s=run.large_s,
    )
    return judged(found, timeout_s)


def meet(place: Rendezvous, timeout_s: float, *, hosts: bool) -> Any:
    """Connect to the store at the rendezvous; ``hosts``: create it here.

    Raises:
        MachineError: it cannot be reached, or its port is taken.
    """
    try:
        return TCPStore(
            place.master_addr,
            place.master_port,
            is_master=hosts,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise MachineError(
            f"rank {place.rank} on {socket.gethostname()} cannot reach the store at {place.master_addr}:"
            f"{place.master_port} in {timeout_s:g} s: is rank 0's host up, and the port open in its firewall? ({error})"
        ) from error


class _Run:
    """Stages of the test on one rank."""

    def __init__(
        self,
        place: Rendezvous,
        device: str,
        timeout_s: float,
        board: Board,
        store: Any,
        stop_event: threading.Event,
        on_stage: Callable[[str], None],
    ) -> None:
        self.place, self.timeout_s, self.board, self.store, self.on_stage = place, timeout_s, board, store, on_stage
        self.stop_event = stop_event
        self.devices = [torch.device("cpu")]
        if device == "cuda":
            self.devices.append(torch.device("cuda", place.local_rank))
        self.start_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.wrong = ""
        self.small_s: float | None = None
        self.large_s: float | None = None
        self.load: DeviceLoad | None = None

    def left(self) -> float:
        """Seconds until this rank gives up."""
        return max(0.0, self.deadline - time.monotonic())

    def all_stages(self) -> None:
        """Run all stages, from the start to the last collective."""
        self._enter("start")
        self.deadline = time.monotonic() + self.start_s
        while self.board.started() < self.place.world_size:
            self._go_on("start")
            if not self.left():
                late = ", ".join(str(answer.rank) for answer in self.board.answers() if answer.pid is None)
                raise _GaveUp("failed", "start", f"rank {late} had not started after {self.start_s:g} s")
            time.sleep(POLL_S)
        self.deadline = time.monotonic() + self.timeout_s
        self._stage("join", self._join)
        self._stage("all_reduce", self._all_reduce)
        self._stage("all_gather", self._all_gather)
        if self.devices[-1].type == "cuda":
            self._stage("load", self._under_load)
        self._enter("end")

    def wait_for_words(self) -> None:
        """Wait for every rank's final result, or until the missing ones cannot have one.

        After a failure it waits `GRACE_S` at most, and only until the missing ranks are known to be stopped or gone;
        after a request to end, one second.
        """
        failing = False
        self.deadline = max(self.deadline, time.monotonic() + POLL_S)
        while self.board.words() < self.place.world_size and self.left():
            if not failing and self.board.failed():
                failing, self.deadline = True, time.monotonic() + GRACE_S
            if self.stop_event.is_set():
                self.deadline = min(self.deadline, time.monotonic() + TOLD_S)
                self.stop_event.clear()
            if failing and all(
                any(word in answer.state for word in FINAL) for answer in self.board.answers() if answer.word is None
            ):
                return
            time.sleep(POLL_S)

    def _enter(self, stage: str) -> None:
        self.board.enter(stage)
        self.on_stage(stage)

    def _go_on(self, stage: str) -> None:
        if self.board.failed():
            raise _GaveUp("waited", stage, "another rank gave up")
        if self.stop_event.is_set():
            raise _GaveUp("waited", stage, "this rank was asked to end")

    def _stage(self, name: str, work: Callable[[], None]) -> None:
        self._enter(name)
        raised: list[BaseException] = []

        def inner() -> None:
            try:
                work()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=inner, name=f"shardwise-doctor-{name}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if thread.is_alive():
                self._go_on(name)
            if thread.is_alive() and not self.left():
                raise _GaveUp("failed", name, f"{name} did not end in {self.timeout_s:g} s")
        if raised:
            text = (str(raised[0]).splitlines() or [""])[0]
            raise _GaveUp("failed", name, f"{type(raised[0]).__name__}: {text}"[:300])

    def _join(self) -> None:
        cuda = self.devices[-1].type == "cuda"
        if cuda:
            torch.cuda.set_device(self.devices[-1])
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore(f"{_KEY}/group", self.store),
            rank=self.place.rank,
            world_size=self.place.world_size,
            timeout=datetime.timedelta(seconds=self.timeout_s),
            device_id=self.devices[-1] if cuda else None,
        )

    def _all_reduce(self) -> None:
        """All-reduce integers whose sum is known, and exact in float32 up to 1,400 ranks."""
        world, rank = self.place.world_size, self.place.rank
        for device in self.devices:
            for size in (SMALL, LARGE):
                pattern = torch.arange(size, device=device, dtype=torch.float32) % 16
                expected = pattern * (world * (world + 1) // 2)
                seconds = []
                for _ in range(ROUNDS + 1):
                    mine = pattern * (rank + 1)
                    _finish(device)
                    began = time.perf_counter()
                    dist.all_reduce(mine)
                    _finish(device)
                    seconds.append(time.perf_counter() - began)
                    if not torch.equal(mine, expected):
                        self._note_wrong("all_reduce", device, mine, expected)
                median = statistics.median(seconds[1:])
                self.small_s, self.large_s = (median, self.large_s) if size == SMALL else (self.small_s, median)

    def _all_gather(self) -> None:
        for device in self.devices:
            mine = torch.tensor([self.place.rank], device=device)
            rows = [torch.empty_like(mine) for _ in range(self.place.world_size)]
            dist.all_gather(rows, mine)
            found, expected = torch.cat(rows), torch.arange(self.place.world_size, device=device)
            if not torch.equal(found, expected):
                self._note_wrong("all_gather", device, found, expected)

    def _under_load(self) -> None:
        self.load = load_device(self.devices[-1])

    def _note_wrong(self, what: str, device: torch.device, found: torch.Tensor, expected: torch.Tensor) -> None:
        bad = (found != expected).nonzero()
        i = int(bad[0])
        self.wrong = (
            f"{what} on {device.type}: {len(bad)} of {found.numel()} numbers are wrong, the first at {i}: "
            f"{found[i].item():g}, not {expected[i].item():g}"
        )


def judged(found: RanksTest, timeout_s: float) -> RanksTest:
    """Add the verdict to the test: silent ranks, wrong ones, the first failure, or success.

    A rank without a final result is blamed before any that reports; ranks that all respond at the store but fail a
    collective have a problem between them.
    """
    silent = [answer for answer in found.answers if answer.word is None]
    wrong = [answer for answer in found.answers if answer.word == "wrong"]
    failed = [answer for answer in found.answers if answer.word == "failed"]
    if silent:
        text = "; ".join(f"{_name(answer)} {_silence(answer)}" for answer in silent)
        return found.model_copy(
            update={
                "problem": f"{text} (within {timeout_s:g} s)",
                "fix": _silent_fix(silent, found.world_size),
                "stage": silent[0].stage or "start",
                "silent": tuple(answer.rank for answer in silent),
            }
        )
    if wrong:
        return found.model_copy(
            update={
                "problem": "; ".join(f"{_name(answer)}: {answer.text}" for answer in wrong),
                "fix": "do not train here: find the faulty GPU, memory or link by leaving devices out one by one",
                "wrong": tuple(answer.rank for answer in wrong),
            }
        )
    if failed:
        stage = next((answer.stage for answer in failed), None)
        own = [answer for answer in failed if "did not end in" not in answer.text] or failed
        text = "; ".join(f"{_name(answer)} failed in {answer.stage}: {answer.text}" for answer in own[:4])
        variable = "NCCL_SOCKET_IFNAME" if found.backend == "NCCL" else "GLOO_SOCKET_IFNAME"
        fix = (
            "every rank answers, so it is what lies between them: name the network interface that joins the hosts in "
            f"{variable}, and check firewalls"
        )
        if stage == "start":
            fix = "look why it starts so late (a slow disk, few cores), or give it longer: --timeout"
        return found.model_copy(update={"problem": text, "fix": fix, "stage": stage})
    return found


def process_state(host: str | None, pid: int | None) -> str:
    """Describe the state of a local process; empty where remote or unknown."""
    import psutil

    if pid is None or host != socket.gethostname():
        return ""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "its process is gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process is stopped (kill -CONT {pid} lets it go on)"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "its process has ended"
    if status == psutil.STATUS_DISK_SLEEP:
        return "its process waits inside of the kernel, for a disk or a driver"
    return "its process exists and makes no progress"


def _silence(answer: RankAnswer) -> str:
    if answer.pid is None:
        return f"did not start{f': {answer.state}' if answer.state else ''}"
    return f"did not answer in {answer.stage or 'start'}{f': {answer.state}' if answer.state else ''}"


def _name(answer: RankAnswer) -> str:
    where = f" on {answer.host}" if answer.host else ""
    return f"rank {answer.rank}{where}{f' (process {answer.pid})' if answer.pid else ''}"


def _silent_fix(silent: list[RankAnswer], world_size: int) -> str:
    if all(answer.pid is None for answer in silent):
        return "check its host and its log: was it started, and can it reach rank 0's host? --timeout gives it longer"
    hosts = {answer.host or "a host that does not respond" for answer in silent}
    if len(hosts) == 1 and 1 < len(silent) < world_size:
        return f"all of them are on {hosts.pop()}: look whether it is up and reachable"
    return "check that process (py-spy dump --pid), its GPU (nvidia-smi) and its host's log (dmesg)"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
