"""`run_local`: one monitored process per rank on this machine; reports the first failure."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from shardwise import environment, errors
from shardwise.errors import Interrupted, KilledForMemory, Preempted, RankError, ShardwiseError, UserError
from shardwise.launch import fork_server
from shardwise.launch.crash import met_another_collective, raised_at, stood_at, take_stacks
from shardwise.launch.preemption import PREEMPTING, Repeated
from shardwise.launch.rank import BEFORE_WORK, RankReport, crash_file, is_peer_symptom, spare
from shardwise.units import bytes_text
from shardwise.watch.exit_status import OomKills, StallMonitor
from shardwise.watch.monitor import Monitor

REPORT_S = 2.0
"""Time for the other ranks to report their state after the first failure."""

STOP_S = 60.0
"""Time for the ranks to save and exit after an interrupt."""

PREEMPTED_S = 600.0
"""The same after a scheduler's signal: it ends the processes itself when its own time is over."""

STILL_S = 30.0
"""Time that a rank's process may be stopped, or wait for a disk, before it is reported."""

_HOST = "127.0.0.1"
_POLL_S = 0.02
_KILL_S = 10.0  # a process that is stuck in a driver outlives SIGKILL
_ORPHANS_S = 1.0
_SEEN_NS = 1_000_000_000  # a rank's end is seen later than it is felt by its peers
_TAIL_LINES = 15
_CRASH_LINES = 200
_INTERRUPTED = (Interrupted.exit_code, Preempted.exit_code, -signal.SIGINT)
_STOPS = (Interrupted.__name__, Preempted.__name__)
_REASONS: dict[int, str] = {
    signal.SIGKILL: "{killed}; it had used up to {memory}",
    signal.SIGBUS: "is /dev/shm full, or a mapped file cut short?",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGABRT: "a failed check in native code",
    signal.SIGTERM: "somebody, or the scheduler, ended it",
}


def run_local(
    command: Sequence[str],
    world_size: int,
    *,
    threads: int,
    logs: Path,
    master_port: int = 0,
    grace_s: float = 5.0,
    preemptible: bool = False,
    monitor: Monitor | None = None,
) -> int:
    """Run ``command`` as ``world_size`` ranks and return 0 once all of them have ended with 0.

    The ranks find each other with ``dist.init_process_group(init_method="env://")``; the store is hosted here, at
    ``master_port`` (0: a free one). Rank 0 has this process's stdout and stderr, rank N has ``logs/rank-N.log``.
    OMP_NUM_THREADS is ``threads`` unless the user has set it.

    On the first failure the others have `REPORT_S` to report, then SIGTERM and ``grace_s``, then SIGKILL; the raised
    error is the failure that came first, not its consequences on other ranks. An interrupt (SIGINT or SIGTERM) is
    forwarded to the ranks once, as SIGINT, and they have `STOP_S` to exit; a second SIGINT kills them at once. If the
    ranks are ``preemptible``, SIGTERM and SIGUSR1 are forwarded as they are, and again when a scheduler insists. When
    this returns or raises, every process of the ranks' process groups has ended; when this process is killed, ranks
    that run under `shardwise.launch.rank.guarded` end too. ``monitor`` watches ranks that write heartbeats: what it
    finds is printed, and ranks that cannot go on are ended.
    """
    if world_size < 1:
        raise UserError(f"there must be 1 rank or more, not {world_size}")
    with _Stops(preemptible) as stops, _listen(master_port) as listener:
        world = _World(OomKills.now())
        killed: list[int] = []
        try:
            world.start(command, world_size, threads, logs, listener.getsockname()[1])
            store = _host_store(listener)  # the ranks are importing torch meanwhile
            _wait(world, stops, monitor)
            killed = [r.rank for r in world.running()]
            world.read_reports()  # before anything is killed: killing a rank makes its peers fail
        finally:
            stuck = monitor is not None and monitor.ends
            world.end(0.0 if stops.insisted or stuck else grace_s)
        del store
    if all(r.exit_code == 0 for r in world.ranks) and not killed:
        return 0
    if monitor is not None and monitor.ends and monitor.verdict is not None:
        _keep_tracebacks(world)
        raise RankError(monitor.message)
    raise _verdict(world, killed, stops)


