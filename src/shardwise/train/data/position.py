"""Position of a custom loop in its data, to be saved in a checkpoint and resumed from.

A loop calls ``session.steps(loader)`` once for each pass over its data. What a pass yields depends on the generators as
they were when it began, so these are remembered; a resume puts them back, lets the sampler draw again, drops what was
consumed without loading it, and then puts the generators where they were when the checkpoint was made. How a pass began
and ended travels with the message that each step begins with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.distributed.control_message import Table
from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.distributed.same_batches import checksum
from shardwise.errors import DataError, UserError
from shardwise.train.data.data_sharding import dealer_of
from shardwise.train.data.windows import rank_batches
from shardwise.train.rng import random_states, restore_random_states

_OWN = "loader"  # the state of a generator that was given to the loader
_EPOCH = "_shardwise_epoch"  # of a sampler: the epoch that was set here last


@dataclass(frozen=True)
class DataPosition:
    """Position in the data.

    The current pass (from 1), its micro batches consumed by all ranks, the number of ranks, the pass's steps, and
    whether it has ended.
    """

    passes: int
    batches: int
    ranks: int
    steps: int = 0
    ended: bool = False


@dataclass
class Stream:
    """Passes of one session on this rank.

    ``share`` is its part of the micro batches (index, number of parts); ``window`` of them are a step. ``steps`` and
    ``batches`` count what the current pass has given, ``batches_expected`` are those of the whole pass, if known.
    ``epoch`` is set inside of `Session.epochs`: an epoch is one pass there, and ``epochs_left`` come after it.
    """

    ranks: Ranks
    device: torch.device
    share: tuple[int, int]
    window: int = 1
    passes: int = 0
    batches: int = 0
    steps: int = 0
    ended: bool = False
    batches_expected: int | None = None
    limited: bool = False
    epoch: int | None = None
    epochs_left: int = 0
    finished: int = 0
    at_start: dict[str, torch.Tensor] = field(default_factory=dict)
    watch: StreamRecorder = field(init=False)
    dealer: str = ""  # name of the object in the loader that was taken to shard by rank
    _resume: tuple[DataPosition, dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None
    _reserved: int = 0
    _generators: list[torch.Generator] = field(default_factory=list)
    _reported: bool = False

    def __post_init__(self) -> None:
        self.watch = StreamRecorder(self.ranks, self.window)

    @property
    def steps_expected(self) -> int | None:
        """Steps of the whole pass, if known."""
        return steps_of(self.batches_expected, self.share[1], self.window)

    def steps_left(self, epoch: int) -> int:
        """Return the steps of this and the later epochs, of which each full one has ``epoch``."""
        rest = steps_of((self.batches_expected or 0) - self.batches, self.share[1], self.window)
        return (rest or 0) + self.epochs_left * epoch

    def place(self) -> DataPosition:
        """Return the loop's position; between two steps."""
        return DataPosition(self.passes, self.batches, self.share[1], self.steps, self.ended)

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
        self.finished = place.passes if place.ended else place.passes - 1
        if now:
            restore_random_states(now, self.device)

    def open(self, loader: Iterable[Any], sharded: bool | None = None) -> Iterable[Any]:
        """Return this rank's micro batches of a pass.

        None if the pass was finished before the resume.

        ``sharded`` states whether the loader shards its samples by itself; ``None`` detects it.

        Raises:
            UserError: the loader shards its samples by itself, and the number of ranks has changed.
        """
        if self.epoch is not None and self.passes > self.epoch:
            raise UserError(
                "session.steps was called twice in one epoch of session.epochs, where an epoch is one pass over one "
                "loader; join the loaders into one, or count the epochs with `for epoch in range(n)`"
            )
        self.passes += 1
        self.batches = self.steps = 0
        self.ended = False
        self.batches_expected = batches_of(loader, self.share[1], sharded)
        if self._resume is None:
            return self._pass(loader, 0, {}, {}, sharded)
        place, at_start, now = self._resume
        if self.passes <= self.finished:
            self._report_finished()
        if self.passes < place.passes:
            return ()
        self._resume = None
        if self.passes > place.passes:  # session.epochs has left out the finished ones
            return self._pass(loader, 0, now, {}, sharded)
        self.batches, self.steps = place.batches, place.steps
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
        generators = self._generators = _generators(loader)
        self._set_epoch(loader)
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

    def reserve(self, count: int) -> int:
        """Return the number of passes before the first of ``count`` epochs."""
        first = max(self._reserved, self.passes)
        self._reserved = first + count
        return first

    def begin_epoch(self, number: int, left: int) -> None:
        """Make the next pass that of an epoch: ``number`` passes are before it, ``left`` epochs after it."""
        self.passes = self.epoch = number
        self.epochs_left = left

    def generator_states(self) -> dict[str, torch.Tensor]:
        """Return the states of the current loader's own generators."""
        return {f"{_OWN}{number}": generator.get_state() for number, generator in enumerate(self._generators)}

    def _report_finished(self) -> None:
        if self.ranks.is_main and not self._reported:
            logging.getLogger("shardwise").warning(
                f"pass {self.passes} over the data was finished before the checkpoint and yields no steps; write "
                "`for epoch in session.epochs(n)` to leave finished epochs out"
            )
        self._reported = True

    def _set_epoch(self, loader: Iterable[Any]) -> None:
        """Call ``set_epoch`` of a sampler that shuffles by it, as DistributedSampler, unless the loop does so itself.

        A loop that does has changed ``epoch`` since the last pass.
        """
        for sampler in {id(one): one for one in _holders(loader)[1:]}.values():
            epoch = getattr(sampler, "epoch", None)
            known = type(epoch) is int and callable(getattr(sampler, "set_epoch", None))
            if known and epoch == getattr(sampler, _EPOCH, 0):
                sampler.set_epoch(self.passes - 1)
                setattr(sampler, _EPOCH, self.passes - 1)


