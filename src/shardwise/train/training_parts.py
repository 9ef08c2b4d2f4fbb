"""`TrainingParts`: what the training options of a config add to a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.train.average import WeightAverage
from shardwise.train.loss import token_loss_sum
from shardwise.train.noise import EmbeddingNoise
from shardwise.train.training_options import TrainingOptions

Watcher = Callable[[Any, torch.Tensor, torch.Tensor], None]


class TrainingLoss:
    """`token_loss_sum` with the terms of a config; ``watcher`` gets the outputs, the labels and the loss."""

    def __init__(self, options: TrainingOptions) -> None:
        self._terms = {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss}
        self.watcher: Watcher | None = None

    def __call__(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Sum the loss of a micro batch."""
        loss = token_loss_sum(outputs, labels, **self._terms)
        if self.watcher is not None:
            self.watcher(outputs, labels, loss)
        return loss


@dataclass(frozen=True)
class TrainingParts:
    """Parts of a run: learning ``rate`` by step, ``loss`` to train on, ``noise`` and ``average`` on this rank."""

    rate: Callable[[int], float]
    loss: TrainingLoss
    noise: EmbeddingNoise | None = None
    average: WeightAverage | None = None
