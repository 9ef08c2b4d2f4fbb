"""Position of a custom loop in its data, to be saved in a checkpoint and resumed from.

A loop calls ``session.steps(loader)`` once for each pass over its data. What a pass yields depends on the generators as
they were when it began, so these are remembered; a resume puts them back, lets the sampler draw again, drops what was
consumed without loading it, and then puts the generators where they were when the checkpoint was made. How a pass began
and ended travels with the message that each step begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.distributed.same_batches import checksum
from shardwise.errors import DataError, UserError
from shardwise.train.data.data_sharding import dealer_of
from shardwise.train.data.windows import rank_batches
from shardwise.train.rng import random_states, restore_random_states

_OWN = "loader"  # the state of a generator that was given to the loader


@dataclass(frozen=True)
class DataPosition:
    """Position in the data.

    The current pass (from 1), its micro batches consumed by all ranks, and
    the number of ranks.
    """

    passes: int
    batches: int
    ranks: int


@dataclass
class Stream:
    """Passes of one session on this rank.

    ``share`` is its part of the micro batches (index, number of parts);
    ``window`` of them are a step.
    """

    ranks: Ranks
    device: torch.device
    share: tuple[int, int]
    window: int = 1
    passes: int = 0
    batches: int = 0
    at_start: dict[str, torch.Tensor] = field(default_factory=dict)
    watch: StreamRecorder = field(init=False)
    dealer: str = ""  # name of the object in the loader that was taken to shard by rank
    _resume: tuple[DataPosition, dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None

    def __post_init__(self) -> None:
        self.watch = StreamRecorder(self.ranks, self.window)

    def place(self) -> DataPosition:
        """Return the loop's position; between two steps."""
        return DataPosition(self.passes, self.batches, self.share[1])

    def go_on(self, place: DataPosition, at_start: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
        """Resume at ``place``: the next pass skips everything before it.

        ``at_start`` and ``now`` are this rank's generators when that pass began and when the checkpoint was made; empty
        if the checkpoint has none for this rank.

        Raises:
            UserError: a pass has begun already.
        """
        if self.passes:
            raise UserError("session.load comes before the first session.steps(loader); move it up")
        self._resume = (place, at_start, now)
        if now:
            restore_random_states(now, self.device)

    def open(self, loader: Iterable[Any], sharded: bool | None = None) -> Iterable[Any]:
        """Return this rank's micro batches of a pass.

        None if the pass was finished before the resume.

        ``sharded`` states whether the loader shards its samples by itself; ``None`` detects it.

        Raises:
            UserError: the loader shards its samples by itself, and the number of ranks has changed.
        """
        self.passes += 1
        self.batches = 0
        if self._resume is None:
            return self._pass(loader, 0, {}, {}, sharded)
        place, at_start, now = self._resume
        if self.passes < place.passes:
            return ()
        self._resume = None
        self.batches = place.batches
        dealer = dealer_of(loader, sharded)
        if dealer is not None and place.ranks != self.share[1]:
            raise UserError(
                f"the checkpoint is of {place.ranks} data-parallel ranks and this run has {self.share[1]}: a loader "
                f"with a {dealer.name} cannot resume there; remove it; session.steps shards the samples"
            )
        return self._pass(loader, place.batches, at_start, now, sharded)

    def _pass(
        self,
        loader: Iterable[Any],
        skip: int,
        at_start: dict[str, torch.Tensor],
        now: dict[str, torch.Tensor],
        sharded: bool | None,
    ) -> Iterator[Any]:
        generators = _generators(loader)
        dealer = dealer_of(loader, sharded)
        self.dealer = "" if dealer is None else dealer.name
        if at_start:
            restore_random_states(at_start, self.device)
            for number, generator in enumerate(generators):
                if f"{_OWN}{number}" in at_start:
                    generator.set_state(at_start[f"{_OWN}{number}"])
        self.at_start = random_states(self.device)
        self.at_start |= {f"{_OWN}{number}": g.get_state() for number, g in enumerate(generators)}

        def skipped() -> None:
            if now:
                restore_random_states(now, self.device)

        def opened() -> Iterable[Any]:
            return rank_batches(
                loader,
                self.ranks,
                skip=skip,
                skipped=skipped,
                share=self.share,
                sharded=sharded,
                see=self.watch.see,
            )

        yield from self.watch.guard(opened, loader)


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that were given to a loader and its samplers, each once."""
    if not isinstance(loader, DataLoader):
        return []
    holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


@dataclass
class StreamRecorder:
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