def batches_of(loader: Iterable[Any], dp: int, sharded: bool | None = None) -> int | None:
    """Return the micro batches of a pass over ``loader``, of all ``dp`` ranks; ``None`` if it has no length."""
    try:
        batches = len(loader)  # type: ignore[arg-type]
    except Exception:  # a length of the user's own
        return None
    return batches * (1 if dealer_of(loader, sharded) is None else dp)


def steps_of(batches: int | None, dp: int, window: int) -> int | None:
    """Return the steps of a pass with ``batches`` micro batches, ``dp`` × ``window`` of them in each."""
    return None if batches is None else math.ceil(math.ceil(batches / dp) / window)


def _holders(loader: Iterable[Any]) -> list[Any]:
    """Return a PyTorch loader and its samplers."""
    if not isinstance(loader, DataLoader):
        return []
    return [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that were given to a loader and its samplers, each once."""
    found = [getattr(holder, "generator", None) for holder in _holders(loader)]
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

    @property
    def failed(self) -> bool:
        """Whether the loader has raised on this rank, which the others do not know yet."""
        return self._failure is not None

    def post(self) -> list[int]:
        """Return the first item's checksum (once), the finished pass's length, and the failure flag."""
        row = [self._first, self._length, int(self._failure is not None)]
        self._first = 0
        return row

    def deliver(self, rows: Table) -> None:
        """Stop all ranks if one cannot continue, or if they read different streams.

        Raises:
            DataError: on all ranks; a rank whose loader raised raises that error instead.
        """
        if rows[:, 2].any():
            self._stop(rows[:, 2].nonzero()[0].tolist())
        first, length = rows[:, 0], rows[:, 1]
        if (first != first[0]).any():
            odd = int((first != first[0]).argmax())
            raise DataError(
                f"the loader ({self._kind}) gives ranks 0 and {odd} different batches: if each rank's loader already "
                "yields its own shard, call session.steps(loader, sharded=True); if not, make it shuffle, mask and "
                "augment equally on all ranks (one seed for its own generators): session.steps shards the batches"
            )
        if length.all() and (length != length[0]).any():
            odd = int((length != length[0]).argmax())
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
