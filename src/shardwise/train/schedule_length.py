"""Compare the length of a learning-rate scheduler with the steps that a custom loop will take.

An epoch has fewer steps on more ranks, so a scheduler built from ``len(loader)`` ends too early or too late, silently.
"""

from __future__ import annotations

import functools
import gc
import logging
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from shardwise.train.session_interface import TrainingSession
from shardwise.train.step import Step

_COMPARED = 3  # step before which the scheduler has moved twice, if it is stepped with the optimizer
_SURE = 10  # batches of an epoch from which a multiple of them is hardly by chance


class ScheduleRecorder:
    """Observer that reports, once, a scheduler whose length is not that of the loop."""

    def __init__(self) -> None:
        self._seen = 0
        self._found: list[tuple[lr_scheduler.LRScheduler, int]] = []

    def on_prepared(self, session: TrainingSession) -> None:
        """Do nothing."""

    def on_step_start(self, session: TrainingSession, step: Step) -> None:
        """Find schedulers before the first step, and compare those that have moved with each step since."""
        self._seen += 1
        if self._seen > _COMPARED or not session.ranks.is_main:
            return
        if self._seen == 1:
            self._found = [(found, found.last_epoch) for found in schedulers_of(session.optimizer)]
        elif self._seen == _COMPARED:
            for scheduler, first in self._found:
                length = length_of(scheduler)
                if length is not None and scheduler.last_epoch == first + self._seen - 1:
                    _compare(session, scheduler, length)
            self._found = []

    def on_gradients(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: TrainingSession, step: Step) -> None:
        """Do not count a step that is not taken."""
        self._seen -= 1


def schedulers_of(optimizer: Optimizer) -> list[lr_scheduler.LRScheduler]:
    """Return the outermost schedulers on an optimizer, which does not know them."""
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return []
    holders = gc.get_referrers(optimizer)
    found = [one for one in holders if isinstance(one, lr_scheduler.LRScheduler)]
    if not found:  # an object may be found by its dictionary
        found = [one for one in gc.get_referrers(*holders) if isinstance(one, lr_scheduler.LRScheduler)]
    inner = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if one.optimizer is optimizer and id(one) not in inner]


def length_of(scheduler: Any) -> int | None:
    """Return the number of steps after which a scheduler has ended; ``None`` if it has no such number."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = length_of(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return max((length for one in scheduler._schedulers if (length := length_of(one))), default=None)
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # transformers' schedules
        function = scheduler.lr_lambdas[0]
        given = function.keywords.get("num_training_steps") if isinstance(function, functools.partial) else None
        return given if isinstance(given, int) else None
    for kind, name in (("CosineAnnealingLR", "T_max"), ("OneCycleLR", "total_steps"), ("PolynomialLR", "total_iters")):
        if type(scheduler) is getattr(lr_scheduler, kind):
            return int(getattr(scheduler, name))
    return None


def _compare(session: TrainingSession, scheduler: lr_scheduler.LRScheduler, length: int) -> None:
    stream, plan = session.stream, session.plan
    whole, epoch, name = stream.batches_expected, stream.steps_expected, type(scheduler).__name__
    if not whole or not epoch or stream.limited:
        return
    ranks = _number(plan.dims.dp, "data-parallel rank")
    batches = f"{ranks}, {_number(plan.grad_accum, 'micro batch', 'es')} a step"
    fix = "build it with session.steps_per_epoch(loader)"
    if stream.epoch is not None:
        left, steps = length - scheduler.last_epoch, stream.steps_left(epoch)
        if abs(left - steps) > max(1, steps // 100):
            _report(
                f"{name} has {left} steps left, but the loop {steps}: an epoch has {epoch} steps here ({batches}); "
                f"{fix}"
            )
        return
    if whole >= _SURE and whole != epoch and length % whole == 0 and length % epoch:
        _report(
            f"{name} has {length} steps, a multiple of the loader's {whole} batches, but an epoch has {epoch} steps "
            f"here ({batches}); {fix}"
        )


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def _report(text: str) -> None:
    logging.getLogger("shardwise").warning(text)
