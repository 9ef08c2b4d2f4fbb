"""`Candidate` and `Pins`: a plan with its costs, and the parts of the choice that the user has fixed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.time.step_time import StepTime
from shardwise.plan.plan import Plan, Precision, Recompute
from shardwise.plan.strategy import Strategy


class Pins(BaseModel):
    """What the user has fixed. A pinned part is costed as given, fitting or not; ``None`` is free.

    ``options`` are fields of `Plan` that say how its axes are run (``sequence_parallel``, ``pipeline_schedule``, …).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: Strategy | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    options: dict[str, Any] = {}


class Candidate(BaseModel):
    """A plan and what it is predicted to cost. ``reason`` says why it is not the recommended one, with the arithmetic.

    ``fits`` is ``None`` where the device's memory or the candidate's is not known. ``tie`` says that its time is not
    distinguishable from the recommended plan's.
    """

    model_config = ConfigDict(frozen=True)

    plan: Plan
    fits: bool | None
    reason: str
    memory: Estimate
    time: StepTime | None = None
    hours: float | None = None
    cost: float | None = None
    tie: bool = False


class SearchResult(BaseModel):
    """All candidates, best first; ``recommended`` is an index, ``None`` where nothing fits."""

    model_config = ConfigDict(frozen=True)

    candidates: tuple[Candidate, ...]
    recommended: int | None
    considered: int
    advice: tuple[str, ...] = ()
