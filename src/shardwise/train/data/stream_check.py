"""Compare passes over the data between ranks in each step's first message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.distributed.same_batches import checksum
from shardwise.errors import DataError


@dataclass
class StreamWatch:
    """State of one session on this rank.

    A stream that each rank reads in full must be equal on all.

    A loader that raises on one rank stops all of them: the others would wait for it.
    """

    ranks: Ranks
    window: int = 1  # micro batches of a step
    size: int = 3
    _first: int = 0
    _length: int = 0
    _failure: Exception | None = None
    _kind: str = ""

    def see(self, stream: Iterable[Any]) -> Iterator[Any]:
        """Pass on a full stream, recording its first item and its length."""
        number = 0
        for number, item in enumerate(stream, start=1):
            if number == 1:
                self._first = checksum([item]) or 1
            yield item
        self._length = number + 1  # 0: not yet at its end

    def guard(self, opened: Callable[[], Iterable[Any]], loader: Iterable[Any]) -> Iterator[Any]:
        """Pass on this rank's batches; record the failure and end if the loader raises."""
        self._first = self._length = 0
        self._kind = type(loader).__name__
        iterator: Iterator[Any] = iter(())
        pulled = 0
        try:
            iterator = iter(opened())
            for pulled, batch in enumerate(iterator, start=1):  # noqa: B007
                yield batch
        except Exception as error:  # sent to all ranks with the next message
            self._failure = error
            for _ in range(-(pulled + 1) % self.window):  # the others continue to the end of this window
                with suppress(Exception):
                    next(iterator)

    def post(self) -> list[int]:
        """Return the first item's checksum (once), the finished pass's length, and the failure flag."""
        row = [self._first, self._length, int(self._failure is not None)]
        self._first = 0
        return row

    def deliver(self, rows: list[list[int]]) -> None:
        """Stop all ranks if one cannot continue, or if they read different streams.

        Raises:
            DataError: on all ranks; a rank whose loader raised raises that error instead.
        """
        failed = [rank for rank, row in enumerate(rows) if row[2]]
        if failed:
            self._stop(failed)
        first, length = ([row[at] for row in rows] for at in (0, 1))
        odd = next((rank for rank, one in enumerate(first) if one != first[0]), None)
        if odd is not None:
            raise DataError(
                f"the loader ({self._kind}) gives ranks 0 and {odd} different batches: if each rank's loader already "
                "yields its own shard, call session.steps(loader, sharded=True); if not, make it shuffle, mask and "
                "augment equally on all ranks (one seed for its own generators): session.steps shards the batches"
            )
        odd = next((rank for rank, one in enumerate(length) if one != length[0]), None)
        if all(length) and odd is not None:
            raise DataError(
                f"the loader ({self._kind}) has {length[0] - 1} batches on rank 0 and {length[odd] - 1} on rank {odd}, "
                "but began alike: give all ranks the same data, or each its own share with "
                "session.steps(loader, sharded=True)"
            )

    def _stop(self, failed: list[int]) -> None:
        error, self._failure = self._failure, None
        texts = gather_text("" if error is None else f"{type(error).__name__}: {error}", self.ranks)
        if error is not None:
            raise error
        more = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise DataError(f"the loader ({self._kind}) failed on rank {failed[0]}{more}: {texts[failed[0]]}")
