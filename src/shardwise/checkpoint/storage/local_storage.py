"""Storage of checkpoint folders and files on a disk or behind a URL.

A local folder is a `pathlib.Path`, a remote one a `upath.UPath` over fsspec: the same methods. What differs (how
bytes become durable, what is atomic, how ranges are read) is here and in `remote`, and nowhere else.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from shardwise.checkpoint.storage.direct_io import DirectWriter, write_all

if TYPE_CHECKING:
    from upath import UPath

    from shardwise.checkpoint.storage.remote import Upload

Folder: TypeAlias = "Path | UPath"
MIB = 1 << 20
CHUNK = 16 * MIB  # bytes per read or write call on a disk
DIRECT = 16 * MIB  # larger files are written with direct I/O
REQUEST = 64 * MIB  # bytes per request to a server: a request costs as much time as some MiB
AHEAD = 4 * MIB  # bytes requested where small reads follow each other
FIRST = 512 * 1024  # bytes requested where a file's header is read
GAP = 64 * 1024  # largest gap in bytes between two consecutive small reads
WINDOWS = 4  # number of positions of a file read ahead at once
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # network file systems without support


def folder_of(place: str | Folder) -> Folder:
    """Return a `Path` for a disk (``file://`` too), a `UPath` for any other URL.

    Such as ``s3://bucket/run``. Sends no request to a server. Between processes pass the text, not the `UPath`.

    Raises:
        UserError: the protocol is unknown, its package is not installed, or no bucket is named.
    """
    if isinstance(place, Path):
        return place
    if not isinstance(place, str):
        from shardwise.checkpoint.storage.remote import strict

        return Path(place.path) if place.protocol in ("", "file", "local") else strict(place)
    if "://" not in place:
        return Path(place)
    protocol, rest = place.split("://", 1)
    if protocol in ("file", "local"):
        return Path(rest)
    from shardwise.checkpoint.storage.remote import open_url

    return open_url(place)


def is_local(folder: Folder) -> bool:
    """Return whether the operating system's own calls work on it."""
    return isinstance(folder, Path)


class RangeReader:
    """File read in ranges, thread-safe; a context manager.

    Of a remote file the beginning, and small reads that follow each other, are requested in larger ranges, unless
    ``ahead`` is false. A known ``size`` is not requested.

    Raises:
        OSError: the file is not there or cannot be read. ``errno`` and ``strerror`` say why.
    """

    def __init__(self, path: Folder, *, size: int | None = None, ahead: bool = True) -> None:
        self.path = path
        self.ahead = ahead
        self._handle = -1
        self.request = CHUNK if isinstance(path, Path) else REQUEST  # preferred bytes per read
        self._windows: deque[tuple[int, bytes]] = deque(maxlen=WINDOWS)
        self._ends: deque[int] = deque([0], maxlen=WINDOWS)  # ends of small reads
        self._lock = threading.Lock()
        if isinstance(path, Path):
            self._handle = _open_file(path)
            self.size = os.fstat(self._handle).st_size
        else:
            self.size = int(path.stat().st_size) if size is None else size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._windows.clear()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def read_into(self, begin: int, buffer: Any) -> None:
        """Fill ``buffer`` (any writable bytes) from byte ``begin``.

        Raises:
            EOFError: the file ends before.
        """
        view = memoryview(buffer).cast("B")
        if begin + len(view) > self.size:
            raise EOFError(f"the file ends at byte {self.size}, {begin + len(view)} are needed")
        if self._handle < 0 and len(view) < FIRST:
            view[:] = self._small(begin, len(view))
            return
        done = 0
        while done < len(view):
            part = view[done : done + self.request]
            got = self._read_some(begin + done, part)
            if not got:
                raise EOFError(f"the file ends at byte {begin + done}, {begin + len(view)} are needed")
            done += got

    def read(self, begin: int, length: int) -> bytes:
        """Read ``length`` bytes from byte ``begin``; see `read_into`."""
        if begin + length > self.size:  # before memory is allocated for what a damaged header asks for
            raise EOFError(f"the file ends at byte {self.size}, {begin + length} are needed")
        buffer = bytearray(length)
        self.read_into(begin, buffer)
        return bytes(buffer)

    def _small(self, begin: int, length: int) -> bytes:
        """Read a small range of a remote file, from a cached window or with read-ahead."""
        with self._lock:
            for start, window in self._windows:
                if start <= begin and begin + length <= start + len(window):
                    self._ends.append(begin + length)
                    return window[begin - start : begin - start + length]
            follows = self.ahead and any(0 <= begin - end <= GAP for end in self._ends)
            self._ends.append(begin + length)
        ahead = (AHEAD if begin else FIRST) if follows else length
        wanted = min(max(ahead, length), self.size - begin)
        window = self._ask(begin, wanted)
        if len(window) < length:
            raise EOFError(f"the file ends at byte {begin + len(window)}, {begin + length} are needed")
        if wanted > length:
            with self._lock:
                self._windows.append((begin, window))
        return window[:length]

    def _read_some(self, begin: int, part: memoryview) -> int:
        if self._handle >= 0:
            return os.preadv(self._handle, [part], begin)
        data = self._ask(begin, len(part))
        part[: len(data)] = data
        return len(data)

    def _ask(self, begin: int, length: int) -> bytes:
        """Send one request."""
        if not length:
            return b""
        data: bytes = self.path.fs.cat_file(self.path.path, start=begin, end=begin + length)  # type: ignore[union-attr]
        if len(data) > length:
            raise OSError(errno.EIO, f"{len(data)} bytes came where {length} were asked for", str(self.path))
        return data


class FileWriter:
    """New file, durable when `close` returns; a context manager, which closes without an error.

    ``parallel`` files (on a disk) may be written at any offset by several threads at once; others are written from the
    first byte to the last, in order, and are not visible before `close`. ``size`` is the maximum number of bytes, where
    known: it sets the size of upload parts. After an error nothing of the file is left.

    Raises:
        OSError: the file cannot be created; every method may raise it too.
    """

    def __init__(self, path: Folder, size: int | None = None) -> None:
        self.path = path
        self.parallel = isinstance(path, Path)
        self._upload: Upload | None = None
        self._handle = -1
        self._place = 0
        self._direct: DirectWriter | None = None
        if isinstance(path, Path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
            if size is not None and size >= DIRECT:
                self._direct = DirectWriter(path, self._handle)
        else:
            from shardwise.checkpoint.storage.remote import start_upload

            self._upload = start_upload(path, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def write_at(self, offset: int, data: Any) -> None:
        """Write all of ``data`` (any bytes-like object) at ``offset``."""
        view = memoryview(data).cast("B")
        if self._upload is not None:
            if offset != self._place:
                raise ValueError(f"a remote file is written in order: at byte {self._place}, not {offset}")
            self._upload.write(view)
            self._place += len(view)
            return
        if self._direct is not None:
            self._direct.write_at(offset, view)
        else:
            write_all(self._handle, view, offset)

    def close(self) -> None:
        """Flush everything to the disk or the server, and close the file.

        Raises:
            OSError: not everything arrived; the file is discarded.
        """
        try:
            if self._upload is not None:
                self._upload.close()
            if self._direct is not None:
                self._direct.close()
            if self._handle >= 0:
                os.fsync(self._handle)
        except BaseException:
            self.discard()
            raise
        self._let_go()

    def discard(self) -> None:
        """Close the file and remove everything already written; never raises."""
        if self._upload is not None:
            with suppress(Exception):
                self._upload.discard()
        elif self._handle >= 0:
            with suppress(OSError):
                self.path.unlink()
        self._let_go()

    def _let_go(self) -> None:
        self._upload = None
        if self._direct is not None:
            self._direct.discard()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def file_sizes(folder: Folder) -> dict[str, int]:
    """Return the files in ``folder`` by name, with their bytes.

    One request for a remote folder.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    if isinstance(folder, Path):
        with os.scandir(folder) as items:
            return {item.name: item.stat().st_size for item in items if _leads_to_file(item)}
    items = folder.fs.ls(folder.path, detail=True)
    files = [item for item in items if item["type"] == "file"]
    return {item["name"].rstrip("/").rsplit("/", 1)[-1]: int(item["size"]) for item in files}


def read_small(path: Folder, limit: int) -> bytes:
    """Read all bytes of a small file.

    Raises:
        OSError: it is not there, cannot be read, is not a file, or has more than ``limit`` bytes.
    """
    with RangeReader(path, ahead=False) as reader:
        if reader.size > limit:
            raise OSError(errno.EFBIG, f"it has {reader.size} bytes, and {limit} are the most that is read", str(path))
        return reader.read(0, reader.size)


def _open_file(path: Path) -> int:
    """Open a file for reading; reject anything else (opening a pipe would block forever)."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}.get(stat.S_IFMT(mode))
        raise OSError(errno.EINVAL, f"it is {kind or 'a device'}, not a file", str(path))
    return handle


def _leads_to_file(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_file()
    except OSError:  # a link to itself
        return False


def write_small(path: Folder, data: bytes) -> None:
    """Create or replace a small file atomically: readers see the old bytes or the new ones.

    On a disk by a temporary file, fsync, rename and fsync of the folder; elsewhere by one put, which is atomic on
    object stores.
    """
    if not isinstance(path, Path):
        with FileWriter(path, len(data)) as file:
            file.write_at(0, data)
        return
    temporary = path.with_name(f".tmp-{path.name}")
    with FileWriter(temporary) as file:
        file.write_at(0, data)
    try:
        os.rename(temporary, path)
    except OSError:
        temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Folder) -> None:
    """Sync the directory entries of ``folder``; a no-op for remote folders."""
    if not isinstance(folder, Path):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def rename_folder(old: Path, new: Path) -> None:
    """Rename a local folder to its final name, durably and atomically."""
    os.rename(old, new)
    sync_folder(new.parent)


def remove_folder(folder: Folder) -> None:
    """Remove a folder and everything in it.

    Raises:
        OSError: part of it is left.
    """
    if isinstance(folder, Path):
        shutil.rmtree(folder)
        return
    folder.fs.rm(folder.path, recursive=True)
    if folder.exists():  # some stores do not report failed removals
        raise OSError(errno.EIO, "not everything could be removed", str(folder))


def free_bytes(folder: Folder) -> int | None:
    """Return the free bytes on the disk of a local folder; ``None`` where unknown."""
    if not isinstance(folder, Path) or not folder.is_dir():
        return None
    return shutil.disk_usage(folder).free
