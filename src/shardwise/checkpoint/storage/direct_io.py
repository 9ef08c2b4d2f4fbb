"""Direct I/O: writes that bypass the page cache, from memory to a local disk.

A checkpoint is written once and read much later, if ever: in the page cache it takes memory that others could use, and
filling that costs more time than the disk does. Direct writes need complete blocks of the file and memory aligned for
the device; unaligned memory goes through a small buffer, and short runs through the page cache.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

BLOCK = 4096  # bytes; alignment of files and memory, where disks require no more
LEAST = 1 << 18  # shorter writes go through the page cache
BUFFER = 1 << 22  # bytes copied and written at once
HUGE = 1 << 21  # buffers are aligned to large pages, so that a device gets few memory segments
AT_ONCE = 1 << 24  # bytes per call
LATER = 1 << 24  # bytes of short runs that are deferred until the end: a file takes one writer at once
_REFUSED = (errno.EINVAL, errno.ENOTSUP)


def is_on_disk(place: Path | int) -> bool:
    """Return whether a file is directly on a block device.

    Not in memory, on a network, or on another layer. ``place`` is an existing path, or an open file.
    """
    device = os.stat(place).st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def memory_block(handle: int) -> int:
    """Return the memory alignment that the device under a file needs, as reported by Linux."""
    device = os.stat(handle).st_dev
    here = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for place in (here, f"{here}/.."):  # a disk, or a partition
        with suppress(OSError, ValueError):
            return int(Path(f"{place}/queue/dma_alignment").read_text()) + 1
    return BLOCK


def write_all(handle: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + AT_ONCE], offset + done)


class DirectWriter:
    """Second handle on an open file, for writes of complete blocks; thread-safe.

    ``handle`` is the first one, and takes the rest, most of it when `close` is called. Where the system does not
    support direct I/O, it takes everything.

    Raises:
        OSError: from `write_at`, the disk is full or broken.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self._plain = handle
        self._handle = -1
        self._works = False
        self._spare: list[Any] = []
        self._later: list[tuple[int, bytes]] = []
        self._room = LATER
        self._lock = threading.Lock()
        self._block = max(BLOCK, os.fstat(handle).st_blksize)
        self._memory = min(self._block, memory_block(handle))
        flag = getattr(os, "O_DIRECT", None)
        if flag is not None and self._block & (self._block - 1) == 0 and self._block <= LEAST and is_on_disk(handle):
            with suppress(OSError):
                self._handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
                self._works = True

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` at ``offset``."""
        begin = -(-offset // self._block) * self._block
        end = (offset + len(data)) // self._block * self._block
        if not self._works:
            write_all(self._plain, data, offset)
        elif end - begin < LEAST:
            self._put_off(offset, data)
        else:
            self._write_blocks(begin, data[begin - offset : end - offset])
            self._put_off(offset, data[: begin - offset])
            self._put_off(end, data[end - offset :])

    def close(self) -> None:
        """Write the deferred runs, and close the second handle."""
        try:
            for offset, data in sorted(self._later):
                write_all(self._plain, memoryview(data), offset)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the second handle."""
        self._spare.clear()
        self._later.clear()
        handle, self._handle, self._works = self._handle, -1, False
        if handle >= 0:
            os.close(handle)

    def _put_off(self, offset: int, data: memoryview) -> None:
        with self._lock:
            self._room -= len(data)
            if self._room >= 0:
                self._later.append((offset, bytes(data)))
                return
        write_all(self._plain, data, offset)

    def _write_blocks(self, offset: int, data: memoryview) -> None:
        import numpy as np

        source = np.frombuffer(data, dtype=np.uint8)
        if source.ctypes.data % self._memory == 0:
            done = self._try(offset, data)
            if done == len(data):
                return
            offset, data, source = offset + done, data[done:], source[done:]
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = aligned(BUFFER, HUGE)
        for begin in range(0, len(data), BUFFER):
            part = source[begin : begin + BUFFER]
            np.copyto(buffer[: len(part)], part)  # unlike an assignment to a memoryview, this releases the GIL
            window = buffer[: len(part)].data
            done = self._try(offset + begin, window)
            write_all(self._plain, window[done:], offset + begin + done)
        self._spare.append(buffer)

    def _try(self, offset: int, data: memoryview) -> int:
        """Write complete blocks past the page cache; return the bytes that the system took."""
        done = 0
        while done < len(data) and self._works:
            try:
                written = os.pwrite(self._handle, data[done : done + AT_ONCE], offset + done)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                if self._memory < self._block:  # an older system requires more than the device does
                    self._memory = self._block
                else:
                    self._works = False
                break
            done += written // self._block * self._block
            if written % self._block:
                break
        return done


def aligned(num_bytes: int, block: int = BLOCK) -> Any:
    """Allocate an uninitialized numpy byte array aligned to ``block``, outside of torch's memory."""
    import numpy as np

    room = np.empty(num_bytes + block, dtype=np.uint8)
    begin = -room.ctypes.data % block
    return room[begin : begin + num_bytes]
