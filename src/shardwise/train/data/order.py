"""Order of samples in the stream: a pure function of the seed and the index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError


class Order:
    """Stream of sample ids: every epoch has each of ``num_samples`` ids once, in its own order.

    The id at a global index depends on ``seed`` and that index only: index ``i`` is place ``i mod num_samples`` of
    epoch ``i // num_samples``. Without ``shuffle`` every epoch is 0, 1, 2, ... The stream ends after ``epochs``
    epochs, if given. The orders of the two epochs used last are kept: 16 bytes per sample.

    Raises:
        DataError: there are no samples.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool, epochs: int | None = None) -> None:
        if num_samples < 1:
            raise DataError(f"{num_samples} samples have no order; give a corpus with at least one sample")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
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
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._recent[epoch] = generator.permutation(self.num_samples)
        return self._recent[epoch]


def rank_ids(
    order: Order, position: int, dp: int, dp_rank: int, micro_batch: int, grad_accum: int
) -> list[NDArray[np.int64]]:
    """Return the ids of one rank for one optimizer step from global index ``position`` on.

    One int64 array [micro_batch] per micro batch. The step takes the next ``micro_batch × dp × grad_accum`` indices;
    sample ``i`` of micro batch ``m`` on rank ``r`` is index ``position + (m × dp + r) × micro_batch + i``, so the
    samples of a step do not depend on how the global batch is split.
    """
    starts = [position + (micro * dp + dp_rank) * micro_batch for micro in range(grad_accum)]
    return [order.ids(start, micro_batch) for start in starts]
