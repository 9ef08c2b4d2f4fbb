"""`Candidate` and `Pins`: a plan with its costs, and the values that the user has fixed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.time.step_time import StepTime
from shardwise.plan.plan import Plan, Precision, Recompute, not_runnable
from shardwise.plan.strategy import Strategy


class Pins(BaseModel):
    """Values fixed by the user; ``None`` is free.

    A pinned value is evaluated as given, even if it does not fit. ``options`` are fields of `Plan` for its axes (
    ``sequence_parallel``, ``pipeline_schedule``, …). ``whole_model`` leaves out ``+tp``, ``+pp`` and ``+cp``, which a
    custom loop has to be written for.
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
    whole_model: bool = False


class Candidate(BaseModel):
    """Plan with predicted costs; ``reason`` explains with numbers why it is not recommended.

    ``fits`` is ``None`` where the device's memory or the candidate's is not known. ``tie``: its time is not
    distinguishable from the recommended plan's. ``unrun``: what of the plan is not run with this model.
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
    unrun: tuple[str, ...] = ()

    @property
    def runnable(self) -> bool:
        """Return True where this version runs the plan."""
        return not self.why_not_runnable

    @property
    def other_run(self) -> bool:
        """Return True where this version runs the plan, or would with its own objective."""
        return not (*not_runnable(self.plan.model_copy(update={"objective": "lm"})), *self.unrun)

    @property
    def why_not_runnable(self) -> str:
        """What this version plans but does not run; empty if it runs the plan."""
        return ", ".join((*not_runnable(self.plan), *self.unrun))


class SearchResult(BaseModel):
    """All candidates, best first; ``recommended`` is an index, ``None`` where nothing fits.

    ``optimizer`` is the one that they are planned with, where nothing fits with the one that was asked for.
    ``other_trainings`` are cheaper, and train something else or otherwise.
    """

    model_config = ConfigDict(frozen=True)

    candidates: tuple[Candidate, ...]
    recommended: int | None
    considered: int
    advice: tuple[str, ...] = ()
    optimizer: str | None = None
    other_trainings: tuple[str, ...] = ()
