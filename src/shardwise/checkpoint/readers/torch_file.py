"""Read ``torch.save`` files without torch's loader: first objects, then tensors in ranges.

Since torch 1.6 such a file is a zip archive: ``<name>/data.pkl`` has the objects, ``<name>/data/<key>`` the bytes of
a storage, uncompressed, so that a part of a tensor is a range of the file. Older files are a few object streams
followed by the storages.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any, NoReturn, Self

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.readers.inert import InertRecord, StorageKind, StoredStorage, StoredTensor, Unreadable
from shardwise.checkpoint.readers.restricted import load_from_stream, load_restricted, printable
from shardwise.checkpoint.storage.local_storage import CHUNK, Folder, RangeReader, is_local
from shardwise.errors import CheckpointError

__all__ = ["InertRecord", "StoredStorage", "StoredTensor", "TorchFile"]

GAP, REMOTE_GAP = 1 << 14, 1 << 22  # bytes that are read and discarded rather than skipped
_ZIP, _LOCAL_HEADER = b"PK\x03\x04", struct.Struct("<4s5H3I2H")
_ENCRYPTED = 1
_UTF8 = 0x800
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # first bytes of files before torch 1.6
_SAVE_AGAIN = "open it with torch and save it again with torch.save"


class TorchFile:
    """File of torch.save, or one embedded in a larger file; a thread-safe context manager.

    Attributes:
        content: what was saved: dicts, lists, numbers, text, and `StoredTensor` where a tensor was.

    Raises:
        CheckpointError: the file cannot be opened, is damaged, is not such a file, or asks to run code.
    """

    def __init__(self, path: Folder, begin: int = 0, length: int | None = None) -> None:
        self.path = path
        self._begin = begin
        self._gap = GAP if is_local(path) else REMOTE_GAP
        self._places: dict[str, tuple[int, int]] = {}  # offset and length of each storage in the file
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._big_endian = False
        try:
            self._reader = RangeReader(path)
        except OSError as error:
            raise CheckpointError(f"'{path}' cannot be opened: {error.strerror or error}") from None
        try:
            self._size = self._reader.size - begin if length is None else length
            if begin < 0 or self._size < 0 or begin + self._size > self._reader.size:
                self._damaged(f"bytes {begin} to {begin + self._size} of {self._reader.size} are wanted")
            self.content = self._load()
        except BaseException:
            self._reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def read(self, stored: StoredTensor, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, a contiguous CPU tensor of shape ``box.lengths``.

        Long gaps between the wanted elements are not read. Needs memory for the result and 16 MiB.

        Raises:
            CheckpointError: the bytes are missing.
        """
        _check_box(stored, box)
        width = stored.dtype.itemsize
        data = torch.empty(box.numel * width, dtype=torch.uint8)
        result = data.view(stored.dtype).view(box.lengths)
        if not box.numel:
            return result
        try:
            begin, size = self._place(stored.key)
            first = stored.offset + sum(o * s for o, s in zip(box.offsets, stored.stride, strict=True))
            if stored.offset < 0 or stored.end * width > size:
                self._damaged(f"storage '{stored.key}' has {size} bytes, {stored.end * width} are needed")
            self._fill(data, result, begin + first * width, stored.stride)
        except (OSError, EOFError) as error:
            self._damaged(str(error))
        if stored.big_endian:
            unit = width // 2 if stored.dtype.is_complex else width
            data.numpy().view(f"u{unit}").byteswap(inplace=True)
        return result

    def _fill(self, data: torch.Tensor, out: torch.Tensor, begin: int, stride: tuple[int, ...]) -> None:
        """Read bytes from ``begin`` at ``stride`` into ``out``, a view of ``data``."""
        width = out.element_size()
        long = [d for d, length in enumerate(out.shape) if length > 1]
        span = 1 + sum((out.shape[d] - 1) * stride[d] for d in long)
        if out.is_contiguous() and all(stride[d] == out.stride(d) for d in long):
            place = out.storage_offset() * width
            self._reader.read_into(begin, data[place : place + span * width].numpy())
            return
        widest = max(long, key=lambda d: stride[d])
        step = stride[widest] * width
        rest = span * width - (out.shape[widest] - 1) * step  # per index of the largest dimension
        is_dense = step - rest <= self._gap
        if is_dense and span * width <= CHUNK:
            between = torch.empty(span * width, dtype=torch.uint8)
            self._reader.read_into(begin, between.numpy())
            out.copy_(between.view(out.dtype).as_strided(out.shape, stride))
            return
        at_once = max(1, (CHUNK - rest) // step + 1) if is_dense else 1
        for index in range(0, out.shape[widest], at_once):
            part = out.narrow(widest, index, min(at_once, out.shape[widest] - index))
            self._fill(data, part, begin + index * step, stride)

    # the objects

    def _load(self) -> Any:
        stream = _Stream(_Window(self._reader, self._begin, self._size), 1 << 13)
        try:
            head = stream.read(4)
            stream.seek(0)
            return self._load_zip(stream) if head == _ZIP else self._load_old(stream)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # the standard library's zipfile reports damage in many ways
            self._damaged(str(error) or type(error).__name__)

    def _load_zip(self, stream: io.BufferedReader) -> Any:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
        names = [info.filename for info in entries]
        objects = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(objects) != 1 or len(set(names)) != len(names):
            self._refuse(f"it is a zip archive with {len(objects)} entries data.pkl, where torch.save makes one")
        root = objects[0].removesuffix("data.pkl")
        if f"{root}constants.pkl" in names:
            self._refuse("it is a TorchScript archive, a program; save model.state_dict() with torch.save")
        self._entries = {info.filename.removeprefix(root): info for info in entries if info.filename.startswith(root)}
        order = self._bytes_of("byteorder") if "byteorder" in self._entries else b"little"
        if order not in (b"little", b"big"):
            self._refuse(f"its byte order is {order[:20]!r}, neither 'little' nor 'big'")
        self._big_endian = order == b"big"
        return load_restricted(self._bytes_of("data.pkl"), str(self.path), self._storage_in_zip)

    def _bytes_of(self, name: str) -> bytes:
        begin, length = self._place_of_entry(name)
        data = self._reader.read(begin, length)
        if self._entries[name].CRC not in (0, zlib.crc32(data)):  # 0 where torch was told to omit it
            self._damaged(f"the checksum of {name} is wrong")
        return data

    def _place(self, key: str) -> tuple[int, int]:
        if key not in self._places:
            self._places[key] = self._place_of_entry(f"data/{key}")
        return self._places[key]

    def _place_of_entry(self, name: str) -> tuple[int, int]:
        """Return the offset and length of an entry's bytes in the file."""
        info = self._entries.get(name)
        if info is None:
            self._damaged(f"{name} is missing in it")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            self._refuse(f"{info.filename} is compressed, and torch.save stores bytes as they are; {_SAVE_AGAIN}")
        if info.flag_bits & _ENCRYPTED:
            self._refuse(f"{info.filename} is encrypted; {_SAVE_AGAIN}")
        title = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
        begin = info.header_offset
        if not 0 <= begin <= self._size - _LOCAL_HEADER.size - len(title) - info.file_size:
            self._damaged(f"{info.filename} is outside of it")
        header = self._reader.read(self._begin + begin, _LOCAL_HEADER.size + len(title))
        signature, *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
        if signature != _ZIP or header[_LOCAL_HEADER.size :] != title or name_length != len(title):
            self._damaged(f"{info.filename} is not where the archive says")
        begin += _LOCAL_HEADER.size + name_length + extra_length
        if begin + info.file_size > self._size:
            self._damaged(f"{info.filename} reaches behind its end")
        return self._begin + begin, info.file_size

    def _storage_in_zip(self, reference: Any) -> StoredStorage:
        storage = _storage(reference, self._big_endian)
        info = self._entries.get(f"data/{storage.key}")
        if info is None or info.file_size < storage.num_bytes:
            size = "nothing" if info is None else f"{info.file_size} bytes"
            self._damaged(f"storage '{storage.key}' should have {storage.num_bytes} bytes and has {size}")
        return storage

    # files before torch 1.6

    def _load_old(self, stream: io.BufferedReader) -> Any:
        def load(persistent: Any = None) -> Any:
            return load_from_stream(stream, self._size - stream.tell(), str(self.path), persistent)

        first = stream.peek(512)
        if first[257:262] == b"ustar":
            self._refuse(f"it is a tar archive, as torch wrote before version 0.1.10; {_SAVE_AGAIN}")
        if not first.startswith(b"\x80"):
            self._refuse(f"it begins with {first[:8]!r}, and is not a torch.save file")
        if load() != _MAGIC or load() != _PROTOCOL:
            self._refuse("it has objects of Python, and is not a torch.save file")
        load()  # about the machine; the storages are always little-endian
        storages: dict[str, StoredStorage] = {}

        def persistent(reference: Any) -> StoredStorage:
            if not isinstance(reference, tuple) or len(reference) != 6 or reference[5] is not None:
                raise Unreadable(f"it refers to a part of a storage, as torch wrote before version 0.4; {_SAVE_AGAIN}")
            storage = _storage(reference, big_endian=False)
            return storages.setdefault(storage.key, storage)

        content = load(persistent)
        for key in load():
            storage = storages[key]
            width = storage.dtype.itemsize if storage.dtype is not None else 1
            (count,) = struct.unpack("<q", stream.read(8))
            if count * width != storage.num_bytes or stream.tell() + storage.num_bytes > self._size:
                self._damaged(f"storage '{key}' should have {storage.num_bytes} bytes and has {count * width}")
            self._places[key] = self._begin + stream.tell(), storage.num_bytes
            stream.seek(storage.num_bytes, io.SEEK_CUR)
        if lost := storages.keys() - self._places.keys():
            self._damaged(f"storage '{min(lost)}' is missing in it")
        return content

    def _damaged(self, why: str) -> NoReturn:
        raise CheckpointError(f"'{self.path}' is damaged: {printable(why)}; copy or save it again") from None

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"'{self.path}' cannot be read: {printable(why)}") from None


