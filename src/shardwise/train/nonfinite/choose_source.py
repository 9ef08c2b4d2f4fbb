"""Choose the source of a number that is not finite from what each rank has recorded. No collective here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from shardwise.plan.plan import Plan
from shardwise.train.nonfinite.nonfinite_error import NonFiniteSource
from shardwise.train.nonfinite.nonfinite_hooks import ORDER, NonFiniteEvent


class Column(BaseModel):
    """Column of a rank's data that is not finite in a micro batch."""

    model_config = ConfigDict(frozen=True)

    micro: int
    name: str
    value: str
    rows: tuple[int, ...] | None
    batch_rows: int | None


class ReplayFacts(BaseModel):
    """Facts of one rank's replay, as it sends them to the others.

    ``weights`` are parameters that were not finite before the step, ``gradients`` those whose gradient is not after it,
    with their values; ``norms`` the gradients' norms where all are finite. ``finite_losses`` are by micro batch.
    """

    model_config = ConfigDict(frozen=True)

    events: tuple[NonFiniteEvent, ...] = ()
    columns: tuple[Column, ...] = ()
    weights: dict[str, str] = {}
    gradients: dict[str, str] = {}
    largest: tuple[str, float] | None = None
    finite_losses: dict[int, bool] = {}
    failure: str = ""


@dataclass(frozen=True)
class _Seen:
    rank: int
    event: NonFiniteEvent

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """First micro batch, then phase; a forward goes up the stages, a backward down."""
        event, phase = self.event, ORDER.index(self.event.kind)
        up = event.stage if event.kind != "backward" else -event.stage
        backward = int(event.kind == "backward")
        return event.micro, backward, up, event.order if not backward else phase, self.rank


def choose(facts: Sequence[ReplayFacts], plan: Plan, step: int, micro_batches: int, *, scaled: bool) -> NonFiniteSource:
    """Return the source that explains the first number that was not finite on any rank.

    ``scaled`` says that a gradient scaler makes the backward overflow at times.
    """
    seen = sorted(_unhealthy(facts, plan, scaled=scaled), key=lambda one: one.order)
    weights = {name: value for one in facts for name, value in one.weights.items()}
    if not seen:
        return _without_event(facts, weights, step)
    first = seen[0]
    event = first.event
    usual = _usual_columns(facts, plan, scaled=scaled)
    columns = (one for one in facts[first.rank].columns if one.micro == event.micro)
    column = next((one for one in columns if (one.name, one.value) not in usual), None)
    outputs = (one.event for one in seen if one.event.kind != "input" and one.event.operation is None)
    module = next(outputs, event).module
    spoilt = [name for name in weights if _owns(event.module or module, name)]
    if spoilt and event.kind != "loss":
        source = _placed("weight", first, facts, micro_batches, step)
        holders = tuple(rank for rank, one in enumerate(facts) if set(spoilt) & set(one.weights))
        found = {"parameters": tuple(spoilt), "value": weights[spoilt[0]], "rank": holders[0], "ranks": holders}
        return source.model_copy(update=found)
    if column is not None:
        source = _placed("data", first, facts, micro_batches, step)
        return source.model_copy(
            update={"module": module, "column": column.name, "value": column.value, "rows": column.rows}
        )
    if event.kind in ("forward", "input"):
        return _placed("overflow" if event.overflow else "forward", first, facts, micro_batches, step)
    return _placed("loss" if event.kind == "loss" else "backward", first, facts, micro_batches, step)


def _unhealthy(facts: Sequence[ReplayFacts], plan: Plan, *, scaled: bool) -> Iterator[_Seen]:
    """Yield events, without those that a micro batch with a finite loss and gradient shows at the same place.

    A softmax over a fully masked row, which nothing reads, is not finite in every healthy step.
    """
    replicas = [plan.dims.place(rank).dp for rank in range(len(facts))]
    finite = _finite(facts, replicas, scaled=scaled)
    normal = {
        (event.kind, event.module, event.operation)
        for replica, one in zip(replicas, facts, strict=True)
        for event in one.events
        if finite.get((replica, event.micro), False)
    }
    for rank, one in enumerate(facts):
        for event in one.events:
            if event.kind == "backward" and scaled:
                continue
            if (event.kind, event.module, event.operation) not in normal:
                yield _Seen(rank, event)


def _finite(facts: Sequence[ReplayFacts], replicas: Sequence[int], *, scaled: bool) -> dict[tuple[int, int], bool]:
    """Return which micro batches of which replicas had a finite loss and gradient."""
    finite: dict[tuple[int, int], bool] = {}
    for replica, one in zip(replicas, facts, strict=True):
        for micro, good in one.finite_losses.items():
            finite[replica, micro] = finite.get((replica, micro), True) and good
        for event in one.events if not scaled else ():
            if event.kind == "backward":
                finite[replica, event.micro] = False
    return finite


def _usual_columns(facts: Sequence[ReplayFacts], plan: Plan, *, scaled: bool) -> set[tuple[str, str]]:
    """Return name and value of columns that a micro batch with a finite loss and gradient has as well."""
    replicas = [plan.dims.place(rank).dp for rank in range(len(facts))]
    finite = _finite(facts, replicas, scaled=scaled)
    return {
        (column.name, column.value)
        for replica, one in zip(replicas, facts, strict=True)
        for column in one.columns
        if finite.get((replica, column.micro), False)
    }


def _placed(reason: str, first: _Seen, facts: Sequence[ReplayFacts], micro_batches: int, step: int) -> NonFiniteSource:
    event = first.event
    same = [rank for rank, one in enumerate(facts) if any(_same(event, other) for other in one.events)]
    values: Mapping[str, object] = event.model_dump(
        include={"module", "operation", "rows", "batch_rows", "value", "dtype", "largest", "largest_input"}
    )
    return NonFiniteSource.model_validate(
        {
            **values,
            "reason": reason,
            "step": step,
            "rank": first.rank,
            "ranks": same,
            "stage": event.stage if any(other.stage for one in facts for other in one.events) else None,
            "micro_batch": event.micro,
            "micro_batches": micro_batches,
        }
    )


def _same(one: NonFiniteEvent, other: NonFiniteEvent) -> bool:
    return (one.kind, one.module, one.operation, one.micro) == (other.kind, other.module, other.operation, other.micro)


def _without_event(facts: Sequence[ReplayFacts], weights: Mapping[str, str], step: int) -> NonFiniteSource:
    """Return what the gradients and weights show where the replay had finite numbers everywhere."""
    failures = [one.failure for one in facts if one.failure]
    if weights:
        name = next(iter(weights))
        ranks = tuple(rank for rank, one in enumerate(facts) if name in one.weights)
        return NonFiniteSource(
            reason="weight", step=step, parameters=tuple(weights), value=weights[name], rank=ranks[0], ranks=ranks
        )
    if failures:
        return NonFiniteSource(reason="not replayed", step=step, note=failures[0])
    bad = {name: value for one in facts for name, value in one.gradients.items()}
    if bad:
        ranks = tuple(rank for rank, one in enumerate(facts) if one.gradients)
        value = next(iter(bad.values()))
        return NonFiniteSource(
            reason="reduction", step=step, parameters=tuple(bad), value=value, rank=ranks[0], ranks=ranks
        )
    return NonFiniteSource(reason="not reproduced", step=step)


def _owns(module: str, parameter: str) -> bool:
    """Return whether a parameter belongs to a module or to one inside of it."""
    return not module or parameter.startswith(f"{module}.") or parameter == module
