"""Limits of this process's control group: cores, memory, processes (mostly of a container)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60
"""Cgroup v1 reports a number near 2^63 for unlimited memory."""


class Allowed(BaseModel):
    """Tightest limits of this process's group and its ancestors; ``None``: unset or not visible."""

    model_config = ConfigDict(frozen=True)

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: int | None = None


def allowed(root: Path = ROOT, own: Path = OWN) -> Allowed:
    """Read the limits of both versions of control groups.

    Linux: Documentation/admin-guide/cgroup-v2 and cgroup-v1. ``memory_used_bytes`` is of the group that sets the limit,
    and includes reclaimable file pages.
    """
    cores = [c for c in (_quota(folder) for folder in _folders(root, own, "cpu")) if c is not None]
    memory = [
        (limit, folder)
        for folder in _folders(root, own, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _number(folder / name)) is not None and limit < NO_LIMIT
    ]
    pids = [n for folder in _folders(root, own, "pids") if (n := _number(folder / "pids.max")) is not None]
    tightest = min(memory, default=None)
    used = None
    if tightest is not None:
        folder = tightest[1]
        used = _number(folder / "memory.current")
        used = _number(folder / "memory.usage_in_bytes") if used is None else used
    return Allowed(
        cores=min(cores, default=None),
        memory_bytes=None if tightest is None else tightest[0],
        memory_used_bytes=used,
        processes=min(pids, default=None),
    )


def _folders(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the existing folders of this process's groups for a controller, own first."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    seen = set()
    for line in lines:
        _, names, path = line.split(":", 2)
        if not names:
            tops = [root, root / "unified"]
        elif controller in names.split(","):
            tops = [root / names, root / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for top in tops:
            for folder in (top / inner, *(top / parent for parent in inner.parents)):
                if folder not in seen and folder.is_dir():
                    seen.add(folder)
                    yield folder


def _quota(folder: Path) -> float | None:
    """Return the cores that a group may use: quota over period."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    limit, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return limit / period_us if limit is not None and limit > 0 and period_us else None


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