def _storage(reference: Any, big_endian: bool) -> StoredStorage:
    """Resolve a reference such as ``("storage", FloatStorage, "0", "cpu", 12)``."""
    if isinstance(reference, tuple) and len(reference) >= 5 and reference[0] == "storage":
        kind, key, _, count = reference[1:5]
        if isinstance(kind, StorageKind) and isinstance(key, str) and type(count) is int and count >= 0:
            width = kind.dtype.itemsize if kind.dtype is not None else 1
            return StoredStorage(key, kind.dtype, count * width, big_endian)
    raise Unreadable("it refers to an external object that is not a torch storage")


def _check_box(stored: StoredTensor, box: Box) -> None:
    inside = len(box.offsets) == len(box.lengths) == len(stored.shape) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for offset, length, size in zip(box.offsets, box.lengths, stored.shape, strict=True)
    )
    if not inside:
        raise CheckpointError(f"elements {box.offsets} + {box.lengths} are wanted of a tensor of shape {stored.shape}")


class _Window(io.RawIOBase):
    """Part of a file as a separate stream."""

    def __init__(self, reader: RangeReader, begin: int, size: int) -> None:
        super().__init__()
        self.size = size
        self._reader = reader
        self._begin = begin
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        if self._place < 0:
            raise OSError(f"byte {self._place} is before the beginning")
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self._place))
        self._reader.read_into(self._begin + self._place, memoryview(buffer)[:count])
        self._place += count
        return count


class _Stream(io.BufferedReader):
    """Stream that never allocates more than the file has, whatever length it claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.raw.size - self.tell())  # type: ignore[attr-defined]
        return super().read(left if size is None or size < 0 else min(size, left))
