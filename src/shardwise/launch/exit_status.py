"""A rank's process as the system sees it: killed by the kernel for want of memory, stopped, or waiting for a disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_CGROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_STATES = {
    "T": "is stopped (SIGSTOP); kill -CONT {pid} lets it go on",
    "t": "is held by a debugger",
    "D": "waits for a disk, a network file system or a driver (state D)",
}


@dataclass(frozen=True)
class OomKills:
    """How many processes the kernel has killed for want of memory; ``None`` where it does not say.

    ``group`` counts those of this process's control group, which ranks share; ``machine`` all that it runs.
    """

    group: int | None
    machine: int | None

    @classmethod
    def now(cls) -> OomKills:
        """As of now."""
        found = [_counter(file) for file in _group_files()]
        return cls(next((n for n in found if n is not None), None), _counter(_PROC / "vmstat"))

    def why(self, before: OomKills) -> str:
        """Why a rank was killed by SIGKILL, these being the counters after it and ``before`` those of the start."""
        if self.group is not None and before.group is not None:
            if self.group > before.group:
                return "out of memory: the kernel killed it, as this machine or container had none left"
        elif self.machine is not None and before.machine is not None:
            if self.machine > before.machine:
                return "out of memory: the kernel killed a process of this machine meanwhile"
        else:
            return "out of memory? The kernel does not say"
        return "not by the kernel for want of memory: somebody, or the scheduler, killed it"

    def killed_since(self, before: OomKills) -> bool:
        """Return whether the kernel has killed for want of memory between ``before`` and these counters."""
        pairs = ((self.group, before.group), (self.machine, before.machine))
        known = next(((now, then) for now, then in pairs if now is not None and then is not None), (0, 0))
        return known[0] > known[1]


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that this process may have, and who says so."""

    num_bytes: int
    name: str


def memory_limit() -> MemoryLimit | None:
    """The smaller of this process's limit on addresses and its control group's on memory; ``None`` without either."""
    found = []
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        found += [MemoryLimit(soft, "RLIMIT_AS (ulimit -v)")] if soft != resource.RLIM_INFINITY else []
    for events in _group_files()[:1]:
        with contextlib.suppress(OSError, ValueError):
            found.append(MemoryLimit(int(events.with_name("memory.max").read_text()), "the control group"))
    return min(found, key=lambda limit: limit.num_bytes, default=None)


def _group_files() -> list[Path]:
    """Where this process's control group counts: version 2, then version 1, as seen from here or from a container."""
    files = []
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(_CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files += [_CGROUPS / "memory" / place / "memory.oom_control" for place in (path.lstrip("/"), "")]
    return files


def _counter(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        words = [line.split() for line in file.read_text().splitlines()]
        return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
    return None


@dataclass
class StallMonitor:
    """Looks at the states of ranks once a second, and says once of each that it has been held for ``after_s``."""

    after_s: float
    _next: float = 0.0
    _since: dict[int, tuple[tuple[str, int], float]] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def look(self, pids: Iterable[tuple[int, int]]) -> list[str]:
        """Lines about ranks, given with their processes, that are held for so long and were not told of yet."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + min(1.0, self.after_s / 4)
        lines = []
        for rank, pid in pids:
            state = process_state(pid)
            known, since = self._since.get(rank, (("", 0), now))
            if state != known:
                self._since[rank] = (state, now)
                self._told.discard(rank)
            elif state[0] in _STATES and now - since >= self.after_s and rank not in self._told:
                self._told.add(rank)
                what = _STATES[state[0]].format(pid=pid)
                lines.append(
                    f"rank {rank} (process {pid}) has not moved for {now - since:.0f} s, and the others wait for it: "
                    f"it {what}"
                )
        return lines


def process_state(pid: int) -> tuple[str, int]:
    """The letter of ``/proc/PID/stat`` and the processor time so far, in ticks; empty and 0 where there is none.

    A process that writes much is seen waiting each time one looks; the time tells it from one that waits for ever.
    """
    try:
        words = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[0], int(words[11]) + int(words[12])
