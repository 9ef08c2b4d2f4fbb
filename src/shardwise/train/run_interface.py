"""What a training run tells, and to whom: progress, callbacks, its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.train.best import Best
from shardwise.train.data.isolation import Isolation
from shardwise.train.evaluate import Evaluation
from shardwise.train.measure_added_rows import AddedRowsMeasurement
from shardwise.train.session import Session
from shardwise.train.training_parts import TrainingParts


class Reporter(Protocol):
    """Reporter of progress; every call is made on rank 0 only."""

    def log(self, text: str) -> None:
        """Print a line."""

    def begin(self, first: int, total: int) -> None:
        """Start reporting after step ``first`` of ``total``."""

    def step(
        self, number: int, loss: float, per_second: float, noun: str = "tokens", trained_share: float = 1.0
    ) -> None:
        """Report a logged step; ``per_second`` counts ``noun``, of which ``trained_share`` has a loss."""

    def evaluating(self, share: float) -> None:
        """Report the progress of an evaluation."""

    def evaluated(self, number: int, found: Evaluation) -> None:
        """Report a finished evaluation."""

    def end(self) -> None:
        """Stop reporting: there are no more steps."""


@dataclass(frozen=True)
class RunStart:
    """What training begins with.

    ``parts`` are what the config's options add; ``isolation`` is what was measured where documents share samples and
    must not see each other; ``added_rows`` are those of added tokens.
    """

    parts: TrainingParts
    isolation: Isolation | None = None
    added_rows: AddedRowsMeasurement | None = None


class RunCallback(Protocol):
    """Callback during a run, on every rank."""

    def begin(self, session: Session, start: RunStart) -> None:
        """Called before the first step, with the model built and the checkpoint loaded."""

    def log_fields(self) -> dict[str, Any]:
        """Return additional values for a logged line, on rank 0."""

    def wrote(self, line: dict[str, Any]) -> None:
        """Called after a line of metrics was written, on rank 0."""

    def between(self, session: Session) -> None:
        """Called between two steps."""

    def finish(self) -> None:
        """Called after the last step. Collective."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run. ``loss`` is the last step's; ``labels`` are the tokens with a loss."""

    steps: int
    tokens: int
    labels: int
    loss: float
    evaluation: Evaluation | None
    best: Best | None = None


@dataclass(frozen=True)
class StepWindow:
    """Interval between two logged steps; ``seconds`` exclude evaluations and checkpoints."""

    steps: int
    tokens: int
    labels: int
    seconds: float
