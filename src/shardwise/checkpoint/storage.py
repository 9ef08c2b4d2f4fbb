"""Folders and files of checkpoints, on a disk or behind a URL, and every call that writes, syncs or renames them.

A local folder is a `pathlib.Path`, a remote one a `upath.UPath` over fsspec: the same methods. What differs (how
bytes become durable, what is atomic, how ranges are read) is here and nowhere else.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from shardwise.errors import UserError

if TYPE_CHECKING:
    from upath import UPath

Folder: TypeAlias = "Path | UPath"
CHUNK = 1 << 24  # bytes of one read or write call
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def folder_of(place: str | Folder) -> Folder:
    """A `Path` for what is on a disk (``file://`` too), a `UPath` for any other URL (``s3://bucket/run``).

    Raises:
        UserError: nobody knows the protocol, or the package that speaks it is not installed.
    """
    if isinstance(place, Path) or not isinstance(place, str):
        return place
    if "://" not in place:
        return Path(place)
    protocol, rest = place.split("://", 1)
    if protocol in ("file", "local"):
        return Path(rest)
    from upath import UPath

    try:
        remote = UPath(place)
        _ = remote.fs  # the import of what speaks the protocol
    except ImportError as error:
        package = _PACKAGES.get(protocol, "")
        fix = f"pip install {package}" if package else str(error)
        raise UserError(f"'{place}': '{protocol}://' needs a package that is not installed; {fix}") from None
    except ValueError as error:
        known = "give a path, or a URL that fsspec knows (s3://, gs://, abfs://)"
        raise UserError(f"'{place}': {error}; {known}") from None
    return remote


def is_local(folder: Folder) -> bool:
    """Whether the operating system's own calls work on it."""
    return isinstance(folder, Path)


class RangeReader:
    """A file that is read in ranges, by several threads at once; a context manager.

    Raises:
        OSError: the file is not there or cannot be read.
    """

    def __init__(self, path: Folder) -> None:
        self.path = path
        self._handle = -1
        if isinstance(path, Path):
            self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.size = os.fstat(self._handle).st_size
        else:
            self.size = int(path.stat().st_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def read_into(self, begin: int, buffer: Any) -> None:
        """Fill ``buffer`` (anything with writable bytes) from byte ``begin`` on.

        Raises:
            EOFError: the file ends before.
        """
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            part = view[done : done + CHUNK]
            got = self._read_some(begin + done, part)
            if not got:
                raise EOFError(f"the file ends at byte {self.size}, {begin + len(view)} are needed")
            done += got

    def read(self, begin: int, length: int) -> bytes:
        """``length`` bytes from byte ``begin`` on; see `read_into`."""
        buffer = bytearray(length)
        self.read_into(begin, buffer)
        return bytes(buffer)

    def _read_some(self, begin: int, part: memoryview) -> int:
        if self._handle >= 0:
            return os.preadv(self._handle, [part], begin)
        data = self.path.fs.cat_file(self.path.path, start=begin, end=begin + len(part))  # type: ignore[union-attr]
        part[: len(data)] = data
        return len(data)


class FileWriter:
    """A new file; what was written is durable when `close` returns. A context manager, which closes without an error.

    ``parallel`` files (on a disk) may be written at any offset by several threads at once; others are written from
    the first byte to the last, in order.

    Raises:
        OSError: the file cannot be made; every method may raise it too.
    """

    def __init__(self, path: Folder) -> None:
        self.path = path
        self.parallel = isinstance(path, Path)
        self._stream: Any = None
        self._handle = -1
        if isinstance(path, Path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
        else:
            self._stream = path.open("wb")
        self._place = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def write_at(self, offset: int, data: Any) -> None:
        """Write all of ``data`` (anything with bytes) at ``offset``."""
        view = memoryview(data).cast("B")
        if self._stream is not None:
            if offset != self._place:
                raise ValueError(f"a remote file is written in order: at byte {self._place}, not {offset}")
            self._stream.write(view)
            self._place += len(view)
            return
        done = 0
        while done < len(view):
            done += os.pwrite(self._handle, view[done : done + CHUNK], offset + done)

    def close(self) -> None:
        """Bring everything to the disk, or to the server, and let go of the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._handle >= 0:
            try:
                os.fsync(self._handle)
            finally:
                os.close(self._handle)
                self._handle = -1

    def discard(self) -> None:
        """Let go of the file without bringing it anywhere."""
        if self._stream is not None:
            discard = getattr(self._stream, "discard", None)
            if discard is not None:
                discard()
            self._stream = None
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def write_small(path: Folder, data: bytes) -> None:
    """Make or replace a small file at once: readers see the old bytes or the new ones, never a part.

    On a disk by a temporary file, fsync, rename and fsync of the folder; elsewhere by one put, which is atomic on
    object stores.
    """
    if not isinstance(path, Path):
        path.write_bytes(data)
        return
    temporary = path.with_name(f".tmp-{path.name}")
    with FileWriter(temporary) as file:
        file.write_at(0, data)
    os.rename(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Folder) -> None:
    """Bring the names in ``folder`` to the disk; elsewhere there is nothing to do."""
    if not isinstance(folder, Path):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_folder(old: Path, new: Path) -> None:
    """Give a local folder its final name, durably; atomic."""
    os.rename(old, new)
    sync_folder(new.parent)


def remove_folder(folder: Folder) -> None:
    """Remove a folder and all that is in it."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        folder.rmdir(recursive=True)


def free_bytes(folder: Folder) -> int | None:
    """Bytes that are free on the disk of a local folder; ``None`` where nobody knows."""
    if not isinstance(folder, Path) or not folder.is_dir():
        return None
    return shutil.disk_usage(folder).free
