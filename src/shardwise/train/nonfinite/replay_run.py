"""A number that is not finite in `shardwise train`: its samples, its file, and a replay from the newest checkpoint.

Where the weights have changed before it is noticed (on a GPU, whose loss is read at logged steps only, or by an update
that no norm has checked), the steps since that checkpoint run again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.local_storage import Folder, folder_of
from shardwise.distributed.process_group import gather_ints
from shardwise.plan.plan import Plan
from shardwise.train import resume
from shardwise.train.average import WeightAverage
from shardwise.train.config import Config
from shardwise.train.data.order import SampleOrder, rank_ids
from shardwise.train.data.samples import NumberedSamples, step_batches
from shardwise.train.hooks import ParameterHooks
from shardwise.train.nonfinite.choose_source import ReplayFacts, choose
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError, NonFiniteSource
from shardwise.train.nonfinite.nonfinite_hooks import Recorder
from shardwise.train.nonfinite.replay_step import columns_of, eager, exchanged, spoilt_weights
from shardwise.train.optimizer import set_learning_rate
from shardwise.train.run_files import RunFile
from shardwise.train.run_interface import Reporter
from shardwise.train.session import Session
from shardwise.train.step import Step
from shardwise.train.training_parts import TrainingParts
from shardwise.units import counted

_MOST_STEPS = 200  # that a search runs again
_MOST_S = 600.0


class _Late(Exception):
    """The search has taken too long."""


class ReplayableRun(Protocol):
    """Run of `shardwise.train.loop`, as a replay needs it. ``position`` is that of the step that runs."""

    config: Config
    plan: Plan
    session: Session
    reporter: Reporter
    saver: Saver
    samples: NumberedSamples
    order: SampleOrder
    parts: TrainingParts
    output: Path
    global_batch: int
    position: int

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor]:
        """Loss of the run's training steps."""

    def restore(self, path: Folder, earlier: Folder | None) -> None:
        """Load a checkpoint, with the position, the generators and the scaler that it was made with."""


@contextlib.contextmanager
def naming_the_source(run: ReplayableRun, model: nn.Module) -> Iterator[None]:
    """Name the source of a `NonFiniteError`, and its samples, and write both to the run's folder. Collective.

    Raises:
        NonFiniteError: with the source.
    """
    try:
        yield
    except NonFiniteError as error:
        try:
            known = _known(run, error) if error.source is None else _with_samples(run, error.source)
        except Exception:  # others are gone, or memory is short
            raise error from None
        named = _written(run, error, known)
        if known.reason in ("weight", "update", "not replayed"):
            if run.session.ranks.is_main:
                run.reporter.log(str(named))  # before the search, which may not end
            named = _written(run, error, _searched(run, model, error.step, known))
        raise named from None


def _written(run: ReplayableRun, error: NonFiniteError, source: NonFiniteSource) -> NonFiniteError:
    """Return the error with its source, as it is in the run's folder."""
    file = run.output / RunFile.NONFINITE
    named = NonFiniteError(error.step, error.problem, source, str(file))
    if run.session.ranks.is_main:
        named.write(file)
    return named


def _known(run: ReplayableRun, error: NonFiniteError) -> NonFiniteSource:
    """Return what the weights show, if the number was noticed after an update."""
    if run.session.applied.engine is not None:
        return NonFiniteSource(reason="not replayed", step=error.step, note=f"{run.plan.strategy} is not replayed")
    found = _of_update(run.session, error.step) or NonFiniteSource(reason="not replayed", step=error.step)
    return found.model_copy(update={"note": "it was noticed after an update: this step's, or an earlier one's"})


