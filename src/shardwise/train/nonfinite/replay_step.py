"""Replay of a step whose loss or gradient is not finite, on all ranks together, with every module watched.

Nothing is kept for it in a healthy step but the state of torch's generators: dropout draws the same numbers again. A
model that draws from other generators, or counts its calls, may not show the number a second time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.distributed.process_group import gather_ints, gather_text
from shardwise.errors import ShardwiseError
from shardwise.model.call_module import call
from shardwise.model.read import clean_name
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.plan import Plan
from shardwise.train.nonfinite.choose_source import Column, ReplayFacts, choose
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError, NonFiniteSource
from shardwise.train.nonfinite.nonfinite_hooks import Recorder
from shardwise.train.nonfinite.tensor_values import batch_of, non_finite, tensors_in
from shardwise.train.session_interface import TrainingSession

_NAMED = 32  # parameters that a rank sends the names of
LossFunction = Callable[[Any, Any], torch.Tensor]


class ReplayableStep(Protocol):
    """Step of `shardwise.train.step`, as a replay needs it. ``ran`` are the model and the loss that `run` was given."""

    number: int
    ran: tuple[nn.Module, LossFunction] | None
    random_state: torch.Tensor

    @property
    def micros(self) -> Sequence[Any]:
        """This rank's micro batches."""

    @property
    def micro(self) -> int:
        """Number of the current micro batch, from 1."""

    @property
    def losses(self) -> list[torch.Tensor]:
        """Losses of the micro batches, as `backward` got them."""

    def again(self) -> ReplayableStep:
        """Return the step anew, on the same micro batches."""

    def run(self, model: nn.Module, loss_fn: LossFunction) -> None:
        """Run forward and backward of every micro batch."""


def random_state(device: torch.device) -> torch.Tensor:
    """Return the states of torch's generators, as bytes on the CPU: microseconds, and no wait for a device."""
    state = torch.get_rng_state()
    return state if device.type != "cuda" else torch.cat([state, torch.cuda.get_rng_state(device)])


def restore_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore the states from `random_state`."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)


@contextlib.contextmanager
def explained(session: TrainingSession, step: ReplayableStep) -> Iterator[None]:
    """Find the source of a `NonFiniteError` that is raised before the update of ``step``. Collective.

    Raises:
        NonFiniteError: with its source.
    """
    try:
        yield
    except NonFiniteError as error:
        if session.applied.engine is not None:
            raise
        file, is_main = session.nonfinite_file, session.ranks.is_main
        logging.getLogger("shardwise").log(  # before the replay, which may not end
            logging.WARNING if is_main else logging.INFO,
            "step %d: %s; looking for its source",
            error.step,
            error.problem,
        )
        if file is not None and is_main:
            error.write(file)
        try:
            source = source_of(session, step)
        except Exception:  # other ranks found nothing wrong and are elsewhere, or are gone; or memory is short
            raise error from None
        named = NonFiniteError(error.step, error.problem, source, None if file is None else str(file))
        if file is not None and is_main:
            named.write(file)
        raise named from None


def source_of(session: TrainingSession, step: ReplayableStep) -> NonFiniteSource:
    """Return the source of a number of ``step`` that is not finite, before its update. Collective."""
    scaled = session.scaler is not None
    rows = gather_ints([len(step.micros)], session.ranks, "a search for NaN")
    micros = max(row[0] for row in rows)
    if session.in_backward is not None:
        note = "its backward has changed the weights already (optimizer.in_backward)"
        return NonFiniteSource(reason="not replayed", step=step.number, note=note)
    names = tuple(spoilt_gradients(session))
    mine = replayed(session, step)
    facts = exchanged(session, mine)
    source = choose(facts, session.plan, step.number, micros, scaled=scaled)
    if source.reason == "not reproduced" and step.ran is None:
        source = source.model_copy(update={"reason": "backward", "module": None, "note": _BY_HAND, "parameters": names})
    elif source.reason == "not reproduced":
        source = _of_norm(facts, source)
    return with_batch(session, source)


_BY_HAND = (
    "the forward of every module and the loss are finite on all ranks; a loop that calls step.run(model, loss_fn) has "
    "its backward replayed, too, and the operation named"
)


def replayed(session: TrainingSession, step: ReplayableStep) -> ReplayFacts:
    """Run ``step`` again from the generators' state at its beginning, and return what this rank has recorded."""
    weights, columns = spoilt_weights(session), columns_of(step)
    session.optimizer.zero_grad()
    restore_random_state(step.random_state, session.device)
    again = step.again()
    recorder, failure = Recorder(session, lambda: again.micro), ""
    try:
        with recorder, eager(session.plan):
            if step.ran is not None:
                model, loss_fn = step.ran
                session.agreement.begin_step()
                again.run(model, recorder.loss_of(loss_fn))
                session.finish_gradients()
                session.agreement.settle(torch.zeros((), dtype=torch.float64, device=session.device))
            else:
                _forward_only(session, step, recorder)
    except Exception as error:  # of the user's code as well
        what = "the replay failed" if step.ran is not None else "the replay could not call the model"
        kind = "" if isinstance(error, RuntimeError | ShardwiseError) else f"{type(error).__name__}: "
        failure = f"{what}: {kind}{' '.join(str(error).split()):.200}"
    finally:
        session.phase = "other"
    reshard(session.applied.outer)
    return ReplayFacts(
        events=tuple(recorder.events),
        columns=tuple(columns),
        weights=weights,
        gradients=spoilt_gradients(session),
        largest=_largest_gradient(session),
        finite_losses=recorder.finite_losses,
        failure=failure or recorder.failure,
    )


