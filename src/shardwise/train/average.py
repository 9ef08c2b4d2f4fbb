"""Exponential moving average of the trained weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shardwise.distributed.local_tensor import local_of
from shardwise.parallel.fp8 import agree_on_scales
from shardwise.train.session_interface import TrainingSession
from shardwise.train.step import Step


class WeightAverage:
    """Average that moves to the weights by ``1 - decay`` after each step; an observer of the session.

    It begins as the weights are. ``tensors`` are by the id of the parameter, in its layout: nothing is communicated.
    """

    def __init__(self, decay: float, module: nn.Module) -> None:
        self._move, self._module = get_ema_multi_avg_fn(decay), module
        self.weights = [p for p in module.parameters() if p.requires_grad]
        self.tensors = {id(p): p.detach().clone() for p in self.weights}

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The local parts of each average and of its weight."""
        return [(local_of(self.tensors[id(p)]), local_of(p.detach())) for p in self.weights]

    def restart(self) -> None:
        """Begin again as the weights are."""
        for average, weight in self.pairs:
            average.copy_(weight)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Exchange the weights and their average, for an evaluation."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, weight in self.pairs:
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        agree_on_scales(self._module)

    def on_prepared(self, session: TrainingSession) -> None:
        """Do nothing."""

    def on_step_start(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_gradients(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: TrainingSession, step: Step) -> None:
        """Move the average to the weights."""
        if self.weights:
            averages, weights = zip(*self.pairs, strict=True)
            self._move(averages, weights, step.number)

    def on_step_abandoned(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""
