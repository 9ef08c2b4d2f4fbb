"""Replay this rank's micro batches on a float64 copy: what each loss counts, and the gradient that the window has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.observation.loop_trace import random_modules
from shardwise.observation.micro_batches import CountedLabels, MicroBatch, in_copy, loss_of, on_tensors, row_of, rows_of
from shardwise.observation.plain_copy import Memo

Kind = Literal["mean", "sum", "neither", "assumed"]
Gradient = list[torch.Tensor | None]
LABELS, ROWS, STATED = "labels that cross_entropy counts", "rows", "items"
_ADDITIVE = 1e-5  # relative difference of a loss from those of its rows; many losses are computed in float32
_MOST_ROWS = 64


class LiveModelReached(Exception):
    """The closure calls the model that trains, not the one that it is given."""


@dataclass(frozen=True)
class Closures:
    """The loop's closure as a replay calls it, one that returns the mean over a micro batch's own items, their count.

    ``live`` is what the loop itself calls, where that differs.
    """

    called: Callable[..., Any]
    mean: Callable[..., Any]
    items: Callable[..., Any] | None = None
    live: Callable[..., Any] | None = None


class WindowReplay:
    """Replay of the micro batches that one rank recorded.

    Args:
        live: the model that trains.
        memo: what its parts became: see `plain_copy`.
        closures: the loss.
        batches: recorded micro batches.
    """

    def __init__(self, live: nn.Module, memo: Memo, closures: Closures, batches: Sequence[MicroBatch]) -> None:
        self._live, self._memo, self._closures, self._batches = live, memo, closures, batches
        self._trained: list[nn.Parameter] = [memo[id(p)] for p in live.parameters() if p.requires_grad]
        self.items: list[float] = []
        self.source = ""
        self.loss_error = 0.0

    def kind(self) -> Kind:
        """Return how the losses of micro batches are made of those of their rows; where rows count, of all of them."""
        batches = [one for one in self._batches if 1 < rows_of(one) <= _MOST_ROWS]
        if not batches:
            return "assumed"
        if any(part.training for _, part in random_modules(self._live)):
            return "sum" if self._kind_without_random(batches[0]) == "sum" else "assumed"
        found = self._kind_of(batches[0])
        if self.source != ROWS:
            return found
        return found if all(self._kind_of(batch) == found for batch in batches[1:]) else "neither"

    def _kind_without_random(self, batch: MicroBatch) -> Kind:
        """Return the kind in evaluation mode, where a row's loss does not depend on the others; or ``assumed``."""
        root: nn.Module = self._memo[id(self._live)]
        modes = [(part, part.training) for part in root.modules()]
        root.eval()
        try:
            return self._kind_of(batch)
        except Exception:  # a model that has no loss in evaluation mode
            return "assumed"
        finally:
            for part, training in modes:
                part.training = training

    def _kind_of(self, batch: MicroBatch) -> Kind:
        rows = rows_of(batch)
        with torch.no_grad(), _one_process(self._live):
            parts = [self._mean_loss(batch, row_of(number, rows)) for number in range(rows)]
            full, counted = self._mean_loss(batch)
        parts = [(loss, count) for loss, count in parts if count]
        total, size = sum(count for _, count in parts), abs(float(full))
        if not parts or abs(total - counted) > 1e-6 * max(1.0, counted):
            return "neither"
        mean = sum(float(loss) * count for loss, count in parts) / total
        if abs(mean - float(full)) <= _ADDITIVE * size:
            return "mean"
        return "sum" if abs(sum(float(loss) for loss, _ in parts) - float(full)) <= _ADDITIVE * size else "neither"

    def run(self, kind: Kind) -> Gradient:
        """Return the sum over micro batches of the gradients of their summed losses; fills ``items``."""
        total: Gradient = [None] * len(self._trained)
        self.items = []
        for batch, (gradients, count) in zip(self._batches, self._each(kind), strict=True):
            self.items.append(count)
            self.loss_error = max(self.loss_error, self._error_of(batch))
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    so_far = total[index]
                    total[index] = gradient if so_far is None else so_far.add_(gradient)
        return total

    def contributions(self, kind: Kind, chosen: Sequence[int]) -> list[torch.Tensor]:
        """Return of each micro batch the gradient of its summed loss, for some parameters."""
        made = []
        for gradients, _ in self._each(kind):
            parts = [(gradients[i] if gradients else None, self._trained[i]) for i in chosen]
            made.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in parts]))
        return made

    def _each(self, kind: Kind) -> Iterator[tuple[Gradient, float]]:
        for batch in self._batches:
            with torch.enable_grad(), _one_process(self._live):
                loss, count = self._mean_loss(batch)
                found = torch.autograd.grad(loss, self._trained, allow_unused=True) if count else ()
            factor = 1.0 if kind == "sum" else count
            yield [None if g is None else g.to(torch.float64) * factor for g in found], count

    def _error_of(self, batch: MicroBatch) -> float:
        """Return by how much the loss of the copy differs from the loop's; large where the forward is random."""
        if batch.loss is None:
            return 0.0
        with torch.no_grad(), _one_process(self._live):
            found = float(self._loss(self._closures.called, batch))
        live = float(batch.loss)
        return 0.0 if found != found and live != live else abs(found - live) / max(abs(live), 1e-12)

    def _mean_loss(self, batch: MicroBatch, rows: Callable[[Any], Any] | None = None) -> tuple[torch.Tensor, float]:
        counter = CountedLabels()
        with counter:
            loss = self._loss(self._closures.mean, batch, rows)
        stated = self._stated(batch, rows)
        if stated is not None:
            self.source = STATED
            return loss, stated
        counts = set(counter.counts)
        self.source = LABELS if len(counts) == 1 else ROWS
        return loss, counts.pop() if len(counts) == 1 else float(1 if rows else rows_of(batch))

    def _stated(self, batch: MicroBatch, rows: Callable[[Any], Any] | None) -> float | None:
        """Return what the user's own function counts; ``None`` where there is none, or it does not know."""
        if self._closures.items is None:
            return None
        args, kwargs = on_tensors((batch.args, batch.kwargs), rows or (lambda one: one))
        rest = [one for one in args if id(one) not in self._memo]
        found = self._closures.items(*rest, **{k: one for k, one in kwargs.items() if id(one) not in self._memo})
        return None if found is None else float(found)

    def _loss(
        self, closure: Callable[..., Any], batch: MicroBatch, rows: Callable[[Any], Any] | None = None
    ) -> torch.Tensor:
        given = (batch.args, batch.kwargs) if rows is None else on_tensors((batch.args, batch.kwargs), rows)
        args, kwargs = on_tensors(given, in_copy(self._memo))
        torch.set_rng_state(batch.random)
        with torch.no_grad():
            for live, value in batch.buffers.items():
                if live in self._memo:  # else a forward has put another in its place
                    self._memo[live].copy_(value)
        loss = loss_of(closure(*args, **kwargs))
        if loss is None:
            raise TypeError("compute_loss returned no scalar loss in the replay")
        return loss


@contextmanager
def _one_process(live: nn.Module) -> Iterator[None]:
    """Inside, random numbers are the replay's own, and the live model cannot be called."""

    def refuse(*_: Any) -> None:
        raise LiveModelReached("compute_loss calls the model that trains, not the one in its arguments")

    hook = live.register_forward_pre_hook(refuse, prepend=True)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), _disable_current_modes():
            yield
    finally:
        hook.remove()
        random.setstate(python)
        np.random.set_state(numpy)
