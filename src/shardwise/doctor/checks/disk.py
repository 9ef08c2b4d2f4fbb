"""Disk of a folder: free space, kind, and durable write and read speed of a small file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shardwise.errors import UserError

SIZE, CHUNK, SECONDS = 64 * 1024**2, 4 * 1024**2, 3.0
"""Maximum bytes of the test file, in chunks of ``CHUNK``; writing and reading stop after ``SECONDS`` each."""


class DiskFacts(BaseModel):
    """Disk facts in bytes and bytes/s.

    ``folder`` is the requested one, ``place`` its nearest existing ancestor. ``write_bytes_per_s`` includes fsync.
    Reading drops the page cache first; where that is not possible (network file systems) the number may be that of
    memory. ``problem`` is why it could not be written.
    """

    model_config = ConfigDict(frozen=True)

    folder: str
    place: str
    kind: str | None = None
    total_bytes: int
    free_bytes: int
    free_files: int | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    tried_bytes: int = 0
    problem: str | None = None


def inspect_disk(folder: Path, size: int = SIZE) -> DiskFacts:
    """Inspect the file system of ``folder``; creates no folder, and removes its test file.

    Raises:
        UserError: ``folder``, or an ancestor of it, is not a folder.
    """
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"--folder '{folder}': '{place}' is a file; name the folder where checkpoints will go")
    room = os.statvfs(place)
    facts = DiskFacts(
        folder=str(folder),
        place=str(place),
        kind=_kind(place),
        total_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
    )
    size = min(size, facts.free_bytes // 4 // CHUNK * CHUNK)
    if size <= 0:
        return facts.model_copy(update={"problem": "no room for a file to try it with"})
    try:
        written, write_s, read, read_s = _try_out(place, size)
    except OSError as error:
        return facts.model_copy(update={"problem": error.strerror or str(error)})
    speeds = {"write_bytes_per_s": written / write_s, "read_bytes_per_s": read / read_s if read else None}
    return facts.model_copy(update={**speeds, "tried_bytes": written})


def _try_out(place: Path, size: int) -> tuple[int, float, int, float]:
    """Return bytes and seconds of a write test, then of a read test."""
    data = os.urandom(CHUNK)  # incompressible data
    with tempfile.TemporaryFile(dir=place, prefix=".shardwise-doctor-", buffering=0) as file:
        written, began = 0, time.perf_counter()
        while written < size and time.perf_counter() - began < SECONDS:
            written += file.write(data)
        os.fsync(file.fileno())
        write_s = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        read, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS and (piece := file.read(CHUNK)):
            read += len(piece)
        return written, write_s, read, max(time.perf_counter() - began, 1e-9)


def _kind(place: Path) -> str | None:
    """Return the file system's type (``ext4``, ``nfs4``, ``tmpfs``).

    It is that of the longest matching mount point.
    """
    import psutil

    with contextlib.suppress(OSError):
        mounts = [
            (len(part.mountpoint), part.fstype)
            for part in psutil.disk_partitions(all=True)
            if place.resolve().is_relative_to(part.mountpoint)
        ]
        return max(mounts)[1] if mounts else None
    return None
