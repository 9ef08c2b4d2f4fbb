"""`Finding`: one cause of lost time, with its evidence, cost and fix. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal[
    "data-loader",
    "slow-link",
    "communication",
    "small-micro-batch",
    "straggler",
    "throttling",
    "cpu-oversubscription",
    "checkpoint-stall",
    "recompute",
    "needless-sharding",
    "early-sync",
    "pipeline-bubble",
    "loss-at-chance",
    "loss-rises",
    "loss-spike",
    "lost-gradient",
    "healthy",
]
Level = Literal["alarm", "hint", "fine"]


class Finding(BaseModel):
    """Finding: time and money lost to one cause.

    ``seconds`` of a step that the fix would save (``None``: not known), ``share`` of the step, ``money`` US dollars an
    hour of all devices that it wastes (``None``: no price known). ``rank`` is the affected rank, if there is one.
    """

    model_config = ConfigDict(frozen=True)

    kind: Kind
    level: Level
    text: str
    evidence: tuple[str, ...] = ()
    fix: str = ""
    seconds: float | None = None
    share: float | None = None
    money: float | None = None
    rank: int | None = None
