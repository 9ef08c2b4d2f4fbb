"""Swap folder of DeepSpeed: validity, free space, speed and lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from shardwise.errors import MachineError, UserError
from shardwise.units import bytes_text

FOLDER = "zero_stage_3"  # DeepSpeed's own folder inside the given one
_LOCK = ".shardwise-swap.lock"
_PROBE_BYTES = 1 << 26
SLOW_BYTES_S = 1e9  # a drive on PCIe 3 x4 writes 2 GB/s and more; a SATA one 0.5 GB/s


def path_problems(nvme_path: str | None) -> list[str]:
    """List why a folder cannot be used for swapping: missing, not a folder, not writable."""
    if not nvme_path:
        return ["+nvme swaps to a drive: set parallel.nvme_path to a folder on it"]
    folder, where = Path(nvme_path), f"parallel.nvme_path '{nvme_path}'"
    if not folder.exists():
        return [f"{where} does not exist; make the folder, or name another one"]
    if not folder.is_dir():
        return [f"{where} is not a folder; name one"]
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [f"{where} cannot be written to: {error.strerror or error}; name a folder that you may write to"]
    return []


def check_room(nvme_path: str, needed: int) -> None:
    """Check that the drive has room for the ``needed`` bytes that this machine's ranks swap.

    Raises:
        UserError: it has not enough.
    """
    left = Path(nvme_path) / FOLDER  # left by a killed run; DeepSpeed overwrites it
    taken = sum(path.stat().st_size for path in left.rglob("*") if path.is_file()) if left.is_dir() else 0
    free = shutil.disk_usage(nvme_path).free + taken
    if needed > free:
        raise UserError(
            f"parallel.nvme_path '{nvme_path}': {bytes_text(needed)} are swapped there, and {bytes_text(free)} are "
            "free; make room, or name a folder on another drive"
        )


def drive_speed(nvme_path: str) -> tuple[float, float] | None:
    """Measure a drive's write and read bytes/s with a file of 64 MiB, past the page cache.

    Short: a drive's own cache may inflate it. ``None`` if it cannot be measured.
    """
    import mmap

    try:
        handle, name = tempfile.mkstemp(dir=nvme_path)
    except OSError:
        return None
    try:
        os.close(handle)
        direct = getattr(os, "O_DIRECT", 0)
        buffer = mmap.mmap(-1, 1 << 22)
        buffer.write(os.urandom(1 << 22))
        took = []
        for flags in (os.O_WRONLY, os.O_RDONLY):
            try:
                handle = os.open(name, flags | direct)
            except OSError:  # an in-memory file system has no direct I/O
                handle = os.open(name, flags)
            begun = time.perf_counter()
            try:
                for offset in range(0, _PROBE_BYTES, len(buffer)):
                    if flags == os.O_WRONLY:
                        os.pwrite(handle, buffer, offset)
                    else:
                        os.preadv(handle, [buffer], offset)
                if flags == os.O_WRONLY:
                    os.fsync(handle)
            finally:
                os.close(handle)
            took.append(time.perf_counter() - begun)
        return _PROBE_BYTES / took[0], _PROBE_BYTES / took[1]
    except OSError:
        return None
    finally:
        os.unlink(name)


def slow_text(nvme_path: str, written: int, read: int, speed: tuple[float, float] | None) -> str:
    """Return the warning for a slow drive: its speed and the wait per step.

    Empty for a fast one.

    ``written`` and ``read`` are the bytes that this machine's ranks move in a step.
    """
    if speed is None or min(speed) >= SLOW_BYTES_S:
        return ""
    seconds = written / speed[0] + read / speed[1]
    rates = f"it writes {speed[0] / 1e9:.2f} GB/s and reads {speed[1] / 1e9:.2f} GB/s"
    return (
        f"parallel.nvme_path '{nvme_path}' is slow: {rates}, so a step moves {bytes_text(written + read)} in about "
        f"{seconds:.1f} s; an NVMe drive does 2 GB/s and more"
    )


class SwapFolder:
    """Swap folder, locked for this run: two runs would overwrite each other's weights.

    One process of a machine has the lock (``holds``); it is released with the process, however that ends.

    Raises:
        UserError: another run has the lock.
        MachineError: the folder cannot be used any more.
    """

    def __init__(self, nvme_path: str, *, holds: bool) -> None:
        self.path = Path(nvme_path)
        self._lock: IO[str] | None = None
        if not holds:
            return
        try:
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise MachineError(f"parallel.nvme_path '{nvme_path}' cannot be used: {error.strerror or error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"parallel.nvme_path '{nvme_path}': another run swaps there now; wait for it, or name another folder"
            ) from None
        self._lock = lock

    def close(self) -> None:
        """Remove the swapped files and release the lock."""
        if self._lock is None:
            return
        shutil.rmtree(self.path / FOLDER, ignore_errors=True)
        self._lock.close()
        self._lock = None
