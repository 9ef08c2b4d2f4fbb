"""Read PyTorch DCP folders (``.metadata`` and ``.distcp``), saved by any mesh of ranks."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.readers.dcp_metadata import FIX, ByteRange, Contents, DcpTensor, overlap, read_contents
from shardwise.checkpoint.readers.inert import StoredTensor
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.restricted import printable
from shardwise.checkpoint.readers.state_names import Found, sort_out
from shardwise.checkpoint.readers.torch_file import TorchFile
from shardwise.checkpoint.storage.local_storage import Folder, RangeReader
from shardwise.errors import CheckpointError

LIGHTNING = "meta.pt"  # key of Lightning's and Fabric's non-tensor values
PIECE = 1 << 25  # bytes per read through a buffer
_RUN = 1 << 20  # bytes of small values read at once
_SMALL = 1 << 26  # bytes of a non-tensor value


class DcpSource:
    """Folder of ``torch.distributed.checkpoint.save``, as a `Source`.

    Weights are found under common keys (``model``, ``app.model``, ``state_dict``)
    or flat; optimizer state where it is stored by parameter name, as by ``get_state_dict``.
    """

    def __init__(self, path: Folder) -> None:
        """Read the metadata, and the hyperparameters of the optimizers.

        Raises:
            CheckpointError: files are missing or damaged, tensors have holes, or a file asks to run code.
        """
        self.folder = path
        self.place = str(path)
        self.kind = "PyTorch DCP folder"
        self._contents: Contents = read_contents(path)
        self._small = _SmallValues(path, self._contents.values)
        found = sort_out(self._contents.paths, self._contents.tensors, self._value)
        if odd := [printable(name) for name in found.tensors if not name.isprintable()]:
            raise CheckpointError(f"'{path}' has names with control characters: {short_list(odd)}; {FIX}")
        self._keys: Mapping[str, str] = found.tensors
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._contents.tensors[key].info for name, key in sorted(found.tensors.items())
        }
        self.aliases: Mapping[str, str] = {}
        self.optimizer: Mapping[str, Any] | None = found.optimizer
        self.step: int | None = self._step(found)
        self.notes: Sequence[str] = tuple(map(printable, found.notes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: files are only open while they are read."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        key = self._keys[name]
        item = self._contents.tensors[key]
        touched = [(chunk, place, part) for chunk, place in item.chunks if (part := overlap(box, chunk)) is not None]
        if sum(part.numel for _, _, part in touched) != box.numel:
            raise CheckpointError(f"{name}: {box} is no part of {list(item.info.shape)}")
        if len(touched) == 1:
            chunk, place, part = touched[0]
            with self._opened(key, item, chunk, place) as piece:
                return piece.read(part)
        found = torch.empty(box.lengths, dtype=item.info.dtype)
        for chunk, place, part in touched:
            with self._opened(key, item, chunk, place) as piece:
                for some in pieces(part, item.info.dtype.itemsize):
                    target = zip(some.offsets, box.offsets, some.lengths, strict=True)
                    found[tuple(slice(a - b, a - b + n) for a, b, n in target)] = piece.read(some)
        return found

    def _opened(self, key: str, item: DcpTensor, chunk: Box, place: ByteRange) -> _Piece:
        return _Piece(self.folder / place.file, key, item.info, chunk, place)

    def _value(self, key: str) -> Any:
        """Return a non-tensor value, or the number in a tensor of one element."""
        item = self._contents.tensors.get(key)
        if item is None:
            return self._small.read(key)
        if math.prod(item.info.shape) != 1:
            raise CheckpointError(
                f"{printable(key)} in '{self.folder}' is a tensor of {list(item.info.shape)}, not one number; {FIX}"
            )
        chunk, place = item.chunks[0]
        with self._opened(key, item, chunk, place) as piece:
            return piece.read(chunk).item()

    def _count(self, key: str) -> int | None:
        """Return a number of steps; ``None`` for an invalid one."""
        item = self._contents.tensors.get(key)
        return None if item is not None and math.prod(item.info.shape) != 1 else whole_number(self._value(key))

    def _step(self, found: Found) -> int | None:
        """Return the program's step count, else the optimizer's."""
        if found.step_key is not None:
            step = self._count(found.step_key)
            found.notes += [f"'{found.step_key}' is not a step count and is not carried over"] * (step is None)
            return step
        if (self.folder / LIGHTNING).is_file():
            step = self._lightning_step(found.notes)
            if step is not None:
                return step
        counted = (self._count(key) for name, key in sorted(found.tensors.items()) if name.endswith("/step"))
        return next((step for step in counted if step is not None), None)

    def _lightning_step(self, notes: list[str]) -> int | None:
        """Return ``global_step`` of Lightning's extra file; the rest of it is not needed."""
        try:
            with TorchFile(self.folder / LIGHTNING) as file:
                content = file.content
        except CheckpointError as error:
            notes.append(f"'{LIGHTNING}' is not carried over: {error}")
            return None
        notes.append(f"of '{LIGHTNING}' (loops, schedulers, callbacks) only the step is carried over")
        return whole_number(content.get("global_step")) if isinstance(content, dict) else None


