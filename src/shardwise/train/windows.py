"""From a loader to windows: the micro batches of one optimizer step on this rank.

Whatever the loader is, micro batch ``b`` of the stream goes to rank ``b mod dp``, so that no sample is seen twice and
a window over all ranks is the next ``dp × accumulation`` batches of the stream.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from shardwise.errors import DataError
from shardwise.parallel.group import Ranks, broadcast_text

CHUNK = 64  # items of a rank that are told at once


class RankBatches(Sampler[Any]):
    """Every ``dp``-th item of a sampler (a batch, or a sample where there are no batches), as rank 0 draws them."""

    def __init__(self, inner: Iterable[Any], ranks: Ranks) -> None:
        self.inner = inner
        self.ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        size = CHUNK * self.ranks.world_size  # so that every rank has had as many when the next chunk is due
        source = iter(self.inner) if self.ranks.is_main else None
        while True:
            drawn = [] if source is None else list(itertools.islice(source, size))
            chunk = json.loads(broadcast_text(json.dumps(drawn, default=int), self.ranks))
            yield from chunk[self.ranks.rank :: self.ranks.world_size]
            if len(chunk) < size:
                return


def rank_batches(loader: Iterable[Any], ranks: Ranks) -> Iterable[Any]:
    """This rank's share of ``loader``.

    A ``DataLoader`` over a map-style dataset is rebuilt to load only this rank's batches. One with a
    ``DistributedSampler`` is taken as it is. Of anything else every rank reads the whole stream and keeps its share.
    """
    if ranks.world_size == 1:
        return loader
    if isinstance(loader, DataLoader):
        if isinstance(loader.sampler, DistributedSampler):
            return loader
        if isinstance(loader.batch_sampler, BatchSampler) and isinstance(
            loader.batch_sampler.sampler, DistributedSampler
        ):
            return loader
        if not isinstance(loader.dataset, IterableDataset):
            return _rebuilt(loader, ranks)
    return itertools.islice(iter(loader), ranks.rank, None, ranks.world_size)


def _rebuilt(loader: DataLoader[Any], ranks: Ranks) -> DataLoader[Any]:
    options: dict[str, Any] = {}
    if loader.num_workers:
        options = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    if loader.batch_sampler is not None:
        options["batch_sampler"] = RankBatches(loader.batch_sampler, ranks)
    else:  # batch_size=None: the dataset's items are batches already
        options |= {"batch_size": None, "sampler": RankBatches(loader.sampler, ranks)}
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **options,
    )


def windows(batches: Iterable[Any], grad_accum: int) -> Iterator[list[Any]]:
    """Cut a rank's batches into windows of ``grad_accum``; the last one may be shorter."""
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, grad_accum)):
        yield window


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and labels of a batch: a pair, or a mapping with ``labels``.

    Raises:
        DataError: it is neither.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    keys = f" with keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise DataError(
        f"the loader gave a {type(batch).__name__}{keys}; a batch is a pair (inputs, labels) or a dict with 'labels'"
    )