@dataclass
class _Rank:
    """Process of one rank.

    ``exit_code`` is negative for a signal and ``None`` while it runs; ``shot``: the SIGKILL was sent by this process;
    ``crash``: the stacks that a fault in native code has left.
    """

    rank: int
    pid: int
    log: Path
    error_file: Path
    ended_ns: int = 0
    exit_code: int | None = None
    shot: bool = False
    report: RankReport | None = None
    crash: str = ""
    peak_bytes: int | None = None

    def poll(self) -> None:
        """Check whether it has ended; not reaped, so that its process group's number stays valid."""
        if self.exit_code is not None:
            return
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self.ended_ns = time.monotonic_ns()
            self.exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def ended_early(self, stopped_by: int) -> bool:
        """Return whether an interrupt ended it before it could stop in an orderly way; its peers wait for it then."""
        if stopped_by in PREEMPTING and self.exit_code == -stopped_by and not self.shot:  # before it had handlers
            return True
        if self.exit_code not in _INTERRUPTED:
            return False
        report = self.report = self.report or RankReport.read(self.error_file)
        return report is None or BEFORE_WORK in report.message

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to the processes it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Reap the ended process."""
        _, _, usage = os.wait4(self.pid, 0)
        deadline = time.monotonic() + _ORPHANS_S
        with contextlib.suppress(ChildProcessError):  # its orphans, killed with it, which a fork server makes ours
            while os.waitpid(-self.pid, os.WNOHANG)[0] or time.monotonic() < deadline:
                time.sleep(0.001)
        self.peak_bytes = usage.ru_maxrss * 1024


class _World:
    """Ranks that this process started."""

    def __init__(self, oom_kills: OomKills) -> None:
        self.oom_kills = oom_kills  # before any rank was there
        self.ranks: list[_Rank] = []
        self._lifeline: int | None = None

    def start(self, command: Sequence[str], world_size: int, threads: int, logs: Path, port: int) -> None:
        """Start every rank, each in a new session."""
        ranks_end, self._lifeline = os.pipe()  # only this process has the lifeline open: when it dies, the pipe ends
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for rank in range(world_size):
                here = environment.Rendezvous(rank, world_size, rank, world_size, _HOST, port)
                log, error_file = logs / f"rank-{rank}.log", (logs / f"rank-{rank}.error.json").absolute()
                for old in (log, error_file, spare(error_file), crash_file(error_file)):
                    old.unlink(missing_ok=True)
                env = environment.rank_environment(
                    here, threads, parent_hosts_store=True, error_file=error_file, parent_fd=ranks_end
                )
                with open(log, "wb") if rank else contextlib.nullcontext() as output:
                    pid = _start(command, env, output, ranks_end)
                self.ranks.append(_Rank(rank, pid, log, error_file))
        except OSError as unable:
            raise UserError(f"cannot start '{command[0]}' with its logs in {logs}: {unable}") from unable
        finally:
            os.close(ranks_end)

    def running(self) -> list[_Rank]:
        """Ranks that have not ended."""
        for rank in self.ranks:
            rank.poll()
        return [rank for rank in self.ranks if rank.exit_code is None]

    def read_reports(self) -> None:
        """Read the ranks' reports so far."""
        for rank in self.ranks:
            rank.report = RankReport.read(rank.error_file)

    def end(self, grace_s: float) -> None:
        """End every rank and its child processes: SIGTERM, ``grace_s`` (if any), SIGKILL."""
        if grace_s > 0:
            for rank in self.running():
                rank.signal_group(signal.SIGTERM)
            self._wait_for_all(grace_s)
        for rank in self.running():
            rank.shot = True
        for rank in self.ranks:
            rank.signal_group(signal.SIGKILL)  # data workers of a rank that has ended too
        self._wait_for_all(_KILL_S)
        for rank in self.ranks:
            spare(rank.error_file).unlink(missing_ok=True)
            rank.crash = take_stacks(rank.error_file, rank.log)
            if rank.exit_code is not None:
                rank.reap()
        if fork_server.running() is not None:
            fork_server.adopt_orphans(False)
        if self._lifeline is not None:
            os.close(self._lifeline)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _start(command: Sequence[str], env: dict[str, str], output: IO[bytes] | None, parent_fd: int) -> int:
    """Start a rank's process in a new session, by the fork server if there is one."""
    server = fork_server.running()
    if server is not None:
        pid = server.spawn(command, env, None if output is None else output.fileno(), parent_fd)
        if pid is not None:
            return pid
    process = subprocess.Popen(
        list(command),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(parent_fd,),
        start_new_session=True,
    )
    process.returncode = 0  # reaped by its number, like a forked one, so Popen must not wait for it
    return process.pid


