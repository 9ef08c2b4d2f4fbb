"""safetensors files, one tensor at a time: write with a hash, read slices, fill the local part of a tensor."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open

from shardwise.checkpoint.format import CODES, DTYPES, Shard, TensorEntry, short_list
from shardwise.checkpoint.layout import Box, box_of, local_of
from shardwise.errors import CheckpointError, ShardwiseError

_CHUNK = 1 << 24


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write a safetensors file, fsynced, and return the hash of each tensor's bytes.

    Tensors go to the CPU one at a time; none is copied where it is contiguous and there already.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
        CheckpointError: a dtype has no safetensors code.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned without holes
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": code_of(tensor), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    hashes = {}
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            hashes[name] = _write(file, tensors[name])
        sync(file)
    return hashes


def code_of(tensor: torch.Tensor) -> str:
    """The safetensors code of the dtype (``F32``).

    Raises:
        CheckpointError: safetensors has none.
    """
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{tensor.dtype} cannot be stored as safetensors")
    return CODES[tensor.dtype]


def sync(file: BinaryIO) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ShardReader:
    """Reads slices out of the safetensors files of ``folder``, each opened once and mapped, not read.

    ``error`` is raised with the file and ``fix`` where a file is missing or damaged. A context manager.
    """

    def __init__(self, folder: Path, fix: str, error: type[ShardwiseError] = CheckpointError) -> None:
        self.folder = folder
        self.fix = fix
        self.error = error
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def keys(self, file: str) -> list[str]:
        """Names of the tensors in ``file``."""
        return list(self._handle(file).keys())

    def shape(self, file: str, key: str) -> tuple[int, ...]:
        """Shape of ``key`` in ``file``."""
        try:
            return tuple(self._handle(file).get_slice(key).get_shape())
        except (SafetensorError, OSError) as problem:
            raise self._damaged(file, str(problem)) from None

    def read(self, shard: Shard, box: Box) -> torch.Tensor:
        """A part of a shard, on the CPU; ``box`` counts from the shard's own start.

        Raises:
            ShardwiseError: the file is missing, damaged, or holds another shape than the shard says.
        """
        shape = self.shape(shard.file, shard.key)
        if shape != shard.lengths:
            raise self._damaged(shard.file, f"{shard.key} is {shape}, not {shard.lengths}")
        handle = self._handle(shard.file)
        try:
            if not shape:
                return handle.get_tensor(shard.key)
            return handle.get_slice(shard.key)[_slices(box)]
        except (SafetensorError, OSError) as problem:
            raise self._damaged(shard.file, str(problem)) from None

    def check(self, shards: Iterable[Shard]) -> None:
        """Read every byte of ``shards`` and compare the hashes.

        Raises:
            ShardwiseError: a file is missing, or bytes are not those that were written; at most ten are named.
        """
        wrong = []
        headers: dict[str, tuple[int, dict[str, Any]]] = {}
        for shard in shards:
            self._handle(shard.file)
            with (self.folder / shard.file).open("rb") as file:
                if shard.file not in headers:
                    size = int.from_bytes(file.read(8), "little")
                    headers[shard.file] = (8 + size, json.loads(file.read(size)))
                base, header = headers[shard.file]
                begin, end = header[shard.key]["data_offsets"] if shard.key in header else (0, 0)
                if _hash_range(file, base + begin, end - begin) != shard.hash:
                    wrong.append(f"{shard.key} in '{self.folder / shard.file}'")
        if wrong:
            raise self.error(f"bytes that are not those that were saved: {short_list(wrong)}; {self.fix}")

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise self.error(f"'{path}' is missing; {self.fix}")
            try:
                self._open[file] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as problem:
                raise self._damaged(file, str(problem)) from None
        return self._open[file]

    def _damaged(self, file: str, why: str) -> ShardwiseError:
        return self.error(f"'{self.folder / file}' is damaged: {why}; {self.fix}")


def touched(tensor: torch.Tensor, shards: Sequence[Shard]) -> list[tuple[Shard, Box]]:
    """The shards that hold something of the local part of ``tensor``, each with the overlap in global elements."""
    here = box_of(tensor)
    found = []
    for shard in shards:
        lows = [max(a, b) for a, b in zip(here.offsets, shard.offsets, strict=True)]
        ends = zip(here.offsets, here.lengths, shard.offsets, shard.lengths, strict=True)
        lengths = [min(a + n, b + m) - low for (a, n, b, m), low in zip(ends, lows, strict=True)]
        if all(length > 0 for length in lengths):
            found.append((shard, Box(tuple(lows), tuple(lengths))))
    return found


def fill(tensor: torch.Tensor, shards: Sequence[Shard], reader: ShardReader) -> None:
    """Fill the local part of ``tensor`` (plain or DTensor) in place, cast to its dtype, reading only what overlaps.

    Raises:
        ShardwiseError: a file is missing or damaged, or the shards do not cover the local part.
    """
    here, local = box_of(tensor), local_of(tensor)
    filled = 0
    with torch.no_grad():
        for shard, overlap in touched(tensor, shards):
            source = reader.read(shard, _shift(overlap, shard.offsets))
            local[_slices(_shift(overlap, here.offsets))].copy_(source)
            filled += overlap.numel
    if filled != here.numel:
        raise reader.error(f"shards hold {filled} of the {here.numel} elements needed here; {reader.fix}")


def entry_dtype(entry: TensorEntry) -> torch.dtype:
    """The torch dtype of an entry."""
    return DTYPES[entry.dtype]


def _shift(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(tuple(a - b for a, b in zip(box.offsets, origin, strict=True)), box.lengths)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(box.offsets, box.lengths, strict=True))


def _write(file: BinaryIO, tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(raw), _CHUNK):
        chunk = raw[start : start + _CHUNK]
        digest.update(chunk)
        file.write(chunk)
    return digest.hexdigest()


def _hash_range(file: BinaryIO, begin: int, length: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    file.seek(begin)
    while length > 0 and (chunk := file.read(min(_CHUNK, length))):
        digest.update(chunk)
        length -= len(chunk)
    return digest.hexdigest()
