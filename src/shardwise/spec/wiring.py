"""How a model's forward goes through its blocks: what comes before, what after, and what passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec


@dataclass(frozen=True)
class Wiring:
    """Facts of one forward under fake tensors."""


def read_wiring(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> Wiring:
    """Run ``module`` once under fake tensors and note how it goes through its blocks. Nothing is changed.

    Raises:
        ModelError: the model cannot be cut between its blocks; everything that is in the way.
    """
    raise NotImplementedError
