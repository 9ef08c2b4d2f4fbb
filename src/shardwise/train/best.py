"""Best evaluation of a run, and how many were no better since."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.train.evaluate import Evaluation


@dataclass
class Best:
    """Best value of ``metric`` so far and its ``step``; ``worse`` evaluations since then were no better."""

    metric: str
    best_is: Literal["lowest", "highest"] = "lowest"
    value: float | None = None
    step: int | None = None
    worse: int = 0

    def is_better(self, found: Evaluation, step: int) -> bool:
        """Compare an evaluation, and remember it if it is better; one that is not a number never is.

        Raises:
            ConfigError: the metric is not measured.
        """
        value = found.value(self.metric)
        sign = 1 if self.best_is == "lowest" else -1
        if step == self.step:  # evaluated again after a resume
            return False
        if math.isfinite(value) and (self.value is None or sign * value < sign * self.value):
            self.value, self.step, self.worse = value, step, 0
            return True
        self.worse += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "metric": self.metric,
            "best_is": self.best_is,
            "value": self.value,
            "step": self.step,
            "worse": self.worse,
        }

    def restore(self, state: Any) -> None:
        """Go on from a checkpoint; one of another metric, or of the other direction, is no start."""
        if not isinstance(state, dict):
            return
        if (state.get("metric"), state.get("best_is", self.best_is)) == (self.metric, self.best_is):
            self.value, self.step, self.worse = state["value"], state["step"], int(state["worse"])

    def __str__(self) -> str:
        """Return metric, value and step."""
        return f"{self.metric} {self.value:.4f} after step {self.step}" if self.value is not None else self.metric
