"""Boxes (rectangular shards of tensors), and the check of exact coverage of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: ``offsets[d] .. offsets[d] + lengths[d]`` in each dimension.

    0-d has no dimensions.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside, 1 for a 0-d tensor."""
        return math.prod(self.lengths)


class Placed(Protocol):
    """Location of a shard: its box in the tensor, and its file and key."""

    @property
    def file(self) -> str:
        """File that stores it."""
        ...

    @property
    def key(self) -> str:
        """Its key in the file."""
        ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Its first index in each dimension."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        ...


def coverage_fault(shape: tuple[int, ...], shards: Sequence[Placed]) -> str | None:
    """Return why shards do not cover a tensor exactly once; ``None`` where they do.

    All shards must lie inside the tensor. That their elements add up is not enough: where two overlap, others are
    missing, and what is read there is whatever lay in memory before.
    """
    if not math.prod(shape) or (len(shards) == 1 and shards[0].lengths == shape):
        return None
    full = Box((0,) * len(shape), shape)
    return _fault_in(full, [(Box(shard.offsets, shard.lengths), shard) for shard in shards])


def _fault_in(region: Box, parts: list[tuple[Box, Placed]]) -> str | None:
    """Return the coverage error inside a region, given the shards that intersect it.

    A region is split where shards begin or end until no split is left: then it must be one shard's.

    """
    split = _best_split(region, [box for box, _ in parts])
    if split is None:
        if len(parts) == 1:
            return None
        if parts:
            first, second = (f"'{shard.key}' in {shard.file} at {list(shard.offsets)}" for _, shard in parts[:2])
            return f"shards overlap: {first} and {second}"
        return f"no shard contains the elements from {list(region.offsets)} on, {list(region.lengths)} of them"
    axis, places = split
    if len(places) + 1 == len(parts):  # slices of one dimension, in any order: the usual case, solved by sorting
        ordered = sorted((box.offsets[axis], box.offsets[axis] + box.lengths[axis]) for box, _ in parts)
        begin, end = region.offsets[axis], region.offsets[axis] + region.lengths[axis]
        if ordered == list(zip([begin, *places], [*places, end], strict=True)):
            return None  # if one had another extent elsewhere, the elements would not add up, or others overlap
    middle = places[len(places) // 2]
    for low, high in ((region.offsets[axis], middle), (middle, region.offsets[axis] + region.lengths[axis])):
        inner = [(clipped, shard) for box, shard in parts if (clipped := _clip(box, axis, low, high)) is not None]
        if fault := _fault_in(_replaced(region, axis, low, high), inner):
            return fault
    return None


def _best_split(region: Box, boxes: Sequence[Box]) -> tuple[int, list[int]] | None:
    """Choose the dimension with most box boundaries inside the region, and their positions.

    ``None`` where no dimension has any.
    """
    best: tuple[int, list[int]] | None = None
    for axis, (low, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
        edges = {box.offsets[axis] for box in boxes} | {box.offsets[axis] + box.lengths[axis] for box in boxes}
        inside = sorted(edge for edge in edges if low < edge < low + length)
        if inside and (best is None or len(inside) > len(best[1])):
            best = axis, inside
    return best


def _clip(box: Box, axis: int, low: int, high: int) -> Box | None:
    begin, end = max(box.offsets[axis], low), min(box.offsets[axis] + box.lengths[axis], high)
    return _replaced(box, axis, begin, end) if begin < end else None


def _replaced(box: Box, axis: int, begin: int, end: int) -> Box:
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[axis], lengths[axis] = begin, end - begin
    return Box(tuple(offsets), tuple(lengths))