def eager(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled blocks run as they are written: hooks inside of a graph are not called."""
    return torch.compiler.set_stance("force_eager") if plan.compile else contextlib.nullcontext()


def exchanged(session: TrainingSession, mine: ReplayFacts) -> list[ReplayFacts]:
    """Return the facts of all ranks. Collective."""
    return [ReplayFacts.model_validate_json(text) for text in gather_text(mine.model_dump_json(), session.ranks)]


def spoilt_weights(session: TrainingSession, *, trained: bool = False) -> dict[str, str]:
    """Return parameters of which this rank's part is not finite, with what is in it; on request ``trained`` ones only.

    A frozen parameter may be infinite on purpose.
    """
    frozen = {name for name, parameter in _parameters(session) if not parameter.requires_grad}
    found = _spoilt(session, lambda parameter: parameter)
    return {name: kind for name, kind in found.items() if name not in frozen or (not trained and "nan" in kind)}


def spoilt_gradients(session: TrainingSession) -> dict[str, str]:
    """Return parameters of which this rank's part of the gradient is not finite, in the order of the backward."""
    found = _spoilt(session, lambda parameter: parameter.grad)
    return dict(reversed(found.items()))


def with_batch(session: TrainingSession, source: NonFiniteSource) -> NonFiniteSource:
    """Return the source with the batch of the loader that its micro batch is, in a loop of the user's own."""
    stream = session.stream
    if source.rank is None or source.micro_batch is None or not stream.passes:
        return source
    dp, at = session.plan.dims.dp, source.micro_batch - 1
    batch = stream.batches + at * dp + session.plan.dims.place(source.rank).dp
    if stream.dealer:  # each rank's loader counts its own
        batch = stream.batches // dp + at
    return source.model_copy(update={"batch": batch, "passes": stream.passes})


def _forward_only(session: TrainingSession, step: ReplayableStep, recorder: Recorder) -> None:
    """Run the forwards of a loop by hand, whose loss function is not known; what it gave is."""
    at = 0
    recorder.micro = lambda: at + 1
    with torch.no_grad():
        for at, micro in enumerate(step.micros):
            recorder.on_loss(step.losses[at], call(session.applied.outer, micro.inputs), micro.labels)


def columns_of(step: ReplayableStep) -> Iterator[Column]:
    """Yield columns of the data that are not finite, for each micro batch."""
    for number, micro in enumerate(step.micros, 1):
        if micro.padding:
            continue
        batch = batch_of(micro.inputs)
        for name, value in [*_named("inputs", micro.inputs), *_named("labels", micro.labels)]:
            for tensor in tensors_in(value):
                found = non_finite(tensor, batch)
                if found is not None and found.kind != "-inf":  # which a mask has on purpose
                    yield Column(micro=number, name=name, value=found.kind, rows=found.rows, batch_rows=batch)


def _named(kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{kind}[{at}]", part) for at, part in enumerate(value))
    else:
        yield kind, value


def _spoilt(session: TrainingSession, part: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, parameter in _parameters(session):
        for tensor in tensors_in(part(parameter)):
            bad = non_finite(tensor)
            if bad is not None and len(found) < _NAMED:
                found[name] = bad.kind
    return found


def _largest_gradient(session: TrainingSession) -> tuple[str, float] | None:
    sizes = [
        (float(tensor.abs().max()), name)
        for name, parameter in _parameters(session)
        for tensor in tensors_in(parameter.grad)
    ]
    size, name = max(sizes, default=(0.0, ""))
    return (name, size) if name and size < float("inf") else None


def _parameters(session: TrainingSession) -> Iterator[tuple[str, nn.Parameter]]:
    ownership = ownership_of(session.module)
    for raw, parameter in session.module.named_parameters():
        name = clean_name(raw)
        yield name if ownership is None else ownership.canonical(name), parameter


def _of_norm(facts: Sequence[ReplayFacts], source: NonFiniteSource) -> NonFiniteSource:
    """Return that the norm alone overflows, if a gradient is as large as that takes; else the source as it is."""
    found = max(((one.largest[1], one.largest[0]) for one in facts if one.largest), default=(0.0, ""))
    if found[0] ** 2 < torch.finfo(torch.float32).max / 2**20:
        return source
    return source.model_copy(update={"reason": "norm", "parameters": (found[1],), "largest": found[0]})
