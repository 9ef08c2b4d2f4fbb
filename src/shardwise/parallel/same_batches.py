"""Ranks that work on the same samples must have been given the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

from shardwise.errors import DataError
from shardwise.plan.plan import Plan


def check_same_batches(micros: Sequence[Any], plan: Plan, control: dist.ProcessGroup | None) -> None:
    """Compare the micro batches of ranks that stand at the same data- and context-parallel place. Collective.

    Stages and tensor-parallel ranks that got other samples would give a wrong gradient with no other sign. ``control``
    is a group over all ranks that sends CPU tensors, ``None`` for the default one.

    Raises:
        DataError: on every rank, if any two differ.
    """
    found = 0
    for micro in micros:
        for leaf in _pytree.tree_leaves((micro.inputs, micro.labels)):
            if isinstance(leaf, torch.Tensor):
                content = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
                found = zlib.crc32(content, zlib.crc32(repr(tuple(leaf.shape)).encode(), found))
    mine = torch.tensor([len(micros), found], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
    dist.all_gather(rows, mine, group=control)
    first: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(rows):
        place = plan.dims.place(rank)
        other = first.setdefault((place.dp, place.cp), rank)
        if not torch.equal(row, rows[other]):
            raise DataError(
                f"ranks {other} and {rank} work on the same samples under {plan.strategy}, and the loader gave them "
                "others: give every rank a loader over the same data that shuffles alike (a generator with the same "
                "seed), and leave the dealing out to session.steps"
            )
