"""System state of a rank's process: killed by the OOM killer, stopped, or in disk wait."""

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
    """Counters of processes that the kernel's OOM killer has killed; ``None`` if not available.

    ``group`` counts those of this process's control group, which ranks share; ``machine`` all of the machine.
    """

    group: int | None
    machine: int | None

    @classmethod
    def now(cls) -> OomKills:
        """Read the current counters."""
        found = [_counter(file) for file in _group_files()]
        return cls(next((n for n in found if n is not None), None), _counter(_PROC / "vmstat"))

    def why(self, before: OomKills) -> str:
        """Explain a rank's SIGKILL from the counters after it and ``before`` it, at the start."""
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
    """Files with the counters of this process's control group: version 2, then version 1.

    Of version 1, the path outside and inside a container.
    """
    files = []
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(_CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files += [_CGROUPS / "memory" / folder / "memory.oom_control" for folder in (path.lstrip("/"), "")]
    return files


def _counter(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        words = [line.split() for line in file.read_text().splitlines()]
        return next((int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill"), None)
    return None


@dataclass
class StallMonitor:
    """Monitor of rank states, once a second; reports each rank stalled for ``after_s`` once."""

    after_s: float
    _next: float = 0.0
    _since: dict[int, tuple[tuple[str, int], float]] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)

    def look(self, pids: Iterable[tuple[int, int]]) -> list[str]:
        """Return lines about newly stalled ranks among ``pids`` (rank, process)."""
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
                self._reported.discard(rank)
            elif state[0] in _STATES and now - since >= self.after_s and rank not in self._reported:
                self._reported.add(rank)
                what = _STATES[state[0]].format(pid=pid)
                lines.append(
                    f"rank {rank} (process {pid}) has not moved for {now - since:.0f} s, and the others wait for it: "
                    f"it {what}"
                )
        return lines


def process_state(pid: int) -> tuple[str, int]:
    """State letter of ``/proc/PID/stat`` and processor time in ticks; ("", 0) if there is none.

    A process that writes much may appear waiting at every check; the time distinguishes it from a stalled one.
    """
    try:
        words = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[0], int(words[11]) + int(words[12])