class _Stops:
    """Counts stop requests in place of the earlier handlers; inactive outside the main thread."""

    def __init__(self, preemptible: bool) -> None:
        self.asked = 0  # the signal to forward
        self.insisted = False
        self.repeated = False  # by a scheduler
        self._numbers = (signal.SIGINT, *PREEMPTING) if preemptible else (signal.SIGINT, signal.SIGTERM)
        self._preemptible = preemptible
        self._first = Repeated()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def preempted(self) -> bool:
        """True after a scheduler's signal."""
        return self.asked in PREEMPTING

    def __enter__(self) -> _Stops:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _count(self, number: int, _: FrameType | None) -> None:
        self.insisted = self.insisted or (self.asked > 0 and number == signal.SIGINT)
        if self._preemptible and number in PREEMPTING:
            self.repeated = self._first.repeated() or self.repeated
        self.asked = self.asked or (number if self._preemptible else signal.SIGINT)


def _listen(port: int) -> socket.socket:
    """Open a socket at ``port`` of the loopback only.

    For port 0 the system picks a free one, and the open socket reserves it.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"the port is {port}: it must be from 1 to 65535, or 0 for any free one")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(1024)
    except OSError as unable:
        listener.close()
        raise UserError(
            f"port {port} cannot be used on this machine ({unable.strerror}): stop the process that holds it, "
            "name another port, or name 0 for any free one"
        ) from unable
    return listener


def _host_store(listener: socket.socket) -> Any:
    """Serve the ranks' store on ``listener``, for as long as the returned object is referenced."""
    dist = importlib.import_module("torch.distributed")  # torch has no types for its stores
    port = listener.getsockname()[1]
    return dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _wait(world: _World, stops: _Stops, monitor: Monitor | None) -> None:
    """Wait until every rank has ended, or the running ones must be ended."""
    stop_by = fail_by = float("inf")
    forwarded = 0
    still = StallMonitor(STILL_S).look if monitor is None else lambda _: monitor.check()
    while running := world.running():
        now = time.monotonic()
        for line in still((rank.rank, rank.pid) for rank in running):
            print(f"shardwise: {line}", file=sys.stderr, flush=True)
        ended = [r.exit_code for r in world.ranks if r.exit_code]
        if forwarded < (stops.asked > 0) + stops.repeated:
            forwarded += 1
            for rank in running:  # not its group: its data workers must continue until it has saved
                os.kill(rank.pid, stops.asked)
        if stops.asked or any(code in _INTERRUPTED for code in ended):
            stop_by = min(stop_by, now + (PREEMPTED_S if stops.preempted and not stops.repeated else STOP_S))
        early = [rank.ended_early(stops.asked) for rank in world.ranks]
        if any(code not in _INTERRUPTED for code in ended) or any(early):
            fail_by = min(fail_by, now + REPORT_S)
        if stops.insisted or now > min(stop_by, fail_by) or (monitor is not None and monitor.ends):
            return
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class _Fault:
    """Reason why one rank did not end with 0.

    ``kind`` is as in `RankReport`, or ``signal`` or ``exit``.
    """

    rank: _Rank
    kind: str
    message: tuple[str, ...]
    symptom: bool
    at_ns: int

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the smallest is the cause, in whatever order the ranks were seen to end.

        A killed rank closes its connections before it is seen to have ended. An abort is dated like an error: a victim
        may end so.
        """
        if self.symptom:
            return 3, self.at_ns
        if self.kind in _STOPS:
            return 2, self.at_ns
        return int(self.kind != "signal" or self.rank.exit_code == -signal.SIGABRT), self.at_ns


def _faults(world: _World, killed: Sequence[int], stopped_by: int) -> Iterator[_Fault]:
    stopped = -stopped_by if stopped_by in PREEMPTING else -signal.SIGTERM
    for r in world.ranks:
        if r.report is not None:
            message = r.report
            yield _Fault(r, message.kind, tuple(message.message), message.peer_symptom, message.at_ns)
        elif not r.exit_code or (r.rank in killed and (r.shot or r.exit_code != -signal.SIGKILL)):
            continue  # but a rank that was killed from outside may take a while to end
        elif r.exit_code in _INTERRUPTED or (stopped_by and r.exit_code == stopped):
            yield _Fault(r, Interrupted.__name__, ("interrupted",), False, r.ended_ns)
        elif r.exit_code < 0:
            yield _Fault(r, "signal", (str(r.exit_code),), False, r.ended_ns)
        else:
            yield _Fault(r, "exit", (str(r.exit_code),), is_peer_symptom("\n".join(_tail(r))), r.ended_ns)


def _verdict(world: _World, killed: Sequence[int], stops: _Stops) -> ShardwiseError:
    """Build the exception that describes the failure."""
    _keep_tracebacks(world)
    faults = sorted(_faults(world, killed, stops.asked), key=lambda fault: fault.order)
    blamed = faults[0] if faults else None
    interrupted = stops.asked > 0 if blamed is None or blamed.symptom else blamed.kind in _STOPS
    kind = Preempted if stops.preempted else Interrupted
    if interrupted and any(rank.ended_early(stops.asked) for rank in world.ranks):
        return kind(BEFORE_WORK)
    if interrupted and killed:
        how = "killed before they could stop" if stops.insisted else f"killed, as they did not stop in {STOP_S:g} s"
        return kind(f"interrupted; {_who(killed, world)} had to be {how}: what came after the last save is lost")
    if interrupted and stops.repeated and not any(rank.report for rank in world.ranks):
        return kind("preempted, and again before the save was done: what came after the last save is lost")
    if blamed is None or (interrupted and blamed.symptom):
        return kind("interrupted")
    same = [f.rank.rank for f in faults if (f.kind, f.message) == (blamed.kind, blamed.message)]
    who = _who(same, world)
    if apart := _apart(world, blamed):
        return RankError(apart)
    if blamed.kind in ("signal", "exit"):
        for_memory = blamed.message == (str(-signal.SIGKILL),) and OomKills.now().killed_since(world.oom_kills)
        return (KilledForMemory if for_memory else RankError)(_death(blamed, who, world.oom_kills))
    if left := _left_early(world, blamed):
        return RankError(
            f"{_who(left, world)} ended with exit code 0 in the middle of the run: its code called sys.exit or "
            f"os._exit, or took fewer steps\n{who}, which lost it, raised {_headline(blamed.message[-1])}"
        )
    known = getattr(errors, blamed.kind, None)
    if isinstance(known, type) and issubclass(known, ShardwiseError):
        return _raised_again(known, blamed, who if len(world.ranks) > 1 else "")
    lines = blamed.rank.report.traceback.splitlines() if blamed.rank.report else []
    return RankError(
        "\n".join(
            [
                f"{who} raised {_headline(blamed.message[-1])}",
                *_indented(lines[-_TAIL_LINES:]),
                f"the whole of it is in {blamed.rank.log}",
            ]
        )
    )


def _left_early(world: _World, blamed: _Fault) -> list[int]:
    """Ranks that had ended with success when the first failure came, which is of a peer that was lost."""
    return [
        r.rank for r in world.ranks if blamed.symptom and r.exit_code == 0 and 0 < r.ended_ns < blamed.at_ns + _SEEN_NS
    ]


def _raised_again(known: type[ShardwiseError], fault: _Fault, who: str) -> ShardwiseError:
    message = list(fault.message) or [""]
    if who and not issubclass(known, Interrupted):
        first, newline, rest = message[-1].partition("\n")  # what follows may be a command to copy
        message[-1] = f"{first} (on {who}){newline}{rest}"
    error = known(*message)
    if fault.rank.report is not None:
        error.exit_code = fault.rank.report.exit_code
    return error


def _death(fault: _Fault, who: str, before: OomKills) -> str:
    """Describe a rank that ended without a report: its exit, and the end of its log."""
    rank, code = fault.rank, int(fault.message[0])
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        killed = OomKills.now().why(before) if code == -signal.SIGKILL else ""
        reason = _REASONS.get(-code, "").format(killed=killed, memory=_memory(rank))
        how = f"was killed by {name}" + (f" ({reason})" if reason else "")
    else:
        how = f"ended with exit code {code} and did not say why"
    stood = stood_at(rank.crash)
    at = f"; it stood at {stood}" if stood else ""
    if rank.rank == 0:
        return f"{who} {how}{at}; its output is above"
    return "\n".join([f"{who} {how}{at}", *_indented(_tail(rank)), f"its output is in {rank.log}"])


def _apart(world: _World, blamed: _Fault) -> str:
    """Where ranks stood that met in different collectives, of which gloo ends one by SIGABRT; empty if they did not."""
    log = "\n".join(_tail(blamed.rank, _CRASH_LINES)) if blamed.rank.rank else ""
    if blamed.message != (str(-signal.SIGABRT),) or not met_another_collective(blamed.rank.crash, log):
        return ""
    known = "ranks met" if log else "SIGABRT in a collective: it is likely that ranks met"
    lines = [f"{known} in different collectives, or in one with different shapes, which gloo ends by SIGABRT:"]
    for rank in world.ranks:
        stood = stood_at(rank.crash) or raised_at("" if rank.report is None else rank.report.traceback)
        lines.append(f"    rank {rank.rank}: {stood or 'at an unknown line'}")
    return "\n".join(lines)


def _memory(rank: _Rank) -> str:
    import psutil

    total = bytes_text(psutil.virtual_memory().total)
    return f"{bytes_text(rank.peak_bytes)} of this machine's {total}"


def _headline(message: str) -> str:
    """Line of an exception's text that names it: syntax errors quote code first, some add notes."""
    return next((line for line in message.splitlines() if line[:1].strip()), message)


def _keep_tracebacks(world: _World) -> None:
    """Append each rank's report to its log, as the ranks print no tracebacks."""
    for rank in world.ranks:
        if rank.report is not None:
            with contextlib.suppress(OSError), open(rank.log, "a", encoding="utf-8") as log:
                log.write(rank.report.traceback)


def _tail(rank: _Rank, lines: int = _TAIL_LINES) -> list[str]:
    try:
        return rank.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _who(ranks: Sequence[int], world: _World) -> str:
    """Format ``rank 2``, ``ranks 0, 2`` or ``all ranks``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "all ranks" if len(ranks) == len(world.ranks) else f"ranks {', '.join(str(r) for r in sorted(ranks))}"
