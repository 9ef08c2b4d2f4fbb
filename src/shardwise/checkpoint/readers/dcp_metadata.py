"""Read the ``.metadata`` of a PyTorch DCP folder: the location of each tensor's boxes.

No code in it is run.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.readers.inert import InertRecord
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.restricted import load_restricted, printable
from shardwise.checkpoint.storage.local_storage import Folder, read_small
from shardwise.errors import CheckpointError

METADATA = ".metadata"
LARGEST = 1 << 30  # its size in bytes
FIX = "copy the complete folder again, or take an earlier checkpoint"
_OF_RANK = re.compile(r"__\d+\.metadata")  # written by ranks that save without communication
_PLAIN_LAYOUT = "torch.strided"

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ByteRange:
    """The bytes ``begin .. begin + length`` of ``file``."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """Tensor with its boxes, which cover it exactly once; none for one without elements."""

    info: TensorInfo
    chunks: tuple[tuple[Box, ByteRange], ...]


@dataclass
class Contents:
    """All entries by flat key: tensors, other values, and the path of each in the saved dict."""

    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    values: dict[str, ByteRange] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def read_contents(folder: Folder) -> Contents:
    """Read ``.metadata``, or one ``__N.metadata`` per rank where ranks saved independently.

    Raises:
        CheckpointError: it is missing, damaged or asks for code; a file it names is not there; the boxes of a tensor
            leave holes or overlap; the bytes were transformed (compressed).
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    files = [METADATA] if METADATA in names else sorted(filter(_OF_RANK.fullmatch, names))
    if not files:
        raise CheckpointError(
            f"'{folder}' has no {METADATA}: it is not a DCP folder, or the save was interrupted, as that file is "
            "written last; take an earlier checkpoint"
        )
    found = Contents()
    chunks: dict[str, dict[Box, ByteRange]] = {}
    for file in files:
        where = str(folder / file)
        try:
            data = read_small(folder / file, LARGEST)
        except OSError as error:
            raise CheckpointError(f"'{where}' cannot be read: {error.strerror or error}; {FIX}") from None
        try:
            _take(load_restricted(data, where), found, chunks)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            what = printable(f"{type(error).__name__}: {error}")
            raise CheckpointError(f"'{where}' is damaged, or of an unknown form ({what}); {FIX}") from None
    _check(folder, found, names)
    return found


def _take(metadata: Any, found: Contents, chunks: dict[str, dict[Box, ByteRange]]) -> None:
    """Add one metadata file to ``found``; ``chunks`` are the boxes so far, by key."""
    state = _state(metadata, "Metadata")
    places: dict[tuple[str, tuple[int, ...] | None], ByteRange] = {}
    for index, info in _mapping(state["storage_data"]).items():
        fields = _state(index, "MetadataIndex")
        offset = fields.get("offset")
        places[_text(fields["fqn"]), None if offset is None else _sizes(offset)] = _place(_state(info, "_StorageInfo"))
    for key, entry in _mapping(state["state_dict_metadata"]).items():
        if _kind(entry) == "BytesStorageMetadata":
            found.values.setdefault(_text(key), places[key, None])
            continue
        fields = _state(entry, "TensorStorageMetadata")
        info = TensorInfo(_dtype(fields["properties"], key), _sizes(fields["size"]))
        boxes = chunks.setdefault(_text(key), {})
        for chunk in fields["chunks"]:
            message = _state(chunk, "ChunkStorageMetadata")
            box = Box(_sizes(message["offsets"]), _sizes(message["sizes"]))
            if box.numel:
                boxes.setdefault(box, places[key, box.offsets])
        known = found.tensors.get(key)
        if known is not None and known.info != info:
            raise ValueError(f"ranks do not agree about the shape or dtype of {key}")
        found.tensors[key] = DcpTensor(info, tuple(boxes.items()))
    planned = state.get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    for key in (*found.tensors, *found.values):
        found.paths.setdefault(key, _path(paths[key]) if key in paths else (key,))


