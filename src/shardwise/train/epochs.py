"""Epochs of a custom loop: which are left after a resume, and how many steps each has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from shardwise.distributed.process_group import gather_ints
from shardwise.errors import UserError
from shardwise.train.data.position import batches_of, steps_of
from shardwise.train.data.windows import PassWindows
from shardwise.train.session_interface import TrainingSession


def unfinished_epochs(session: TrainingSession, count: int, first: int) -> Iterator[int]:
    """Yield the numbers of the epochs that no loaded checkpoint has finished; ``first`` passes are before them."""
    stream = session.stream
    left = range(max(0, stream.finished - first), count)
    if count and not left and session.ranks.is_main:
        logging.getLogger("shardwise").warning(
            f"session.epochs({count}): the checkpoint has finished all of them, so nothing is left to train; "
            "give more epochs to train further, or another folder to begin anew"
        )
    try:
        for epoch in left:
            stream.begin_epoch(first + epoch, count - 1 - epoch)
            yield epoch
            if session.stopped:
                return
    finally:
        stream.epoch = None


def count_steps(session: TrainingSession, loader: Iterable[Any], sharded: bool | None) -> int:
    """Return the steps of a pass over ``loader``.

    Raises:
        UserError: it has no length.
    """
    dp = session.plan.dims.dp
    steps = steps_of(batches_of(loader, dp, sharded), dp, session.plan.grad_accum)
    if steps is None:
        raise UserError(
            f"session.steps_per_epoch: the loader ({type(loader).__name__}) has no length; count the steps of an epoch "
            "yourself, and give session.steps(loader, limit=...) the number"
        )
    return steps


def pass_ended(session: TrainingSession, windows: PassWindows | None) -> bool:
    """Return whether no step is left of the current pass. Collective inside of an epoch, whose next window it loads.

    A save after the last step thus marks the epoch finished, although the loop has not asked for another step yet.
    """
    stream = session.stream
    if windows is None or stream.epoch is None or stream.ended:
        return stream.ended
    here = windows.at_end() and not stream.watch.failed
    return all(row[0] for row in gather_ints([int(here)], session.ranks))
