"""Entry point of a rank: `guarded` watches the parent, runs the work and reports a failure."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import hashlib
import io
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn

from shardwise import environment, errors
from shardwise.errors import Interrupted, ShardwiseError, UserError

LAST_BARRIER_S = 10.0
"""Time that a finished rank waits for its peers; data for them is in flight already."""

BEFORE_WORK = "interrupted before the work was done"
"""Message of a rank that was interrupted while nothing in it could stop in an orderly way."""

_PARENT_GONE = 3
_PARENT_POLL_S = 0.5
_PEER_SYMPTOMS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "connectfullmesh",
    "socket timeout",
    "remote process exited",  # NCCL
    "nccl communicator was aborted",
)


def is_peer_symptom(text: str) -> bool:
    """Return whether the text only reports that a peer disconnected, and not the cause."""
    lowered = text.lower()
    return any(symptom in lowered for symptom in _PEER_SYMPTOMS)


def lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank's process ended."""
    return any(is_peer_symptom(str(e)) for e in _chain(error) if isinstance(e, RuntimeError))


@dataclass(frozen=True)
class RankReport:
    """Failure report of a rank; the parent reads it from the rank's error file.

    ``kind`` is the name of a class of `shardwise.errors`, or that of any other exception. ``message`` has one entry for
    each problem. ``at_ns`` is the monotonic clock, which is the same for every process of the machine.
    """

    rank: int
    kind: str
    exit_code: int
    message: list[str]
    traceback: str
    peer_symptom: bool
    at_ns: int

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RankReport:
        """Build the report of ``error`` while it is being handled."""
        at_ns = time.monotonic_ns()
        if isinstance(error, ShardwiseError):
            kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
            message = list(error.problems) if isinstance(error, UserError) else [str(error)]
        else:
            kind = type(error).__name__
            message = ["".join(traceback.format_exception_only(error)).rstrip()]
        return cls(
            rank=rank,
            kind=kind,
            exit_code=error.exit_code if isinstance(error, ShardwiseError) else ShardwiseError.exit_code,
            message=message,
            traceback="".join(traceback.format_exception(error)),
            peer_symptom=any(is_peer_symptom(f"{e}") for e in _chain(error)),
            at_ns=at_ns,
        )

    def write(self, path: Path) -> None:
        """Write the report atomically; to `spare` if ``path`` cannot be written (a full disk)."""
        text = json.dumps(asdict(self), indent=1)
        try:
            _write_whole(path, text)
        except OSError:
            _write_whole(spare(path), text)

    @classmethod
    def read(cls, path: Path) -> RankReport | None:
        """Read the report at ``path`` or at its `spare`; ``None`` if neither can be read."""
        for file in (path, spare(path)):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads(file.read_text(encoding="utf-8"))
                return cls(**{field.name: found[field.name] for field in fields(cls)})
        return None


def spare(path: Path) -> Path:
    """Alternative path of a report if its folder is full: a unique name in the temporary folder."""
    name = hashlib.blake2b(str(path).encode(), digest_size=12).hexdigest()
    return Path(tempfile.gettempdir()) / f"shardwise-{name}.error.json"


def crash_file(error_file: Path) -> Path:
    """Path of the stacks of a rank that died of a fault in native code, beside its report."""
    return error_file.with_name(error_file.name.replace(".error.json", ".crash.txt"))


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def guarded(main: Callable[[], int], logs: Path | None = None) -> NoReturn:
    """Run ``main`` as a rank, and exit with its return value. Call it first; import torch in it.

    If ``main`` raises, the rank exits with the exception's exit code, after it has reported the exception: in the error
    file that the parent named, without printing, as the parent reports for all ranks; else on stderr, in the file from
    which torchrun makes its summary, and with the traceback in ``logs``. It exits without the interpreter's
    finalization, which races with the threads of the process group.
    """
    error_file = environment.take_error_file()
    _watch_parent(environment.take_parent_fd())
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or is not a file
        faulthandler.enable() if error_file is None else faulthandler.enable(open(crash_file(error_file), "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed leaves a complete log
    try:
        code = _run(main, error_file, logs)
        if code == 0:
            _leave_together()
    except BaseException:  # such as a second interrupt
        code = ShardwiseError.exit_code
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    os._exit(code)


def _run(main: Callable[[], int], error_file: Path | None, logs: Path | None) -> int:
    try:
        return main()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        error: BaseException = UserError(str(stop.code))
        error.__cause__ = stop
    except KeyboardInterrupt as stop:
        error = Interrupted(BEFORE_WORK)
        error.__cause__ = stop
    except BaseException as raised:
        error = raised
    return _report(error, error_file, logs)


def _report(error: BaseException, error_file: Path | None, logs: Path | None) -> int:
    """Report the failure to the parent or the user, and return the exit code."""
    here = None
    with contextlib.suppress(UserError):  # the failure itself
        here = environment.rendezvous()
    report = RankReport.of(error, here.rank if here else 0)
    if error_file is not None:
        try:
            report.write(error_file)
            return report.exit_code
        except OSError as unable:
            print(f"this rank's failure could not be written to {error_file}: {unable}", file=sys.stderr)
    text = str(error) if isinstance(error, ShardwiseError) else report.traceback.rstrip()
    if here is None:
        print(text, file=sys.stderr)
        return report.exit_code
    _tell_agent(report, text)
    if logs is not None:
        _keep(report, logs)
    shared = isinstance(error, ShardwiseError) and error.on_all_ranks
    if here.rank == 0 or not (shared or (report.peer_symptom and here.local_rank)):  # of a symptom, one on each node
        where = f"rank {here.rank} on {environment.node_name()}: "
        print(text if shared or text.startswith("rank ") else where + text, file=sys.stderr)
    return report.exit_code


def _tell_agent(report: RankReport, text: str) -> None:
    """Write the file from which torchrun's summary has the message; it calls the earliest failure the root cause."""
    file = environment.agent_error_file()
    if file is None:
        return
    seconds = int(time.time()) + report.peer_symptom  # whole ones: what a failure caused must not share its second
    facts = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(seconds)}}
    with contextlib.suppress(OSError):
        _write_whole(file, json.dumps({"message": facts}))


def _keep(report: RankReport, logs: Path) -> None:
    """Append the traceback to the rank's log."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        with open(logs / f"rank-{report.rank}.log", "a", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"{when} on {environment.node_name()}\n{report.traceback}")


def _leave_together() -> None:
    """Wait a while for all ranks: to its peers, a rank that has exited looks like a dead one.

    A failure here is ignored: this rank's work is done, and a peer that failed reports itself.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        dist.barrier(async_op=True).wait(datetime.timedelta(seconds=LAST_BARRIER_S))
        dist.destroy_process_group()


def _watch_parent(fd: int | None) -> None:
    """End this rank when the parent ends for any reason: its pipe, never written to, closes.

    torchrun has no such pipe, and its workers outlive an agent that is killed: they would train on as a node that the
    others believe lost. Their parent's number changes.
    """
    if fd is None and environment.launcher() != "torchrun":
        return
    parent = os.getppid()

    def watch() -> None:
        try:
            while fd is None and os.getppid() == parent:
                time.sleep(_PARENT_POLL_S)
            if fd is not None:
                os.read(fd, 1)
        except OSError:
            return
        os._exit(_PARENT_GONE)

    if fd is not None:
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
    threading.Thread(target=watch, name="shardwise-parent-watch", daemon=True).start()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception, its causes and its contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
