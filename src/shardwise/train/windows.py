"""From a loader to windows: the micro batches of one optimizer step on this rank.

Whatever the loader is, micro batch ``b`` of the stream goes to rank ``b mod dp``, so that no sample is seen twice and
a window over all ranks is the next ``dp × accumulation`` batches of the stream.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from shardwise.errors import DataError
from shardwise.parallel.group import Ranks, broadcast_text

CHUNK = 64  # items of a rank that are told at once

Share = tuple[int, int]  # which part of the micro batches, from 0, and of how many


class RankBatches(Sampler[Any]):
    """Every ``dp``-th item of a sampler (a batch, or a sample where there are no batches), as rank 0 draws them.

    The first ``skip`` items are drawn and dropped; then ``skipped`` is called, before anything is loaded.
    """

    def __init__(
        self,
        inner: Iterable[Any],
        ranks: Ranks,
        share: Share | None = None,
        skip: int = 0,
        skipped: Callable[[], None] | None = None,
    ) -> None:
        self.inner = inner
        self.ranks = ranks
        self.share = share or (ranks.rank, ranks.world_size)
        self.skip = skip
        self.skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        size = CHUNK * self.share[1]  # so that every rank has had as many when the next chunk is due
        source = _dropped(iter(self.inner), self.skip) if self.ranks.is_main else None
        if self.skipped is not None:
            self.skipped()
        if source is not None and self.ranks.world_size == 1:
            yield from source
            return
        while True:
            drawn = [] if source is None else list(itertools.islice(source, size))
            chunk = json.loads(broadcast_text(json.dumps(drawn, default=int), self.ranks))
            yield from chunk[self.share[0] :: self.share[1]]
            if len(chunk) < size:
                return


def rank_batches(
    loader: Iterable[Any],
    ranks: Ranks,
    skip: int = 0,
    skipped: Callable[[], None] | None = None,
    share: Share | None = None,
) -> Iterable[Any]:
    """This rank's share of ``loader``: ``share``, which ranks that work on the same samples have in common, or by rank.

    A ``DataLoader`` over a map-style dataset is rebuilt to load only this rank's batches. One with a
    ``DistributedSampler`` is taken as it is. Of anything else every rank reads the whole stream and keeps its share.
    The first ``skip`` micro batches (of all ranks together) are left out, from a map-style dataset without loading
    them; then ``skipped`` is called. Without any to skip it is not.
    """
    share = share or (ranks.rank, ranks.world_size)
    loads_by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if has_own_shares(loader):
        _check_sampler(loader, share)
        return _after(loader, skip // share[1], skipped)
    if loads_by_index and (skip or ranks.world_size > 1):
        return _rebuilt(loader, ranks, share, skip, skipped if skip else None)  # type: ignore[arg-type]
    rest = _after(loader, skip, skipped)
    return rest if share[1] == 1 else itertools.islice(iter(rest), share[0], None, share[1])


def has_own_shares(loader: Iterable[Any]) -> bool:
    """Whether a loader deals its samples out to the ranks by itself."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return isinstance(loader, DataLoader) and any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _check_sampler(loader: Iterable[Any], share: Share) -> None:
    """A sampler that deals by rank must deal by data-parallel rank.

    Raises:
        DataError: it does not.
    """
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) != share:
            raise DataError(
                f"the loader's DistributedSampler deals for rank {sampler.rank} of {sampler.num_replicas}, but this "
                f"rank takes part {share[0]} of {share[1]} of the data; leave the sampler out, session.steps deals the "
                "samples out"
            )


def _after(stream: Iterable[Any], skip: int, skipped: Callable[[], None] | None) -> Iterable[Any]:
    """What is left of a stream when ``skip`` items are dropped; the stream itself where none are."""
    if not skip:
        return stream
    rest = _dropped(iter(stream), skip)
    if skipped is not None:
        skipped()
    return rest


def _dropped(source: Iterator[Any], skip: int) -> Iterator[Any]:
    for _ in itertools.islice(source, skip):
        pass
    return source


def _rebuilt(
    loader: DataLoader[Any], ranks: Ranks, share: Share, skip: int, skipped: Callable[[], None] | None
) -> DataLoader[Any]:
    options: dict[str, Any] = {}
    if loader.num_workers:
        options = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    if loader.batch_sampler is not None:
        options["batch_sampler"] = RankBatches(loader.batch_sampler, ranks, share, skip, skipped)
    else:  # batch_size=None: the dataset's items are batches already
        options |= {"batch_size": None, "sampler": RankBatches(loader.sampler, ranks, share, skip, skipped)}
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
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
