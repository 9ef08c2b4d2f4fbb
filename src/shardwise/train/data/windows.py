"""Loader to windows: the micro batches of one optimizer step on this rank.

For any loader, micro batch ``b`` of the stream goes to rank ``b mod dp``, so that no sample is used twice and
a window over all ranks is the next ``dp × accumulation`` batches of the stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Sampler

from shardwise.distributed.process_group import Ranks, broadcast_text
from shardwise.errors import DataError
from shardwise.train.data.alike import read_alike
from shardwise.train.data.data_sharding import Share, check_dealer, dealer_of, loads_by_index
from shardwise.train.data.draws import Raising, compared
from shardwise.train.data.items import from_text, to_text

CHUNK = 64  # items of a rank that are sent together
FAILED = "!"  # first character of a message that is not JSON


class RankBatches(Sampler[Any]):
    """Sampler of every ``dp``-th item (batch or sample) of another one, as rank 0 draws them.

    The first ``skip`` items are drawn and dropped; then ``skipped`` is called, before anything is loaded. With
    ``compare`` ranks first check whether the sampler or its dataset shards by rank already.
    """

    def __init__(
        self,
        inner: Iterable[Any],
        ranks: Ranks,
        share: Share | None = None,
        skip: int = 0,
        skipped: Callable[[], None] | None = None,
        *,
        dataset: Any = None,
        compare: bool = False,
    ) -> None:
        self.inner = inner
        self.ranks = ranks
        self.share = share or (ranks.rank, ranks.world_size)
        self.skip = skip
        self.skipped = skipped
        self.dataset = dataset
        self.compare = compare

    def __iter__(self) -> Iterator[Any]:
        size = CHUNK * self.share[1]  # so that every rank has had as many when the next chunk is due
        source = self._source()
        if self.ranks.world_size == 1:
            yield from source
            return
        while True:
            chunk = from_text(self._told(source, size))
            yield from chunk[self.share[0] :: self.share[1]]
            if len(chunk) < size:
                return

    def _source(self) -> Iterator[Any]:
        """Yield rank 0's items, and nothing elsewhere; ranks first compare what they would draw."""
        source: Iterable[Any] = self.inner if self.ranks.is_main else ()
        if self.compare and self.ranks.world_size > 1:
            source = compared(self.inner, self.dataset, self.ranks)
        try:
            return _dropped(iter(source), self.skip)
        except Exception as error:  # the others wait for a message
            return Raising(error)
        finally:
            if self.skipped is not None:
                self.skipped()

    def _told(self, source: Iterator[Any], size: int) -> str:
        """Return the next items as rank 0 sends them; its failure is raised on all ranks."""
        text, failure = "", None
        try:
            text = to_text(list(itertools.islice(source, size))) if self.ranks.is_main else ""
        except Exception as error:  # the others wait for it
            failure, text = error, f"{FAILED}{type(error).__name__}: {error}"
        text = broadcast_text(text, self.ranks)
        if failure is not None:
            raise failure
        if text.startswith(FAILED):
            raise DataError(f"the loader's sampler failed on rank 0: {text.removeprefix(FAILED)}")
        return text


def rank_batches(
    loader: Iterable[Any],
    ranks: Ranks,
    skip: int = 0,
    skipped: Callable[[], None] | None = None,
    share: Share | None = None,
    *,
    sharded: bool | None = None,
    see: Callable[[Iterable[Any]], Iterator[Any]] = iter,
) -> Iterable[Any]:
    """Return this rank's ``share`` of ``loader``, equal for ranks on the same samples.

    PyTorch's own ``DataLoader`` over a map-style dataset is rebuilt to load only this rank's batches. A loader that
    shards by rank itself is used unchanged. Of any other loader every rank reads the full stream and keeps its share;
    ``see`` wraps that stream. The first ``skip`` micro batches (of all ranks together) are skipped, in a map-style
    dataset without loading them; then ``skipped`` is called. With ``skip`` 0 it is not called.
    """
    share = share or (ranks.rank, ranks.world_size)
    dealer = dealer_of(loader, sharded)
    if dealer is not None:
        check_dealer(dealer, share, (ranks.rank, ranks.world_size), sharded)
        return _after(loader, skip // share[1], skipped)
    if loads_by_index(loader) and (skip or ranks.world_size > 1):
        return _rebuilt(loader, ranks, share, skip, skipped if skip else None, sharded)  # type: ignore[arg-type]
    if ranks.world_size == 1:
        return _after(loader, skip, skipped)
    rest = _after(see(read_alike(loader, ranks)), skip, skipped)
    return itertools.islice(iter(rest), share[0], None, share[1])


def _after(stream: Iterable[Any], skip: int, skipped: Callable[[], None] | None) -> Iterable[Any]:
    """Return a stream without its first ``skip`` items; the stream itself if ``skip`` is 0."""
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
    loader: DataLoader[Any],
    ranks: Ranks,
    share: Share,
    skip: int,
    skipped: Callable[[], None] | None,
    sharded: bool | None,
) -> DataLoader[Any]:
    options: dict[str, Any] = {"in_order": loader.in_order}
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    single = loader.batch_sampler is None  # batch_size=None: the dataset's items are batches already
    inner: Any = loader.sampler if single else loader.batch_sampler
    draws = RankBatches(inner, ranks, share, skip, skipped, dataset=loader.dataset, compare=sharded is None)
    options |= {"batch_size": None, "sampler": draws} if single else {"batch_sampler": draws}
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
    """Split a rank's batches into windows of ``grad_accum``; the last one may be shorter."""
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, grad_accum)):
        yield window


class PassWindows:
    """Windows of a pass that are left, at most ``left`` of them; `at_end` loads the next one ahead."""

    def __init__(self, source: Iterable[list[Any]], left: int | None) -> None:
        self._source = iter(source)
        self._ahead: list[list[Any]] = []
        self._left = left

    @property
    def spent(self) -> bool:
        """Whether as many were taken as were asked for."""
        return self._left is not None and self._left <= 0

    def take(self) -> list[Any]:
        """Return the next window; an empty one at the end of the data."""
        self._left = None if self._left is None else self._left - 1
        return self._ahead.pop() if self._ahead else next(self._source, [])

    def at_end(self) -> bool:
        """Return whether no window is left on this rank."""
        if not self.spent and not self._ahead:
            self._ahead.append(next(self._source, []))
        return self.spent or not self._ahead[0]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and labels of a batch: a pair, or a mapping with ``labels``.

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
