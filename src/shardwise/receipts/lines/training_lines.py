"""Receipt lines on training options of ``shardwise train``: schedule, loss terms, noise and average."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.receipts.receipt import Line
from shardwise.train.config import Config
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.train.training_parts import TrainingParts


class TrainingLines:
    """Lines of the options that a config sets, observed in one step: `start` before it, `lines` after its update."""

    def __init__(self, config: Config, parts: TrainingParts) -> None:
        self._config, self._parts = config, parts

    def start(self, session: Session, step: Step) -> None:
        """Begin to observe."""

    def stop(self) -> None:
        """Stop; the records stay."""

    def lines(self, session: Session, step: Step) -> Iterator[Line]:
        """Yield the lines that this rank can check alone."""
        if self._config.optimizer.schedule == "wsd":
            yield self._rate_line(session, step)

    def _rate_line(self, session: Session, step: Step) -> Line:
        base = self._config.optimizer.lr
        groups = session.optimizer.param_groups
        used = {f"{group['lr'] * base / group.get('initial_lr', base):.6g}" for group in groups}
        planned, found = f"{self._parts.rate(step.number):.6g}", ", ".join(sorted(used))
        at = f" at step {step.number}"
        return Line(name="learning rate (wsd)", planned=planned + at, found=found + at, ok=planned == found)
