"""Shard a loader over the ranks: by its indices, by batch, or not if it is sharded already.

A sampler or a stream that knows its rank gives each rank its own part already; sharded a second time, most of the
data would never be used. They are recognised by their attributes, as the common libraries name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from shardwise.errors import DataError

Share = tuple[int, int]  # index of the part of the micro batches, from 0, and the number of parts

RANK = ("rank", "_rank", "process_index", "dp_rank", "data_parallel_rank")
WORLD = (
    "num_replicas",
    "_num_replicas",
    "world_size",
    "_world_size",
    "num_processes",
    "dp_size",
    "dp_world_size",
    "data_parallel_size",
)
_INSIDE = ("sampler", "batch_sampler", "dataset", "datasets", "pipeline", "loader", "dataloader", "base_dataloader")
_ITERATES = ("__iter__", "__getattribute__", "_get_iterator", "_index_sampler", "_auto_collation")
_LOOKED_AT = 200  # objects of a loader, at most


@dataclass(frozen=True)
class Dealer:
    """Object in a loader that shards by rank: its name, rank and size (``None`` if unknown)."""

    name: str
    share: Share | None


def loads_by_index(loader: Iterable[Any]) -> bool:
    """Return whether a PyTorch loader over a map-style dataset works with fewer indices.

    A subclass with a custom iteration (mixes, masks, moves) is not.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kinds = type(loader).__mro__
    own = any(name in vars(kind) for kind in kinds[: kinds.index(DataLoader)] for name in _ITERATES)
    patched = any(
        getattr(DataLoader, name).__module__ != DataLoader.__module__ for name in ("__iter__", "_get_iterator")
    )
    return not (own or patched or any(name in vars(loader) for name in _ITERATES))


def draws_known(sampler: Any) -> bool:
    """Return whether this is a PyTorch sampler that covers the full dataset on every rank."""
    if type(sampler) is BatchSampler:
        return draws_known(sampler.sampler)
    return type(sampler) in (RandomSampler, SequentialSampler)


def dealer_of(loader: Iterable[Any], sharded: bool | None = None) -> Dealer | None:
    """Find the object that already shards a loader's samples; ``None`` without one.

    ``sharded`` is the user's own statement, if any.
    """
    if sharded is not None:
        return Dealer(type(loader).__name__, None) if sharded else None
    for part in _parts(loader):
        if getattr(part, "__name__", "") == "split_by_node":  # a function in a pipeline of webdataset
            return Dealer("split_by_node", None)
        if isinstance(part, Dataset) and not isinstance(part, IterableDataset):
            continue  # it may know its rank for another reason
        rank, world = _number(part, RANK), _number(part, WORLD)
        if rank is not None and world is not None:
            return Dealer(type(part).__name__, (rank, world))
    return None


def check_dealer(dealer: Dealer, share: Share, ranks: Share, sharded: bool | None) -> None:
    """Check that a loader which shards by rank uses the data-parallel rank.

    Raises:
        DataError: it does not.
    """
    deals = dealer.share or (share if sharded else ranks)
    if deals != share:
        raise DataError(
            f"the loader's {dealer.name} shards for rank {deals[0]} of {deals[1]}, but this rank takes part {share[0]} "
            f"of {share[1]} of the data; remove the sampler; session.steps shards the samples"
        )


def _parts(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader and the samplers, streams and loaders in it, outermost first."""
    queue: list[Any] = [loader]
    seen: set[int] = set()
    while queue and len(seen) < _LOOKED_AT:
        part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if type(part).__module__ == "builtins" or isinstance(part, type):
            continue
        attributes = {**getattr(part, "__dict__", {})}
        config = attributes.pop("_distributed", None)  # of Hugging Face's streams
        queue += [] if config is None else [config]
        for name, value in attributes.items():
            for one in value[:64] if isinstance(value, list | tuple) else [value]:
                known = isinstance(one, Sampler | Dataset | DataLoader)
                if one is not None and (known or name in _INSIDE) and not isinstance(one, int | float | str):
                    queue.append(one)


def _number(part: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(part, name, None)
        except Exception:  # a property of a custom class
            continue
        if type(value) is int:
            return value
    return None