def pieces(box: Box, itemsize: int, most: int = PIECE) -> Iterator[Box]:
    """Split a box into boxes of at most ``most`` bytes, along the first dimensions."""
    dim = next((d for d, length in enumerate(box.lengths) if length > 1), None)
    if dim is None or box.numel * itemsize <= most:
        yield box
        return
    rows = max(1, most // (box.numel // box.lengths[dim] * itemsize))
    for begin in range(0, box.lengths[dim], rows):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim], lengths[dim] = box.offsets[dim] + begin, min(rows, box.lengths[dim] - begin)
        yield from pieces(Box(tuple(offsets), tuple(lengths)), itemsize, most)


class _Piece:
    """One opened box of a tensor; a context manager.

    Its errors name the tensor, too.
    """

    def __init__(self, path: Folder, key: str, info: TensorInfo, chunk: Box, place: ByteRange) -> None:
        self._key = printable(key)
        self._chunk = chunk
        try:
            self._file = TorchFile(path, place.begin, place.length)
        except CheckpointError as error:
            raise CheckpointError(f"{printable(key)}: {error}; {FIX}") from None
        stored = self._file.content
        if not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != (info.dtype, chunk.lengths):
            self._file.close()
            there = f"{stored.dtype} of {list(stored.shape)}" if isinstance(stored, StoredTensor) else "no tensor"
            wanted = f"{info.dtype} of {list(chunk.lengths)} as the metadata says"
            raise CheckpointError(
                f"{printable(key)}: '{path}' holds {there} at byte {place.begin}, not {wanted}; {FIX}"
            )
        self._stored = stored

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read(self, part: Box) -> torch.Tensor:
        """Read elements of this box; ``part`` is in global coordinates."""
        begins = tuple(a - b for a, b in zip(part.offsets, self._chunk.offsets, strict=True))
        try:
            return self._file.read(self._stored, Box(begins, part.lengths))
        except CheckpointError as error:
            raise CheckpointError(f"{self._key}: {error}; {FIX}") from None


class _SmallValues:
    """Non-tensor values, read in batches.

    There are thousands, adjacent and mostly equal: each is read and parsed once.
    """

    def __init__(self, folder: Folder, places: Mapping[str, ByteRange]) -> None:
        self._folder = folder
        self._places = places
        self._order: dict[str, list[tuple[int, int]]] = {}
        for place in places.values():
            self._order.setdefault(place.file, []).append((place.begin, place.length))
        for spans in self._order.values():
            spans.sort()
        self._parsed: dict[bytes, Any] = {}
        self._runs: dict[str, tuple[int, bytes]] = {}  # per file the first byte and the latest bytes read
        self._lock = threading.Lock()

    def read(self, key: str) -> Any:
        """Return the value.

        Raises:
            CheckpointError: it is damaged, very large, or asks to run code.
        """
        place = self._places[key]
        path = self._folder / place.file
        if place.length > _SMALL:
            what = f"{place.length} bytes in '{path}' are not an option of an optimizer"
            raise CheckpointError(f"{printable(key)}: {what}; {FIX}")
        with self._lock:
            data = self._bytes(path, key, place)
            if data not in self._parsed:
                try:
                    with TorchFile(path, place.begin, place.length) as file:
                        self._parsed[data] = file.content
                except CheckpointError as error:
                    raise CheckpointError(f"{printable(key)}: {error}; {FIX}") from None
            return self._parsed[data]

    def _bytes(self, path: Folder, key: str, place: ByteRange) -> bytes:
        begin, run = self._runs.get(place.file, (0, b""))
        if not begin <= place.begin <= place.begin + place.length <= begin + len(run):
            begin = place.begin
            try:
                with RangeReader(path) as reader:
                    if place.begin + place.length > reader.size:
                        raise EOFError(f"the file ends at byte {reader.size}, {place.begin + place.length} are needed")
                    run = reader.read(begin, min(self._end_of_run(place), reader.size) - begin)
            except (OSError, EOFError) as error:
                raise CheckpointError(f"{printable(key)}: '{path}' is damaged: {error}; {FIX}") from None
            self._runs[place.file] = begin, run
            if sum(len(data) for _, data in self._runs.values()) > _SMALL:
                self._runs = {place.file: (begin, run)}
        return run[place.begin - begin : place.begin - begin + place.length]

    def _end_of_run(self, place: ByteRange) -> int:
        """Return the end of the contiguous run of values from this one."""
        spans = self._order[place.file]
        end = place.begin + place.length
        for number in range(bisect_left(spans, (place.begin, place.length)) + 1, len(spans)):
            begin, length = spans[number]
            if begin != end or end + length - place.begin > _RUN:
                break
            end += length
        return end


def whole_number(value: Any) -> int | None:
    """Return a count of steps; ``None`` for an invalid one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if number and 0 <= value < 1 << 62 and int(value) == value else None
