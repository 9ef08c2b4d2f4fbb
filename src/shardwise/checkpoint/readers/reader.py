"""Common interface of all checkpoint readers, whichever tool wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import Shard
from shardwise.checkpoint.shard_files import ShardReader, overlaps


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and global shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def full(self) -> Box:
        """Box of the full tensor."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.full.numel * self.dtype.itemsize


@runtime_checkable
class Source(Protocol):
    """Tensors by name, read a part at a time; a context manager."""

    @property
    def kind(self) -> str:
        """Readable name of the format (``PyTorch DCP folder``)."""
        ...

    @property
    def place(self) -> str:
        """Location, as the user wrote it."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name, as in Shardwise's own manifests.

        ``model/<fqn>`` for weights and buffers, ``optimizer/<fqn>/<key>`` (``exp_avg``, ``exp_avg_sq``, ``step``) for
        state stored by name.
        """
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied tensors, each mapped to its name in ``tensors``."""
        ...

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """Class name, groups and scalars as in `OptimizerEntry`, as JSON; ``None`` where unknown."""
        ...

    @property
    def step(self) -> int | None:
        """Optimizer steps done; ``None`` where unknown."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes to report: one sentence for each item that is not among ``tensors``."""
        ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, a contiguous CPU tensor of shape ``box.lengths``.

        Needs memory for the tensor at most. Safe to call from several threads.

        Raises:
            CheckpointError: a file is missing, truncated or damaged; names the file and the tensor.
        """
        ...

    def __enter__(self) -> Self:
        """Return the source itself."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Close the files."""
        ...


def read_pieces(reader: ShardReader, shards: Sequence[Shard], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of ``box`` as a contiguous CPU tensor, from overlapping shards.

    Raises:
        CheckpointError: a file is missing or damaged, or has another dtype.
    """
    parts = overlaps(box, shards)
    for shard, _ in parts:
        reader.stored(shard, dtype)  # before memory is allocated for what only the description claims
    if sum(part.numel for _, part in parts) != box.numel:
        raise reader.error(f"'{reader.folder}': shards do not cover {box} of a tensor; {reader.fix}")
    found = torch.empty(box.lengths, dtype=dtype)
    for shard, part in parts:
        inner = tuple(low - start for low, start in zip(part.offsets, shard.offsets, strict=True))
        place = tuple(
            slice(low - start, low - start + length)
            for low, start, length in zip(part.offsets, box.offsets, part.lengths, strict=True)
        )
        reader.read_into(shard, Box(inner, part.lengths), found[place])
    return found


class WeightsOnly:
    """The members of a `Source` that holds weights alone and nothing open.

    A reader adds ``kind``, ``place``, ``tensors`` and `Source.read`, and sets the others where it has something to say.
    """

    kind: str
    aliases: Mapping[str, str] = MappingProxyType({})
    optimizer: Mapping[str, Any] | None = None
    step: int | None = None
    notes: Sequence[str] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is open."""
