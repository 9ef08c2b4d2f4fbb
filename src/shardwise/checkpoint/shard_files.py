"""Read and write safetensors files in ranges, with hashes, for full and sharded tensors.

No memory mapping and no second read: several threads move bytes directly between tensor memory and the file. Data for
another device, dtype or stride passes through a small buffer.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from shardwise.checkpoint.dtypes import CODES, DTYPES
from shardwise.checkpoint.format import GridShards, Hasher, Shard, TensorEntry, hash_text, hasher, parsed_json
from shardwise.checkpoint.layout import Box, box_of, local_of
from shardwise.checkpoint.storage.direct_io import BLOCK
from shardwise.checkpoint.storage.local_storage import CHUNK, FileWriter, Folder, RangeReader
from shardwise.errors import CheckpointError, ShardwiseError

BUFFER = 1 << 26  # bytes per read that goes through a buffer
PIECE = 1 << 22  # bytes hashed and written at once: small enough to stay in a CPU cache
THREADS = 4  # concurrent read calls per rank
WRITERS = 2  # one hashes while the other writes; one process saturates a disk, and the training needs the cores
_SHORT = 1 << 18  # runs shorter than this are read together with the gaps between them
_LARGEST_HEADER = 100_000_000  # same limit as the safetensors library

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stored:
    """Tensor in a safetensors file: code, shape, and its bytes ``begin`` to ``end`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def code_of(tensor: torch.Tensor) -> str:
    """Return the safetensors code of the dtype (``F32``).

    Raises:
        CheckpointError: safetensors has none.
    """
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{tensor.dtype} cannot be stored as safetensors")
    return CODES[tensor.dtype]


def entry_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the torch dtype of an entry."""
    return DTYPES[entry.dtype]


def in_threads(do: Callable[[Item], None], items: Sequence[Item], threads: int = THREADS) -> None:
    """Call ``do`` on every item in a thread pool.

    The first exception is raised after all started calls have ended.
    """
    if len(items) < 2 or threads < 2:
        for item in items:
            do(item)
        return
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="checkpoint") as pool:
        futures = [pool.submit(do, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class TensorFile:
    """New safetensors file with the tensors of ``entries`` (name to code and shape).

    A context manager. The header is written at once. Each tensor is then `put`, on a disk in any order and by several
    threads, elsewhere one after the other in ``order``. The file is durable at the end of the ``with``.

    Raises:
        OSError: the disk is full or the folder cannot be written to; from every method.
    """

    def __init__(
        self,
        path: Folder,
        entries: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        sizes = {name: math.prod(shape) * DTYPES[code].itemsize for name, (code, shape) in entries.items()}
        self.order = file_order({name: DTYPES[code].itemsize for name, (code, _) in entries.items()})
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for name in self.order:
            begin, end = end, end + sizes[name]
            header[name] = {"dtype": entries[name][0], "shape": list(entries[name][1]), "data_offsets": [begin, end]}
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (
            -(8 + len(head)) % (BLOCK if end >= BLOCK else 8)
        )  # so that the tensors begin at a block boundary
        self._places = {name: 8 + len(head) + header[name]["data_offsets"][0] for name in self.order}
        self._sizes = sizes
        self.path = path
        self.size = 8 + len(head) + end
        self._file = FileWriter(path, self.size)
        self.parallel = self._file.parallel
        try:
            self._file.write_at(0, len(head).to_bytes(8, "little") + head)
        except BaseException:
            self._file.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._file.__exit__(*exc)

    def put(self, name: str, parts: Iterable[torch.Tensor]) -> str:
        """Write a tensor and return its hash.

        ``parts`` are contiguous CPU tensors, consecutive in memory order.
        """
        made, done = hasher(), 0
        for part in parts:
            raw = _bytes_of(part)
            begin = 0
            while begin < len(raw):
                place = self._places[name] + done
                chunk = raw[begin : begin + PIECE - place % BLOCK]
                made.update(chunk)
                self._file.write_at(place, chunk)
                begin, done = begin + len(chunk), done + len(chunk)
        if done != self._sizes[name]:
            raise CheckpointError(f"{name}: {done} bytes were given, {self._sizes[name]} belong to its shape")
        return hash_text(made)


def file_order(widths: Mapping[str, int]) -> list[str]:
    """Order names as their tensors are stored: aligned and without gaps, by element size."""
    return sorted(widths, key=lambda name: (-widths[name], name))


def write_file(path: Folder, tensors: Mapping[str, torch.Tensor], threads: int = WRITERS) -> dict[str, str]:
    """Write a safetensors file durably, and return the hash of each tensor's bytes.

    Directly from contiguous CPU memory; otherwise through a buffer of `CHUNK` bytes per thread.


    Raises:
        OSError: the disk is full or the folder cannot be written to.
        CheckpointError: a dtype has no safetensors code.
    """
    hashes: dict[str, str] = {}
    entries = {name: (code_of(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(path, entries) as file:

        def put(name: str) -> None:
            hashes[name] = file.put(name, _on_cpu(tensors[name]))

        if file.parallel:
            in_threads(put, sorted(tensors, key=lambda name: -tensors[name].nbytes), threads)
        else:
            in_threads(put, file.order, 1)
    return hashes


def _on_cpu(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order as contiguous CPU tensors of `CHUNK` bytes.

    No copy where the tensor is already one.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
        if tensor.device.type == "cpu":
            yield tensor
            return
    if tensor.nbytes <= CHUNK:
        yield tensor.contiguous().cpu()
        return
    rows = CHUNK // (tensor.nbytes // len(tensor))
    for part in tensor.split(max(1, rows)):
        yield from _on_cpu(part if rows else part[0])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor, writable."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class ShardReader:
    """Thread-safe reader of slices from the safetensors files of ``folder``.

    Each file is opened once. ``error`` is raised with the file and ``fix`` where a file is missing or damaged. A
    context manager.
    """

    def __init__(self, folder: Folder, fix: str, error: type[ShardwiseError] = CheckpointError) -> None:
        self.folder = folder
        self.fix = fix
        self.error = error
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RangeReader, dict[str, Stored]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for reader, _ in self._open.values():
            reader.close()
        self._open.clear()

    def entries(self, file: str) -> dict[str, Stored]:
        """Return the tensors of ``file`` by name."""
        return self._opened(file)[1]

    def read(self, shard: Shard, box: Box) -> torch.Tensor:
        """Read a part of a shard as a contiguous CPU tensor; ``box`` is relative to the shard.

        Raises:
            ShardwiseError: the file is missing, damaged, or its shape differs from the shard's.
        """
        found = torch.empty(box.lengths, dtype=DTYPES[self.stored(shard).dtype])
        self.read_into(shard, box, found)
        return found

    def read_into(self, shard: Shard, box: Box, target: torch.Tensor, made: Hasher | None = None) -> None:
        """Fill ``target`` (shape ``box.lengths``, any device and strides) with a part of a shard.

        ``made`` (a hasher) is updated with the bytes read, which are all the shard's if the box covers it.

        Raises:
            ShardwiseError: as `read`, or the dtype in the file differs from that of ``target``.
        """
        dtype = target.dtype
        stored = self.stored(shard, dtype)
        reader = self._opened(shard.file)[0]
        straight = target.device.type == "cpu"
        if not box.numel:
            return
        try:
            for block in _blocks(stored.shape, box, dtype.itemsize):
                place = target[_slices(_shift(block.part, box.offsets))]
                if straight and block.exact and place.is_contiguous():
                    _fill_range(reader, stored.begin + block.begin, _bytes_of(place), made)
                    continue
                buffer = torch.empty(block.read.lengths, dtype=dtype)
                _fill_range(reader, stored.begin + block.begin, _bytes_of(buffer), made)
                place.copy_(buffer[_slices(_shift(block.part, block.read.offsets))])
        except (OSError, EOFError) as problem:
            raise self._damaged(shard.file, f"{shard.key}: {problem}") from None

    def wrong_hash(self, shard: Shard, tick: Callable[[int], None] | None = None) -> bool:
        """Read every byte of ``shard`` and return whether its hash differs.

        ``tick`` is called with the bytes read.
        """
        stored = self.stored(shard)
        reader = self._opened(shard.file)[0]
        made = hasher(shard.hash)
        buffer = bytearray(min(CHUNK, max(1, stored.end - stored.begin)))
        try:
            for begin in range(stored.begin, stored.end, CHUNK):
                part = memoryview(buffer)[: min(CHUNK, stored.end - begin)]
                _fill_range(reader, begin, part, made)
                if tick is not None:
                    tick(len(part))
        except (OSError, EOFError) as problem:
            raise self._damaged(shard.file, f"{shard.key}: {problem}") from None
        return not same_hash(made, shard)

    def stored(self, shard: Shard, dtype: torch.dtype | None = None) -> Stored:
        """Return the location of a shard in its file, checking shape and (if given) dtype.

        Raises:
            ShardwiseError: the file is missing, damaged, or its contents differ.
        """
        found = self._opened(shard.file)[1].get(shard.key)
        if found is None:
            raise self._damaged(shard.file, f"{shard.key} is not in it")
        if found.shape != shard.lengths:
            raise self._damaged(shard.file, f"{shard.key} is {found.shape}, not {shard.lengths}")
        if dtype is not None and DTYPES[found.dtype] != dtype:
            raise self._damaged(shard.file, f"{shard.key} is {found.dtype}, not {CODES[dtype]}")
        return found

    def _opened(self, file: str) -> tuple[RangeReader, dict[str, Stored]]:
        with self._lock:
            if file not in self._open:
                path = self.folder / file
                try:
                    reader = RangeReader(path)
                except FileNotFoundError:
                    raise self.error(f"'{path}' is missing; {self.fix}") from None
                except OSError as problem:
                    why = problem.strerror or problem
                    raise self.error(f"'{path}' cannot be read: {why}; {self.fix}") from None
                try:
                    self._open[file] = (reader, read_header(reader))
                except (OSError, EOFError, ValueError) as problem:
                    reader.close()
                    raise self._damaged(file, str(problem)) from None
            return self._open[file]

    def _damaged(self, file: str, why: str) -> ShardwiseError:
        return self.error(f"'{self.folder / file}' is damaged: {why}; {self.fix}")


def read_header(reader: RangeReader) -> dict[str, Stored]:
    """Read the header of a safetensors file: its tensors by name.

    Raises:
        EOFError: the file is shorter than its header states.
        ValueError: the header is not valid.
    """
    size = int.from_bytes(reader.read(0, 8), "little")
    if size > _LARGEST_HEADER or 8 + size > reader.size:
        raise EOFError(f"the header claims to have {size} bytes, and the file has {reader.size}")
    try:
        header = parsed_json(reader.read(8, size))
        header.pop("__metadata__", None)
        found = {}
        for name, item in header.items():
            begin, end = item["data_offsets"]
            stored = Stored(item["dtype"], tuple(item["shape"]), 8 + size + begin, 8 + size + end)
            if stored.dtype not in DTYPES:
                raise ValueError(f"{name}: dtype '{stored.dtype}' is unknown")
            if not all(type(number) is int and 0 <= number < 1 << 63 for number in (begin, end, *stored.shape)):
                raise ValueError(f"{name}: its shape or its place is not made of numbers from 0 on")
            if not (begin <= end and end - begin == math.prod(stored.shape) * DTYPES[stored.dtype].itemsize):
                raise ValueError(f"{name}: bytes {begin} to {end} are not those of {stored.shape}")
            found[name] = stored
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"its header is not a safetensors header ({type(problem).__name__}: {problem})") from None
    stored_ranges = sorted(
        (stored.begin, stored.end, name) for name, stored in found.items() if stored.end > stored.begin
    )
    for (_, end, one), (begin, _, other) in itertools.pairwise(stored_ranges):
        if begin < end:
            raise ValueError(f"{one} and {other} overlap")
    last = max((stored.end for stored in found.values()), default=0)
    if last > reader.size:
        lost = next(name for name, stored in found.items() if stored.end > reader.size)
        raise EOFError(f"it ends at byte {reader.size}, and {lost} needs it up to byte {found[lost].end}")
    return found


def same_hash(made: Hasher, shard: Shard) -> bool:
    """Return whether the computed hash equals the shard's."""
    return shard.hash.split(":")[-1] == made.hexdigest()


def touched(tensor: torch.Tensor, shards: Sequence[Shard]) -> list[tuple[Shard, Box]]:
    """List the shards that overlap the local part of ``tensor``, each with the overlap."""
    return overlaps(box_of(tensor), shards)


def overlaps(here: Box, shards: Sequence[Shard]) -> list[tuple[Shard, Box]]:
    """List the shards that overlap a box, each with the overlap (global box)."""
    found = []
    for shard in shards.overlapping(here) if isinstance(shards, GridShards) else shards:
        lows = [max(a, b) for a, b in zip(here.offsets, shard.offsets, strict=True)]
        ends = zip(here.offsets, here.lengths, shard.offsets, shard.lengths, strict=True)
        lengths = [min(a + n, b + m) - low for (a, n, b, m), low in zip(ends, lows, strict=True)]
        if all(length > 0 for length in lengths):
            found.append((shard, Box(tuple(lows), tuple(lengths))))
    return found


def fill(
    tensor: torch.Tensor, pieces: Sequence[tuple[Shard, Box]], reader: ShardReader, *, check: bool = False
) -> None:
    """Fill the local part of ``tensor`` in place from the shards that `touched` returned.

    ``tensor`` is plain or a DTensor, in the dtype of its shards. With ``check`` the hash of every shard that is read
    completely is compared.

    Raises:
        ShardwiseError: a file is missing or damaged, or the shards do not cover the local part.
    """
    here, local = box_of(tensor), local_of(tensor)
    filled = 0
    with torch.no_grad():
        for shard, overlap in pieces:
            made = hasher(shard.hash) if check and is_full(shard, overlap) else None
            target = local[_slices(_shift(overlap, here.offsets))]
            reader.read_into(shard, _shift(overlap, shard.offsets), target, made)
            if made is not None and not same_hash(made, shard):
                raise reader.error(wrong_bytes([(reader.folder / shard.file, shard.key)], reader.fix))
            filled += overlap.numel
    if filled != here.numel:
        raise reader.error(f"shards hold {filled} of the {here.numel} elements needed here; {reader.fix}")


def is_full(shard: Shard, overlap: Box) -> bool:
    """Return whether an overlap covers the full shard."""
    return overlap.lengths == shard.lengths


def wrong_bytes(places: Sequence[tuple[object, str]], fix: str) -> str:
    """Format the message about damaged tensors, each with its file."""
    named = ", ".join(f"{key} in '{path}'" for path, key in places[:10])
    more = f" and {len(places) - 10} more" if len(places) > 10 else ""
    return f"bytes that are not those that were saved: {named}{more}; {fix}"


@dataclass(frozen=True)
class _Block:
    """One read, contiguous in the file from byte ``begin``; ``part`` is the wanted subset."""

    read: Box
    part: Box
    begin: int

    @property
    def exact(self) -> bool:
        return self.read == self.part


def _blocks(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[_Block]:
    """Split a box of a row-major tensor into reads of at most `BUFFER` bytes (or one row).

    In memory order.
    """
    if not shape:
        yield _Block(Box((), ()), Box((), ()), 0)
        return
    inner = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]  # bytes per index of an axis
    split_axis = max((axis for axis in range(len(shape)) if box.lengths[axis] != shape[axis]), default=0)
    while split_axis > 0 and box.lengths[split_axis] * inner[split_axis] < _SHORT:
        split_axis -= 1  # short runs: read through the gaps between them
    rows = max(1, BUFFER // inner[split_axis])
    outer = [
        range(begin, begin + count)
        for begin, count in zip(box.offsets[:split_axis], box.lengths[:split_axis], strict=True)
    ]
    for index in itertools.product(*outer):
        for begin in range(box.offsets[split_axis], box.offsets[split_axis] + box.lengths[split_axis], rows):
            count = min(rows, box.offsets[split_axis] + box.lengths[split_axis] - begin)
            ones = (1,) * split_axis
            read = Box((*index, begin, *(0,) * (len(shape) - split_axis - 1)), (*ones, count, *shape[split_axis + 1 :]))
            part = Box((*index, begin, *box.offsets[split_axis + 1 :]), (*ones, count, *box.lengths[split_axis + 1 :]))
            place = sum(i * size for i, size in zip((*index, begin), inner, strict=False))
            yield _Block(read, part, place)


def _fill_range(reader: RangeReader, begin: int, buffer: memoryview, made: Hasher | None) -> None:
    for start in range(0, len(buffer), CHUNK):
        part = buffer[start : start + CHUNK]
        reader.read_into(begin + start, part)
        if made is not None:
            made.update(part)


def _shift(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(tuple(a - b for a, b in zip(box.offsets, origin, strict=True)), box.lengths)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(box.offsets, box.lengths, strict=True))
