"""Detect a dataset or a custom sampler that is sharded by rank, by comparing first items."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree
from torch.utils.data import Subset

from shardwise.distributed.process_group import Ranks, gather_ints, gather_text
from shardwise.errors import DataError
from shardwise.train.data.alike import SyncedRngState
from shardwise.train.data.data_sharding import draws_known
from shardwise.train.data.items import from_text, to_text

HEAD = 64  # items that are compared
_FEW = 16  # tensors beside each other in a dataset
_COVERS = 0.9  # of the dataset: a sampler that draws more of it than that on one rank leaves nothing to others


def compared(inner: Iterable[Any], dataset: Any, ranks: Ranks) -> Iterator[Any]:
    """Yield the items of ``inner`` on rank 0, and nothing elsewhere. Collective at once.

    The dataset must be the same on all ranks, as far as can be seen without loading from it. If the sampler is not
    PyTorch's, all ranks draw the first items with rank 0's random state. If the items still differ, either each rank
    shuffles with its own random state (the items of two ranks overlap, or each covers the full dataset), or it shards.

    Raises:
        DataError: dataset or sampler seem to shard by rank, which none of their attributes declares.
    """
    total, drawn = length_of(dataset), _Drawn()
    if not draws_known(inner):
        drawn = _Drawn.of(inner, ranks)
    full = int(total > 0 and _samples(inner, drawn.head) >= _COVERS * total)
    row = [total, mark_of(dataset, total), zlib.crc32(drawn.text.encode()), full, int(drawn.failure is not None)]
    rows = gather_ints(row, ranks)
    odd = next((rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2]), None)
    if odd is not None:
        sizes = f"{total} samples" if rows[odd][0] == rows[0][0] else f"{rows[0][0]} and {rows[odd][0]} samples"
        raise DataError(
            f"the loader's dataset ({type(dataset).__name__}, {sizes}) differs between rank {odd} and rank 0: "
            "give all ranks the full dataset, session.steps shards it; or, if each rank has its own shard on "
            "purpose, call session.steps(loader, sharded=True)"
        )
    known = [rank for rank, row in enumerate(rows) if not row[4]]
    if len({rows[rank][2] for rank in known}) > 1 and not all(rows[rank][3] for rank in known):
        _refuse_dealing(gather_text(drawn.text, ranks), known, inner)
    if not ranks.is_main:
        return iter(())
    if drawn.failure is not None:
        return Raising(drawn.failure)
    return itertools.chain(drawn.head, iter(inner) if drawn.rest is None else drawn.rest)


@dataclass
class _Drawn:
    """First items of a sampler on this rank; ``failure`` is its exception."""

    head: list[Any] = field(default_factory=list)
    text: str = ""
    rest: Iterator[Any] | None = None
    failure: Exception | None = None

    @classmethod
    def of(cls, inner: Iterable[Any], ranks: Ranks) -> _Drawn:
        found, rng_state = cls(), SyncedRngState(ranks)
        try:
            with nullcontext() if ranks.is_main else rng_state:
                found.rest = iter(inner)
                found.head = list(itertools.islice(found.rest, HEAD))
            found.text = to_text(found.head)
        except Exception as error:  # only rank 0's draws are used, and it raises when they are sent
            found.failure = error
        return found


def length_of(dataset: Any) -> int:
    """Return the number of samples; 0 if unknown."""
    try:
        return len(dataset)
    except Exception:  # not every dataset has a length, and not every length is valid
        return 0


@dataclass
class Raising(Iterator[Any]):
    """Iterator that raises ``failure`` when the first item is requested."""

    failure: Exception

    def __next__(self) -> Any:
        raise self.failure


def mark_of(dataset: Any, length: int) -> int:
    """Hash both ends of a map-style dataset's data, read from its attributes; nothing is loaded."""
    mark = 0
    attributes = getattr(dataset, "__dict__", {})
    for name in ("_data", "_indices"):  # tables of Hugging Face's
        table: Any = attributes.get(name)
        if hasattr(table, "fast_slice") and length:
            mark = zlib.crc32(repr(table.fast_slice(0, 1).to_pydict()).encode(), mark)
    if isinstance(dataset, Subset):
        inner = dataset.dataset
        mark = zlib.crc32(str(mark_of(inner, length_of(inner))).encode(), mark)
    for value in [dataset, *attributes.values()]:
        for one in [value, *(value if isinstance(value, list | tuple) and len(value) <= _FEW else ())]:
            if (
                length
                and isinstance(one, list | tuple | range | np.ndarray | torch.Tensor)
                and length_of(one) == length
            ):
                with suppress(Exception):  # of a kind that cannot be hashed
                    mark = zlib.crc32(to_text([one[0], one[length - 1]]).encode(), mark)
    return mark


def _samples(inner: Iterable[Any], head: list[Any]) -> float:
    """Estimate the number of samples that a full pass draws."""
    each = len(_pytree.tree_leaves(head)) / len(head) if head else 1.0
    return length_of(inner) * each


def _refuse_dealing(texts: list[str], known: list[int], inner: Iterable[Any]) -> None:
    sets = {rank: {repr(leaf) for leaf in _pytree.tree_leaves(from_text(texts[rank]))} for rank in known}
    for one, other in itertools.combinations(known, 2):
        if sets[one] and sets[other] and texts[one] != texts[other] and not sets[one] & sets[other]:
            first = " and ".join(f"{from_text(texts[rank])[0]} on rank {rank}" for rank in (one, other))
            raise DataError(
                f"the loader's {type(inner).__name__} draws different samples on each rank (first {first}): if it "
                "shards them by rank, call session.steps(loader, sharded=True); if it shuffles, give it the same seed "
                "on all ranks, or call session.steps(loader, sharded=False)"
            )
