"""Order of samples in the stream: a pure function of the seed and the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError


class SampleOrder(Protocol):
    """Ids of samples by global index.

    ``epoch`` is the number of samples in an epoch, ``total`` that in the full stream, if it ends.
    """

    epoch: int
    total: int | None

    def ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the ids at global indices ``start`` to ``start + count - 1``, int64 [count]; -1 after the end."""
        ...


class Order:
    """Stream of sample ids: every epoch has each of ``num_samples`` ids once, in its own order.

    The id at a global index depends on ``seed`` and that index only: index ``i`` is place ``i mod num_samples`` of
    epoch ``i // num_samples``. Without ``shuffle`` every epoch is 0, 1, 2, ... The stream ends after ``epochs``
    epochs, if given. The orders of the two epochs used last are kept: 16 bytes per sample.

    Raises:
        DataError: there are no samples.
    """

    def __init__(
        self, num_samples: int, seed: int, shuffle: bool, epochs: int | None = None, stream: int | None = None
    ) -> None:
        if num_samples < 1:
            raise DataError(f"{num_samples} samples have no order; give a corpus with at least one sample")
        self.num_samples = self.epoch = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._stream = [] if stream is None else [stream]  # orders of several sources under one seed
        self.total: int | None = None if epochs is None else epochs * num_samples  # samples in the full stream
        self._recent: dict[int, NDArray[np.int64]] = {}

    def ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the sample ids at global indices ``start`` to ``start + count - 1``, int64 [count].

        -1 after the end.
        """
        indices = np.arange(start, start + count, dtype=np.int64)
        epochs, places = np.divmod(indices, self.num_samples)
        found = places
        if self.shuffle:
            for epoch in range(start // self.num_samples, -(-(start + count) // self.num_samples)):
                here = epochs == epoch
                found[here] = self._epoch(epoch)[places[here]]
        if self.total is not None:
            found[indices >= self.total] = -1
        return found

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._recent:
            if len(self._recent) == 2:
                del self._recent[next(iter(self._recent))]
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch, *self._stream]))
            self._recent[epoch] = generator.permutation(self.num_samples)
        return self._recent[epoch]


BLOCK = 10_000


class MixtureOrder:
    """Stream of sample ids from several sources with weights; each source has an order, and epochs, of its own.

    Every `BLOCK` global indices hold the same number of samples of each source: its weight's share, to the nearest
    whole one and at least 1, in an order drawn for the block. So a share is off by at most 1 / (2 × BLOCK), and the
    position in each source is a function of the global index. Source ``i`` has the ids from the sum of the sizes
    before it on. An epoch ends when the first source (or, with ``all_exhausted``, each) was seen in full, as with
    ``datasets.interleave_datasets``.

    Raises:
        DataError: a source has no samples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        epochs: int | None = None,
        stop_when: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
    ) -> None:
        self.seed, self.shuffle = seed, shuffle
        self.counts = block_counts(weights)
        self.orders = [Order(size, seed, shuffle, stream=number) for number, size in enumerate(sizes)]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._recent: dict[int, NDArray[np.int64]] = {}
        ends = [self._index_of(number, size - 1) + 1 for number, size in enumerate(sizes)]
        self.epoch = min(ends) if stop_when == "first_exhausted" else max(ends)
        self.total: int | None = None if epochs is None else epochs * self.epoch

    def ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the sample ids at global indices ``start`` to ``start + count - 1``; see `SampleOrder`."""
        indices = np.arange(start, start + count, dtype=np.int64)
        found = np.empty(count, np.int64)
        for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
            here = indices // BLOCK == block
            found[here] = self._block(block)[indices[here] % BLOCK]
        if self.total is not None:
            found[indices >= self.total] = -1
        return found

    def positions(self, start: int) -> list[int]:
        """Return how many samples of each source stand before global index ``start``."""
        block, place = divmod(start, BLOCK)
        before = np.bincount(self._sources(block)[:place], minlength=len(self.counts))
        return [int(block * count + more) for count, more in zip(self.counts, before, strict=True)]

    def _sources(self, block: int) -> NDArray[np.int64]:
        """Return the source of each index of a block."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        if self.shuffle:
            generator = np.random.Generator(np.random.PCG64([self.seed, block, len(self.counts), BLOCK]))
            return generator.permutation(sources)
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        return sources[np.argsort(places, kind="stable")]

    def _block(self, block: int) -> NDArray[np.int64]:
        if block not in self._recent:
            if len(self._recent) == 2:
                del self._recent[next(iter(self._recent))]
            sources, found = self._sources(block), np.empty(BLOCK, np.int64)
            for number, (order, count) in enumerate(zip(self.orders, self.counts, strict=True)):
                found[sources == number] = self._offsets[number] + order.ids(block * count, count)
            self._recent[block] = found
        return self._recent[block]

    def _index_of(self, source: int, place: int) -> int:
        """Return the global index of a source's sample number ``place``."""
        block, within = divmod(place, self.counts[source])
        return block * BLOCK + int(np.flatnonzero(self._sources(block) == source)[within])


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return each source's samples in a block: the largest remainders get what is left, and none gets nothing."""
    shares = np.array(weights, np.float64) / sum(weights) * BLOCK
    counts = np.maximum(np.floor(shares).astype(np.int64), 1)
    for source in np.argsort(counts - shares, kind="stable")[: max(0, BLOCK - counts.sum())]:
        counts[source] += 1
    counts[np.argmax(counts)] -= counts.sum() - BLOCK  # what the smallest got too much
    return [int(count) for count in counts]


def rank_ids(
    order: SampleOrder, position: int, dp: int, dp_rank: int, micro_batch: int, grad_accum: int
) -> list[NDArray[np.int64]]:
    """Return the ids of one rank for one optimizer step from global index ``position`` on.

    One int64 array [micro_batch] per micro batch. The step takes the next ``micro_batch × dp × grad_accum`` indices;
    sample ``i`` of micro batch ``m`` on rank ``r`` is index ``position + (m × dp + r) × micro_batch + i``, so the
    samples of a step do not depend on how the global batch is split.
    """
    starts = [position + (micro * dp + dp_rank) * micro_batch for micro in range(grad_accum)]
    return [order.ids(start, micro_batch) for start in starts]
