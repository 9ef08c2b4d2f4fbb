"""Check that ranks that must work on the same samples received the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree

from shardwise.distributed.places import first_in_group
from shardwise.errors import DataError
from shardwise.plan.plan import Plan


def checksum(batches: Sequence[Any]) -> int:
    """Hash all tensors, arrays, numbers and texts in ``batches`` to 32 bits, unchanged."""
    found = 0
    for leaf in _pytree.tree_leaves(list(batches)):
        if isinstance(leaf, Mapping):  # a mapping that is not a dict
            found = zlib.crc32(str(checksum([dict(leaf)])).encode(), found)
        elif isinstance(leaf, int | float | str | bytes):
            found = zlib.crc32(repr(leaf).encode(), found)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            found = zlib.crc32(np.ascontiguousarray(leaf).data, zlib.crc32(repr(leaf.shape).encode(), found))
        elif isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            content = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            found = zlib.crc32(content, zlib.crc32(repr(tuple(leaf.shape)).encode(), found))
    return found


def check_same_batches(sums: npt.ArrayLike, plan: Plan) -> None:
    """Compare the `checksum` of ranks with the same data-parallel index.

    ``sums`` is in rank order.

    Stages, tensor- and context-parallel ranks with different samples would silently compute a wrong gradient.

    Raises:
        DataError: any two differ.
    """
    first, found = first_in_group(plan.dims, "dp"), np.asarray(sums)
    if (odd := found != found[first]).any():
        rank = int(odd.argmax())
        raise DataError(
            f"ranks {first[rank]} and {rank} must see the same samples under {plan.strategy}, and received different "
            "ones. Use the same DataLoader on every rank (same data, order, masks and augmentation: its own "
            "generator with the same seed); session.steps shards the batches"
        )
