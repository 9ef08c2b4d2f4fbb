"""Coordinates of all ranks on the axes of a plan, computed at once and kept: steps need them of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.environment import rendezvous
from shardwise.errors import UserError
from shardwise.plan.dims import ParallelDims

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """As `MeshCoord`, of all ranks: each is [ranks]."""

    pp: Ints
    dp: Ints
    cp: Ints
    tp: Ints

    def first_like(self, *axes: str) -> Ints:
        """Return for each rank the first rank with its coordinates on ``axes``."""
        if not axes:
            return np.zeros_like(self.pp)
        _, first, inverse = np.unique(
            np.stack([getattr(self, axis) for axis in axes]), axis=1, return_index=True, return_inverse=True
        )
        return first[inverse.reshape(-1)].astype(np.int64)


@lru_cache(maxsize=16)
def places_of(dims: ParallelDims) -> Places:
    """Return the position of every rank."""
    each = [dims.place(rank) for rank in range(dims.world_size)]
    return Places(*np.array([(one.pp, one.dp, one.cp, one.tp) for one in each], dtype=np.int64).T)


@lru_cache(maxsize=16)
def first_in_group(dims: ParallelDims, *axes: str) -> Ints:
    """Return for each rank the first rank with its coordinates on ``axes``."""
    return places_of(dims).first_like(*axes)


@lru_cache(maxsize=16)
def counted_once(dims: ParallelDims) -> tuple[Ints, Ints]:
    """Return ranks that together have each label once, and each sample: the first ranks of those that share them."""
    places = places_of(dims)
    parts = (places.tp == 0) & (places.pp == 0)
    return parts.nonzero()[0], (parts & (places.cp == 0)).nonzero()[0]


def on_one_node(ranks: Sequence[int]) -> bool:
    """Whether ``ranks`` share a node by what the launcher says; where it says nothing, they are taken to."""
    try:
        place = rendezvous()
    except UserError:  # a group that the user's own code made
        place = None
    return place is None or len({rank // place.local_world_size for rank in ranks}) == 1
