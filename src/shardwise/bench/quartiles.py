"""Median and quartiles of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Quartiles(BaseModel):
    """Quartiles of rounds, turns or samples."""

    model_config = ConfigDict(frozen=True)

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Compute quartiles of at least one value."""
        low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
        return cls(low=low, median=median, high=high)

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"
