"""Receipt line on weights in bf16: how many of them a step left as they were."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwise.measure.state import local
from shardwise.receipts.receipt import Line
from shardwise.train.session import Session
from shardwise.train.step import Step

TOO_SMALL = "updates too small for bf16"
_BECOME = {"nearest": "lost", "kahan": "kept for a later step", "stochastic": "kept in the mean"}
_SAMPLED = 256  # elements of a rank's part of a parameter


class RoundingLines:
    """Share of sampled weights with a gradient that a step did not change, because it was too small for bf16."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, torch.Tensor]] = []

    def start(self, session: Session, step: Step) -> None:
        """Keep some elements of each trained parameter."""
        trained = (p for p in session.module.parameters() if p.requires_grad)
        self._before = [(p, _sample(p).clone()) for p in trained]

    def stop(self) -> None:
        """Do nothing; the samples stay."""

    def lines(self, session: Session, step: Step) -> Iterator[Line]:
        """Yield the line, which nothing can judge."""
        kept = sampled = 0
        for parameter, before in self._before:
            if parameter.grad is not None:
                moves = _sample(parameter.grad) != 0
                kept += int(((_sample(parameter) == before) & moves).sum())
                sampled += int(moves.sum())
        self._before = []
        share = f"{kept / sampled:.0%} of {sampled} sampled weights" if sampled else "no gradient was seen"
        yield Line(name=TOO_SMALL, planned=_BECOME[session.plan.rounding], found=share, ok=None)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).reshape(-1)[:_SAMPLED]
