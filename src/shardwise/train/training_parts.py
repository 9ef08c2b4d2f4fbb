"""`TrainingParts`: what the training options of a config add to a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingParts:
    """Parts of a run, for its receipt: ``rate`` is the learning rate by step."""

    rate: Callable[[int], float]
