"""`Session`: correct distributed training in a custom loop, in five lines.

The gradient of a step is that of one process over the full global batch: each micro batch gives its loss as a sum,
the number of terms in the global batch is agreed on before the first backward, and only the last micro batch
synchronises. `shardwise train` uses this class too; there is no second implementation.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree

from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.local_storage import Folder, folder_of
from shardwise.distributed import control_message as meeting
from shardwise.distributed.control_message import Table
from shardwise.distributed.places import counted_once
from shardwise.distributed.process_group import Ranks, gather_ints, gather_table, leave
from shardwise.errors import DataError, ModelError, PlanError, UserError
from shardwise.model.facts import ModelSpec
from shardwise.model.read import clean_name
from shardwise.optim.in_backward import InBackward
from shardwise.optim.low_precision import low_precision, low_precision_notes
from shardwise.optim.trial import check_flattened, check_optimizer
from shardwise.parallel.apply import Applied, apply, apply_to_optimizer, parameter_names, set_gradient_sync
from shardwise.parallel.context_parallel.attention import sequence_share
from shardwise.parallel.data_parallel.ddp import Replicated
from shardwise.parallel.data_parallel.fsdp import discard_gradients
from shardwise.parallel.data_parallel.unit_forwards import backward_runs
from shardwise.parallel.data_parallel.unit_order import orders_of
from shardwise.parallel.data_parallel.unsupported import refuse_unsupported
from shardwise.parallel.fp8 import keep_scales
from shardwise.parallel.grad_norm import finish_partial, full_norm, global_norm, scale_to
from shardwise.parallel.materialize import Fill
from shardwise.parallel.ownership import ownership_of
from shardwise.parallel.precision import grad_scaler
from shardwise.plan.dims import MeshCoord
from shardwise.plan.plan import Plan
from shardwise.train.agreement import Agreement
from shardwise.train.calls import Calls
from shardwise.train.data.position import Stream
from shardwise.train.data.windows import PassWindows, split_batch, windows
from shardwise.train.epochs import count_steps, pass_ended, unfinished_epochs
from shardwise.train.group_samples import copy_rng_state, group_marks, keep_together
from shardwise.train.hooks import ParameterHooks
from shardwise.train.loss import count_labels
from shardwise.train.routing import Routing
from shardwise.train.schedule_length import ScheduleRecorder
from shardwise.train.session_interface import StepHeader, Timekeeper
from shardwise.train.session_state import load_session, save_session
from shardwise.train.step import Micro, Step
from shardwise.train.structure import StructureRecorder

Planner = Callable[[nn.Module, Optimizer, Any], Plan]  # the last is the sample that `Session.prepare` got


class Observer(Protocol):
    """Observer of a session; each method is called on every rank at the same point."""

    def on_prepared(self, session: Session) -> None:
        """Called once the model and the optimizer are ready for training."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Called before the first forward of a step."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Called once gradients are reduced and normalised, before clipping."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Called after the optimizer's step; gradients still exist."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Called if the loop left a step unfinished; its gradients are discarded."""


# Writes the report of a session, and returns its path on rank 0.
Reporter = Callable[["Session"], Path | None]


@dataclass
class Session:
    """Training session on this rank; create one with ``shardwise.start``.

    ``plan`` is set by `prepare`. ``phase`` is the current phase, for observers; functions in ``phase_watchers`` are
    called when it changes, and ``at_close`` is unwound at the end. ``header`` is sent with each step's first message.
    ``stopped_by`` is the signal that `stop` was called for on any rank, and 0 while nothing has stopped the session.
    ``micros_left`` are the micro batches of a step after the current one. ``in_backward`` steps parameters
    during the backward if the plan requests it. ``nonfinite_file`` gets the source of a number that is not finite.
    ``saved_on_host`` are the foreseen bytes of a micro batch that a plan offloads, where they are known.
    ``routing`` is what the routers of a mixture of experts choose; ``routing.terms``, their losses, are set before
    `prepare`.
    """

    ranks: Ranks
    planner: Planner
    observers: list[Observer] = field(default_factory=list)
    steps_done: int = 0
    first_step: int = 0
    phase_watchers: list[Callable[[str], None]] = field(default_factory=list)
    stopped: bool = False
    stopped_by: int = 0
    scaler: torch.amp.GradScaler | None = None
    saver: Saver | None = None
    in_step: bool = False
    micros_left: int = 0
    timekeeper: Timekeeper | None = None
    reporter: Reporter | None = None
    header: list[StepHeader] = field(default_factory=list)
    at_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    in_backward: InBackward | None = None
    nonfinite_file: Path | None = None
    saved_on_host: int | None = None
    routing: Routing = field(default_factory=Routing)
    _agreement: Agreement | None = None
    _stream: Stream | None = None
    _windows: PassWindows | None = None
    _plan: Plan | None = None
    _applied: Applied | None = None
    _optimizer: Optimizer | None = None
    _trainable: list[nn.Parameter] = field(default_factory=list)
    _stop_asked: int = 0
    _forwards: int = 0
    _gathers: bool = False
    _calls: Calls = field(default_factory=Calls)
    _phase: str = "other"

    @property
    def phase(self) -> str:
        """Phase of the step.

        ``data`` (it begins), ``transfer``, ``control`` (ranks agree on it), ``forward``,
        ``backward``, ``clip``, ``optimizer``, or ``other``; between steps also ``checkpoint`` and ``evaluation``.
        """
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        """Change the phase, and call the watchers."""
        self._phase = name
        for watcher in self.phase_watchers:
            watcher(name)

    @property
    def stream(self) -> Stream:
        """Position of the loop in its data."""
        if self._stream is None:
            self._stream = Stream(self.ranks, self.device, (self.place.dp, self.dp), self.plan.grad_accum)
            self.header.append(self._stream.watch)
        return self._stream

    @property
    def dealer(self) -> str:
        """Name of the object in the loader that shards samples by rank; empty without one."""
        return "" if self._stream is None else self._stream.dealer

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.ranks.device

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        if self._plan is None:
            raise UserError("session.plan is known after session.prepare(model, optimizer)")
        return self._plan

    @property
    def dp(self) -> int:
        """Number of ranks with different samples."""
        return self.plan.dims.dp

    @property
    def place(self) -> MeshCoord:
        """Coordinates of this rank on the axes of the plan."""
        return self.plan.dims.place(self.ranks.rank)

    @property
    def reduced_ranks(self) -> int:
        """Number of ranks whose gradients are averaged: those with different tokens."""
        return self.plan.dims.dp * self.plan.dims.cp

    @property
    def applied(self) -> Applied:
        """Model with the plan applied."""
        if self._applied is None:
            raise UserError("call session.prepare(model, optimizer) first")
        return self._applied

    @property
    def agreement(self) -> Agreement:
        """Agreement of the ranks at the end of a step's last backward."""
        if self._agreement is None:
            raise UserError("call session.prepare(model, optimizer) first")
        return self._agreement

    @property
    def module(self) -> nn.Module:
        """User's own module, without DDP around it."""
        return self.applied.module

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer that `prepare` returned."""
        if self._optimizer is None:
            raise UserError("call session.prepare(model, optimizer) first")
        return self._optimizer

    @property
    def spec(self) -> ModelSpec:
        """Structural facts of the model."""
        return self.applied.spec

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, sample: Any = None, fill: Fill | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """Apply the plan to the model and point the optimizer at its parameters.

        Weights are rank 0's. Build learning-rate schedulers from the returned optimizer. ``sample`` is the model's
        input for one micro batch, as the loader returns it; tensor, pipeline and context parallel trace one
        forward of it (values do not matter); default: token ids [1, length]. Under ``+lora`` and ``+qlora``
        adapters are added to the model, and the optimizer has them in place of the weights that they adapt;
        ``fill`` gives each unit of a model on the meta device its frozen weights.

        Raises:
            ModelError: the session has a model already, or the model does not support the plan.
        """
        if self._applied is not None:
            raise ModelError("session.prepare was called before; a session trains one model")
        self._plan = self.planner(model, optimizer, sample)
        if self._plan.device != self.device.type:
            raise PlanError(
                f"the plan is for {self._plan.device}, and this rank computes on {self.device.type}; give "
                f"start(..., device='{self._plan.device}'), or a plan whose device is '{self.device.type}'"
            )
        hooks = ParameterHooks(model, self._plan)
        routed = self.routing.adopt(model, self._plan)
        if self._plan.parsed.engine == "deepspeed":
            from shardwise.parallel.engines.deepspeed_engine import apply_deepspeed

            self._applied, self._optimizer = apply_deepspeed(model, optimizer, self._plan, self.ranks, check_flattened)
        else:
            names = parameter_names(model)
            self._applied = apply(model, self._plan, self.device, sample, fill)
            self._plan = self._applied.plan
            self._optimizer = apply_to_optimizer(optimizer, names, self._applied, self._plan, low_precision)
            refuse_unsupported(self._applied.outer, self._plan.strategy)
            check_optimizer(self._optimizer, self._applied.module, self._plan, self.ranks)
            keep_scales(self._optimizer, self._applied.module, self._plan)
        self._trainable = [p for p in self._applied.module.parameters() if p.requires_grad]
        if self._plan.optimizer_in_backward:
            self.in_backward = InBackward(self._optimizer)
            self.at_close.callback(self.in_backward.remove)
        self.scaler = grad_scaler(self._plan)
        if self.scaler is not None and not all(row[0] for row in gather_ints([len(self._trainable)], self.ranks)):
            raise ModelError("fp16 needs parameters to train on every pipeline stage, and one has none; use bf16")
        if self.ranks.is_main:
            for note in (*routed, *self._applied.warnings, *low_precision_notes(self._optimizer, self._plan)):
                logging.getLogger("shardwise").warning(note)
        self._agreement = Agreement(self._applied, self._plan, self.ranks)
        engine, outer, called = self._applied.engine, self._applied.outer, self._applied.outer
        self._gathers = self._applied.pipeline is None and bool(orders_of(self._applied.outer))
        if engine is not None:
            self._gathers, called = engine.gathers, self._applied.module
        if self._gathers or (isinstance(outer, Replicated) and outer.syncs_buffers):
            called.register_forward_pre_hook(self._meet, prepend=True)
        self.observers[:0] = [hooks, StructureRecorder(), ScheduleRecorder(), self.routing]  # before those of gradients
        self.header.append(hooks)
        self.notify("on_prepared")
        return self._applied.outer, self._optimizer

    def steps(
        self,
        loader: Iterable[Any],
        *,
        limit: int | None = None,
        count: Callable[[Any], int] = count_labels,
        sharded: bool | None = None,
    ) -> Iterator[Step]:
        """Yield one `Step` for each global batch of ``loader``, which yields micro batches.

        Args:
            loader: yields ``(inputs, labels)`` or dicts with ``labels``. Each rank gets its own share, unless the
                loader shards by rank itself, as one with a ``DistributedSampler`` does.
            limit: stop after this many steps; inside of `epochs` of the epoch, with those before a resume.
            count: number of loss terms of given labels; default: integer labels other than ``-100``, else samples.
            sharded: whether each rank's loader already yields only that rank's share; detected by default.
        """
        share = windows(self.stream.open(loader, sharded), self.plan.grad_accum)
        self.stream.limited = limit is not None
        if limit is not None and self.stream.epoch is not None:
            limit -= self.stream.steps
        return self.run_windows(share, limit=limit, count=count)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from 0; call `steps` once in each.

        Epochs that a loaded checkpoint has finished are left out, with all that the loop does after their steps. A
        `save` after the last step of an epoch marks it finished. The iteration ends after `stop`.
        """
        return unfinished_epochs(self, count, self.stream.reserve(count))

    def steps_per_epoch(self, loader: Iterable[Any], *, sharded: bool | None = None) -> int:
        """Return the number of steps of one pass over ``loader``, for a scheduler: fewer on more ranks.

        Raises:
            UserError: the loader has no length.
        """
        return count_steps(self, loader, sharded)

    def pass_ended(self) -> bool:
        """Return whether no step is left of the current pass; collective."""
        return pass_ended(self, self._windows)

    def run_windows(
        self, share: Iterable[list[Any]], *, limit: int | None = None, count: Callable[[Any], int] = count_labels
    ) -> Iterator[Step]:
        """Yield steps as `steps`, from windows that are already this rank's share."""
        source, stream, last = PassWindows(share, limit), self.stream, None
        self._windows = source
        if self._applied is not None:  # the loop left a step unfinished
            if self._applied.engine is None:
                discard_gradients(self._applied.outer)
            else:
                self._applied.engine.discard()
            if self.plan.dims.tp > 1:
                self.sync_rng_state()
        self.first_step, self.in_step, self._calls = self.steps_done, False, Calls()
        while not source.spent:
            self.phase = "data"
            given = source.take()
            self.phase = "transfer"
            micros = [self._micro(batch, count) for batch in given]
            last = micros[-1] if micros else last
            tokens, ready = sum(m.num_tokens for m in micros), int(last is not None)
            own = [tokens, len(micros), self._stop_asked, ready, *self.marks(given)]
            header = [number for one in self.header for number in one.post()]
            self.phase = "control"
            rows = gather_table([*own, *header], self.ranks, "the start of a step")
            self.phase = "other"
            if rows[:, 1].any():
                keep_together(self, rows)
            self._deliver(rows, len(own))
            stream.ended = (length := int(rows[:, 1].max())) == 0
            if self._adopt_stop(int(rows[:, 2].max())) or stream.ended:
                self._windows = None
                return
            if last is None or not rows[:, 3].all():
                raise DataError(
                    f"rank {(rows[:, 3] == 0).argmax()} got no batch at all while others did: fewer batches than "
                    "ranks; use a smaller batch size or fewer ranks"
                )
            micros += [Micro(last.inputs, last.labels, num_tokens=0, padding=True)] * (length - len(micros))
            number = self.steps_done + 1
            step = Step(self, number, micros, *self._in_all(rows))
            self.in_step = True
            self._calls.begin_step()
            self.agreement.begin_step()
            self.notify("on_step_start", step)
            try:
                yield step
            finally:
                if self._agreement is not None:
                    self._agreement.end_step(done=self.steps_done == number)
                if self.steps_done != number:
                    self.notify("on_step_abandoned", step)
            if self.steps_done != number:
                raise UserError(f"step {number} ended without step.update(optimizer); call it once for each step")
        stream.ended = stream.epoch is not None

    def _deliver(self, rows: Table, start: int) -> None:
        for one in self.header:
            one.deliver(rows[:, start : start + one.size])
            start += one.size

    def marks(self, given: list[Any]) -> list[int]:
        """Return checksums that ranks on one sample must share."""
        return group_marks(self, given)

    def sync_rng_state(self) -> None:
        """Copy the first rank's RNG state to its tensor-parallel group. Collective over all ranks."""
        copy_rng_state(self)

    def _in_all(self, rows: Table) -> tuple[int, int]:
        """Sum labels and micro batches over all ranks; those shared by several ranks count once."""
        parts, samples = counted_once(self.plan.dims)
        return int(rows[parts, 0].sum()), int(rows[samples, 1].sum())

    def save(
        self,
        folder: str | Folder,
        *,
        state: dict[str, Any] | None = None,
        keep: int = 2,
        async_save: bool = False,
    ) -> Folder:
        """Save model, optimizer, generators and data position as ``folder/step-00000020``.

        Collective.

        Call it between two steps. ``folder`` is on a disk that all ranks see, or a URL (``s3://...``). ``state``
        is the caller's own, as JSON (rank 0's is kept). The ``keep`` newest checkpoints stay. With ``async_save``
        training continues while it is written; the next save, or `close`, waits for it and raises its errors.

        Raises:
            UserError: in the middle of a step, or the folder cannot be written to or belongs to another run.
            TrainingError: a trained weight is not finite; nothing is written.
            CheckpointError: a rank could not write its part. Earlier checkpoints stay.
        """
        self._come_together("session.save")
        folder = folder_of(folder)
        wanted = (str(folder), keep, async_save)
        if self.saver is not None and (str(self.saver.folder), self.saver.keep, self.saver.async_save) != wanted:
            self.saver.close()
            self.saver = None
        if self.saver is None:
            self.saver = Saver(folder, keep=keep, async_save=async_save, guarded=True)
        self.phase = "checkpoint"
        try:
            return save_session(self, self.saver, state)
        finally:
            self.phase = "other"

    def load(self, folder: str | Folder, *, verify: bool = True) -> dict[str, Any] | None:
        """Resume from the newest checkpoint in ``folder``; return the caller's state or ``None``.

        Collective; after `prepare` and before the first `steps`. Strategy and world size may differ from the
        checkpoint's. Finished passes over the data yield no steps, and the interrupted one resumes at its micro batch,
        whatever the number of ranks: no sample is repeated or left out. The order of later passes is that of the
        uninterrupted run too, on another number of ranks only if the loader shuffles with its own ``generator``: the
        global one also serves dropout, of which each rank has its share. Under ``ddp`` and ``zero1`` on three ranks or
        more the first step afterwards is summed in another order: last digits differ.

        Raises:
            UserError: a pass has begun, or the checkpoint is not from `save`.
            CheckpointError: it is damaged, or of another model or optimizer.
        """
        gather_ints([], self.ranks, "session.load")
        return load_session(self, folder, verify)

    def timing(self) -> Any:
        """Return step time by component: a `shardwise.measure.step_time.timing.Timing` on rank 0."""
        return None if self.timekeeper is None else self.timekeeper.timing()

    def report(self) -> Path | None:
        """Write step time, findings and the report to the ``output`` of `start`; print them on rank 0. Collective.

        For the end of a run: nothing is timed afterwards. Returns the page's path on rank 0.

        Raises:
            UserError: the session has no ``output``.
        """
        if self.reporter is None:
            raise UserError("session.report writes to a run folder: name one, start(..., output='runs/mine')")
        self._come_together("session.report")
        return self.reporter(self)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Request the end at the next step boundary; one rank's request stops all.

        Safe in a signal handler, of the signal ``number``.
        """
        self._stop_asked = max(self._stop_asked, number)

    def stop_agreed(self) -> bool:
        """Return whether any rank was asked to stop; collective, and stored as ``stopped``."""
        return self._adopt_stop(max(row[0] for row in gather_ints([self._stop_asked], self.ranks)))

    def _adopt_stop(self, asked: int) -> bool:
        """Adopt the signal of any rank, the greatest, on all the same; return whether there is one."""
        self.stopped_by = max(self.stopped_by, asked)
        self.stopped = self.stopped_by > 0
        return self.stopped

    def close(self) -> None:
        """Leave the world.

        Ends a save in progress, destroys the group if the session created it, and releases the
        model.

        Raises:
            CheckpointError: the last save, in the background, failed.
        """
        saver, self.saver = self.saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        self.at_close.close()
        if self._applied is not None and self._applied.engine is not None:
            self._applied.engine.close()
        leave(self.ranks)
        self._applied = self._optimizer = self.in_backward = self._agreement = self._windows = None
        self.observers, self.phase_watchers, self.header, self.reporter, self._trainable = [], [], [], None, []

    def check_forward(self) -> None:
        """Refuse a loss under DDP that did not come from the prepared model.

        It would not be reduced.

        Raises:
            UserError: the model was not called since the micro batch began.
        """
        outer = self.applied.outer
        if isinstance(outer, Replicated) and outer.forwards == self._forwards:
            raise UserError(
                "step.backward: the prepared model was not called for this micro batch, so its gradients would not be "
                "reduced over the ranks; call model(inputs), and move what model.some_method(...) or a submodule does "
                "into the model's forward"
            )

    def _meet(self, module: nn.Module, args: Any) -> None:
        """Wait for every rank before a forward that communicates.

        It gathers sharded weights, or sends batch norm's buffers.
        A step with the usual number of forwards needs no wait.
        """
        if self._applied is None or backward_runs():
            return
        if not (self.in_step and torch.is_grad_enabled()):
            self._come_together("an evaluation")
        elif self._gathers and self._calls.is_news(self.steps_done == self.first_step):
            self._come_together("a forward of a step")

    def meet_before_backward(self) -> None:
        """Wait in the first step, and if there were fewer forwards: others may still be in one."""
        if self._applied is not None and self._gathers and self._calls.ended(self.steps_done == self.first_step):
            self._come_together("step.backward")

    def _come_together(self, where: str) -> None:
        """Check that every rank is at the same place.

        In a step, a rank that does not come may be in a collective of FSDP2, and would
        never answer.
        """
        phase, self.phase = self.phase, "control" if self.in_step else self.phase
        gather_ints([], self.ranks, where, patient=False, limit_s=meeting.LIMIT_S if self.in_step else None)
        self.phase = phase

    def begin_micro(self, *, last: bool, padding: bool = False) -> None:
        """Prepare for a micro batch; called by `Step`."""
        if self.applied.engine is not None:
            self.applied.engine.begin_micro(last=last)
        else:
            set_gradient_sync(self.applied.outer, last or self.plan.syncs_every_micro_batch)
            self.agreement.begin_micro(last=last, padding=padding)
        self._forwards = getattr(self.applied.outer, "forwards", 0)
        self._calls.begin_micro()
        self.phase = "forward"

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Scale gradients to a global norm of at most ``clip_norm``; return the norm before, 0-d."""
        self.phase = "clip"
        meshes = self.applied.meshes
        if meshes is not None:  # of parts: PyTorch's own would be one all-reduce for each parameter
            named = [(clean_name(name), p) for name, p in self.module.named_parameters() if p.requires_grad]
            norm = global_norm(named, ownership_of(self.module), meshes.data.device_type)
            scale_to(self._trainable, clip_norm, norm)
            return norm
        norm = full_norm(self._trainable)
        torch.nn.utils.clip_grads_with_norm_(self._trainable, clip_norm, norm)
        return norm

    def finish_gradients(self) -> None:
        """Reduce over the model's own axes, once all backwards of a step are done."""
        if ownership_of(self.module) is None:
            return
        self.phase = "backward"
        finish_partial(self._trainable)
        if self.applied.pipeline is not None:
            self.applied.pipeline.finish_gradients()
        self.phase = "other"

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that the optimizer is the one from `prepare`.

        Another one would step stale parameters.
        """
        if optimizer is not self._optimizer:
            raise UserError(
                "step.update got another optimizer than session.prepare returned; "
                "write `model, optimizer = session.prepare(model, optimizer)`"
            )

    def notify(self, event: str, *args: Any) -> None:
        """Call ``event`` of every observer."""
        for observer in self.observers:
            getattr(observer, event)(self, *args)

    def _micro(self, batch: Any, count: Callable[[Any], int]) -> Micro:
        inputs, labels = split_batch(batch)
        if self.plan.dims.cp > 1:
            inputs, labels = sequence_share((inputs, labels), self.plan, self.place.cp, count)
        number = count(labels)
        if self.device.type != "cpu":
            inputs, labels = _pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(self.device, non_blocking=True), (inputs, labels)
            )
        return Micro(inputs=inputs, labels=labels, num_tokens=number)
