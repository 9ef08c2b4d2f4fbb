"""`Heartbeat`: what a rank is doing, in a file in memory that a monitor reads without disturbing it."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "start",
    "data",
    "transfer",
    "control",
    "forward",
    "backward",
    "clip",
    "optimizer",
    "other",
    "checkpoint",
    "evaluation",
    "end",
    "failed",
)
"""Phases of `Session.phase`; ``start`` comes before the first, ``end`` or ``failed`` after the last."""
DONE = ("end", "failed")

_MAGIC = b"SWB1"
_HEAD = struct.Struct("<4sIqqqQ")  # magic, process, step, phase, since when (monotonic clock, ns), time of a step (ns)
_LONGEST = struct.Struct(f"<{len(PHASES)}Q")  # ns that each phase has taken at most
_NUMBERS = {name: number for number, name in enumerate(PHASES)}
_OTHER = _NUMBERS["other"]
_RECENT = 9


@dataclass(frozen=True)
class Beat:
    """Last sign of life of a rank.

    ``since_ns`` is the monotonic clock when ``phase`` began, ``step_ns`` the median of the last steps (0: none yet),
    ``longest_ns`` the longest time of each phase that has ended, except for those of the first step.
    """

    rank: int
    pid: int
    step: int
    phase: str
    since_ns: int
    step_ns: int
    longest_ns: dict[str, int]


class Heartbeat:
    """Writer of a rank's heartbeat: `phase` is called when the phase changes, and costs about two microseconds.

    A heartbeat that cannot be written (a full disk) is removed, and the watchdog with it: training goes on.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._phase, self._since, self._step = 0, time.monotonic_ns(), 0
        self._begun = 0
        self._steps: deque[int] = deque(maxlen=_RECENT)
        self._median = 0
        self._longest = [0] * len(PHASES)
        self._path = folder / f"rank-{rank}.beat"
        partial = folder / f"rank-{rank}.beat.partial"
        self._file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._write()
        with contextlib.suppress(OSError):
            partial.replace(self._path)  # a reader never sees one that is not written yet

    def phase(self, name: str) -> None:
        """Record that the phase ``name`` begins; ``data`` begins a step, and an unknown name is ``other``."""
        now, number = time.monotonic_ns(), _NUMBERS.get(name, _OTHER)
        if number == self._phase:
            return
        if self._step > 1 and now - self._since > self._longest[self._phase]:
            self._longest[self._phase] = now - self._since
        if name == "data":
            self._count(now)
        self._phase, self._since = number, now
        self._write()

    def close(self, phase: str = "end") -> None:
        """Record the end; the file stays."""
        self.phase(phase)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _count(self, now: int) -> None:
        if self._step > 1:
            self._steps.append(now - self._begun)
            self._median = sorted(self._steps)[len(self._steps) // 2]
        self._begun = now
        self._step += 1

    def _write(self) -> None:
        if self._file < 0:
            return
        head = _HEAD.pack(_MAGIC, os.getpid(), self._step, self._phase, self._since, self._median)
        try:
            os.pwrite(self._file, head + _LONGEST.pack(*self._longest), 0)
        except OSError:  # what stays would look like a rank that does not move
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def ranks_here(folder: Path) -> list[int]:
    """Ranks that have a heartbeat in ``folder``."""
    names = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.beat"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_beat(folder: Path, rank: int) -> Beat | None:
    """Read the heartbeat of ``rank``; ``None`` before its first."""
    try:
        data = (folder / f"rank-{rank}.beat").read_bytes()
        magic, pid, step, phase, since, step_ns = _HEAD.unpack_from(data)
        longest = _LONGEST.unpack_from(data, _HEAD.size)
    except (OSError, struct.error):
        return None
    if magic != _MAGIC or not 0 <= phase < len(PHASES):
        return None
    return Beat(rank, pid, step, PHASES[phase], since, step_ns, dict(zip(PHASES, longest, strict=True)))