def _check(folder: Folder, found: Contents, names: set[str]) -> None:
    """Reject incomplete contents."""
    missing: dict[str, str] = {}
    problems: list[str] = []
    for key, item in found.tensors.items():
        for box, place in item.chunks:
            if place.file not in names:
                missing.setdefault(place.file, key)
            if box.numel * item.info.dtype.itemsize > place.length:
                problems.append(f"{key}: {place.length} bytes in '{place.file}' are too few for {list(box.lengths)}")
        problem = cover_problem(item.info.shape, [box for box, _ in item.chunks])
        if problem:
            problems.append(f"{key}: {problem}")
    for key, place in found.values.items():
        if place.file not in names:
            missing.setdefault(place.file, key)
    if missing:
        lines = [f"'{printable(file)}' (part of {printable(key)})" for file, key in sorted(missing.items())]
        raise CheckpointError(f"'{folder}': files are missing: {short_list(lines)}; {FIX}")
    if problems:
        raise CheckpointError(f"'{folder / METADATA}' is damaged: {short_list(list(map(printable, problems)))}; {FIX}")


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return why ``boxes`` do not cover a tensor exactly once; empty where they do.

    No box is empty.
    """
    full = math.prod(shape)
    for box in boxes:
        if not len(box.offsets) == len(box.lengths) == len(shape):
            return f"a piece has {len(box.lengths)} dimensions, the tensor {len(shape)}"
        if any(begin + length > size for begin, length, size in zip(box.offsets, box.lengths, shape, strict=True)):
            return f"the piece at {list(box.offsets)} of {list(box.lengths)} reaches outside of {list(shape)}"
    pair = _overlapping(boxes) if len(boxes) > 1 else None
    if pair is not None:
        return f"the pieces at {list(pair[0].offsets)} and {list(pair[1].offsets)} overlap"
    num_elements = sum(box.numel for box in boxes)
    return f"the pieces contain {num_elements} of {full} elements" if num_elements != full else ""


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of both boxes, ``None`` where there is none."""
    begins = tuple(map(max, a.offsets, b.offsets))
    ends = (min(p + n, q + m) for p, n, q, m in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True))
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(begins, lengths) if all(length > 0 for length in lengths) else None


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Find two overlapping boxes.

    One sweep along the dimension with the most boundaries.
    """
    dims = range(len(boxes[0].offsets))
    if not dims:
        return boxes[0], boxes[1]
    along = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}))
    active: list[tuple[int, int]] = []  # ends, with the number of the box
    for number in sorted(range(len(boxes)), key=lambda n: boxes[n].offsets[along]):
        box = boxes[number]
        del active[: bisect_right(active, (box.offsets[along], len(boxes)))]
        for _, other in active:
            if overlap(box, boxes[other]) is not None:
                return boxes[other], box
        insort(active, (box.offsets[along] + box.lengths[along], number))
    return None


def _place(fields: Mapping[str, Any]) -> ByteRange:
    name = _text(fields["relative_path"])
    if name != PurePosixPath(name).name or name in ("", ".", ".."):
        raise ValueError(f"'{name}' is not a plain file name")
    transforms = fields.get("transform_descriptors")
    if transforms:
        raise CheckpointError(
            printable(f"'{name}' was written through the transform {transforms}, which this version does not read")
            + "; load it with the program that wrote it and save it again without extensions"
        )
    begin, length = _sizes((fields["offset"], fields["length"]))
    return ByteRange(name, begin, length)


def _dtype(properties: Any, key: str) -> torch.dtype:
    """Read the dtype of a `TensorProperties`, a tuple (dtype, layout, …) or an old version's dict."""
    state = properties.state
    dtype, layout = (state["dtype"], state.get("layout")) if isinstance(state, dict) else state[:2]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of {key} is {dtype!r:.40}")
    name = layout.args[0] if isinstance(layout, InertRecord) and layout.args else str(layout or _PLAIN_LAYOUT)
    if name != _PLAIN_LAYOUT:
        raise CheckpointError(
            f"{printable(f'{key} is stored as {name}')}, which this version does not read; save it dense"
        )
    return dtype


def _kind(value: Any) -> str:
    """Return ``Metadata`` for a record of that class, whatever its module."""
    return value.name.rsplit(".", 1)[-1] if isinstance(value, InertRecord) else type(value).__name__


def _state(value: Any, kind: str) -> Mapping[str, Any]:
    """Return the attributes of a record of class ``kind``."""
    if _kind(value) != kind or not isinstance(value.state, dict):
        raise TypeError(f"a {_kind(value)} where a {kind} belongs")
    return value.state


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a {_kind(value)} where a dict belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {_kind(value)} where text belongs")
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, tuple | list) or not value or not all(isinstance(part, str | int) for part in value):
        raise TypeError(f"{value!r:.40} is not a path in a state dict")
    return tuple(value)


def _sizes(value: Any) -> tuple[int, ...]:
    """Read a tuple of non-negative numbers, or a ``torch.Size``."""
    if isinstance(value, InertRecord):
        value = value.args[0] if value.args else ()
    parts: Iterable[Any] = value if isinstance(value, tuple | list | torch.Size) else (None,)
    sizes = tuple(parts)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise TypeError(f"{value!r:.40} where sizes belong")
    return sizes
