"""Read a box of a sharded tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.checkpoint.format import Shard
from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.shard_files import ShardReader, overlaps


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