def _searched(run: ReplayableRun, model: nn.Module, last: int, known: NonFiniteSource) -> NonFiniteSource:
    """Return the source that the steps from the newest checkpoint to ``last`` show when they run again."""
    if run.session.applied.engine is not None:
        return known
    try:
        run.saver.wait()
        path, earlier = resume.find(folder_of(run.config.checkpoints))
        if path is None:
            return _noted(known, "there is no checkpoint to replay from: set checkpoint.every")
        if run.session.ranks.is_main:
            run.reporter.log(f"a number is not finite in step {last}; looking for its source from '{path}' on")
        run.restore(path, earlier)
        steps = last - run.session.steps_done
        if steps > _MOST_STEPS:
            return _noted(known, f"not searched: the newest checkpoint lies {counted(steps, 'step')} before this one")
        found = _rerun(run, model, last)
    except _Late as error:
        return _noted(known, str(error))
    except Exception as error:  # memory may be short; the number that is not finite is what the run has ended by
        return _noted(known, f"a replay from the newest checkpoint failed: {' '.join(str(error).split()):.200}")
    if found is not None:
        return found
    return _noted(known, f"the steps from '{path.name}' on, run again, had only finite numbers")


def _noted(source: NonFiniteSource, text: str) -> NonFiniteSource:
    return source.model_copy(update={"note": "; ".join(filter(None, [source.note, text]))})


def _rerun(run: ReplayableRun, model: nn.Module, last: int) -> NonFiniteSource | None:
    """Run the steps up to ``last`` again; from the one after the last good logged line on with every module watched."""
    session, table = run.session, run.config.optimizer
    session.observers = [one for one in session.observers if isinstance(one, ParameterHooks | WeightAverage)]
    watched = last - run.config.train.log_every - 1
    batches = step_batches(run.samples, run.order, run.plan, session.ranks.rank, run.position)
    begun = time.monotonic()
    for step in session.run_windows(batches, limit=last - session.steps_done):
        late = time.monotonic() - begun > _MOST_S
        if gather_ints([int(late)], session.ranks, "a search for NaN")[0][0]:  # by the clock of rank 0
            minutes = f"{_MOST_S / 60:g} minutes"
            raise _Late(f"not searched from step {step.number} on: {minutes} were over")
        set_learning_rate(session.optimizer, run.parts.rate(step.number), table.lr)
        try:
            if step.number < watched:
                step.run(model, run.loss)
            else:
                source = _watched(run, model, step)
                if source is not None:
                    return source
            step.update(session.optimizer, clip_norm=table.clip_norm)
        except NonFiniteError as error:
            return None if error.source is None else _with_samples(run, error.source)
        source = _of_update(session, step.number) if step.number >= watched else None
        if source is not None:
            return source
        run.position += run.global_batch
    return None


def _watched(run: ReplayableRun, model: nn.Module, step: Step) -> NonFiniteSource | None:
    """Run a step with every module watched; return the source of a number that is not finite."""
    session, recorder = run.session, Recorder(run.session, lambda: step.micro)
    with recorder, eager(session.plan):
        step.run(model, recorder.loss_of(run.loss))
    mine = ReplayFacts(
        events=tuple(recorder.events), columns=tuple(columns_of(step)), finite_losses=recorder.finite_losses
    )
    facts = exchanged(session, mine)
    source = choose(facts, run.plan, step.number, len(step.micros), scaled=session.scaler is not None)
    return None if source.reason == "not reproduced" else _with_samples(run, source)


def _of_update(session: Session, step: int) -> NonFiniteSource | None:
    """Return the weights that the step's update has left not finite."""
    facts = exchanged(session, ReplayFacts(weights=spoilt_weights(session, trained=True)))
    weights = {name: value for one in facts for name, value in one.weights.items()}
    if not weights:
        return None
    ranks = tuple(rank for rank, one in enumerate(facts) if one.weights)
    value = next(iter(weights.values()))
    return NonFiniteSource(
        reason="update", step=step, parameters=tuple(weights), value=value, rank=ranks[0], ranks=ranks
    )


def _with_samples(run: ReplayableRun, source: NonFiniteSource) -> NonFiniteSource:
    """Return the source with the numbers of its samples in the data."""
    if source.rank is None or source.micro_batch is None:
        return source
    dims = run.plan.dims
    ids = rank_ids(
        run.order, run.position, dims.dp, dims.place(source.rank).dp, run.plan.micro_batch or 1, run.plan.grad_accum
    )[source.micro_batch - 1]
    rows = range(len(ids)) if source.rows is None else source.rows
    samples = tuple(int(ids[row]) for row in rows if row < len(ids) and ids[row] >= 0)
    return source.model_copy(update={"samples": samples})
