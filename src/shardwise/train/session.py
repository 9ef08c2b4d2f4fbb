"""`Session`: the five lines that make a training loop distributed, and right.

The gradient of a step is that of one process over the whole global batch: each micro batch gives its loss as a sum,
the number of terms in the global batch is agreed on before the first backward, and only the last micro batch
synchronises. `shardwise train` runs on this class too; there is no second path.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree

from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage import Folder, folder_of
from shardwise.errors import DataError, ModelError, TrainingError, UserError
from shardwise.parallel.apply import Applied, apply, apply_to_optimizer, parameter_names, set_gradient_sync
from shardwise.parallel.context import sequence_share
from shardwise.parallel.gradients import finish_partial, global_norm, scale_to
from shardwise.parallel.group import Ranks, gather_ints, leave
from shardwise.parallel.home import home_of
from shardwise.parallel.precision import grad_scaler
from shardwise.parallel.shard import discard_gradients, reshard
from shardwise.plan.dims import Place
from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec
from shardwise.spec.read import clean_name
from shardwise.train.loss import count_labels
from shardwise.train.session_state import load_session, save_session
from shardwise.train.stream import Stream
from shardwise.train.windows import split_batch, windows

Planner = Callable[[nn.Module, Optimizer], Plan]


class Observer(Protocol):
    """Something that watches a session; each method runs on every rank at the same point."""

    def on_prepared(self, session: Session) -> None:
        """The model and the optimizer stand as they will be trained."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Before the first forward of a step."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Gradients are reduced, normalised and not yet clipped."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """After the optimizer's step; gradients are still there."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """The loop was left in the middle of a step; its gradients are thrown away."""


@dataclass(frozen=True)
class Micro:
    """One micro batch on this rank, on the device.

    ``num_tokens`` counts the labels that take part in the loss. A ``filler`` stands in on a rank that has run out of
    data while others have not: it is computed, weighs nothing and counts nothing. Unpacks as ``inputs, labels``.
    """

    inputs: Any
    labels: Any
    num_tokens: int
    filler: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter((self.inputs, self.labels))


class StepResult:
    """What a step did. Reading ``loss`` or ``grad_norm`` waits for the device."""

    def __init__(self, number: int, tokens: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        self.number = number
        self.tokens = tokens
        self._loss_sum = loss_sum
        self._grad_norm = grad_norm

    @property
    def loss(self) -> float:
        """Mean loss of a label over the global batch; NaN for a batch without labels."""
        return float(self._loss_sum.item()) / self.tokens if self.tokens else math.nan

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradient before clipping; ``None`` where no ``clip_norm`` was given."""
        return None if self._grad_norm is None else float(self._grad_norm.item())


class Step:
    """One optimizer step: iterate its micro batches, call `backward` on each, then `update` once.

    ``number`` counts from 1, ``tokens`` and ``batches`` are the labels and the micro batches in the whole global batch,
    ``micros`` are this rank's.
    """

    def __init__(self, session: Session, number: int, micros: list[Micro], tokens: int, batches: int = 0) -> None:
        self.number = number
        self.tokens = tokens
        self.batches = batches
        self._session = session
        self.micros = micros
        self._current = -1
        self._backwards = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=session.device)
        self._loss_work: dist.Work | None = None
        self._updated = False

    def __iter__(self) -> Iterator[Micro]:
        """Each micro batch in turn; gradients synchronise during the backward of the last one."""
        if self._session.applied.pipeline is not None:
            raise UserError(
                f"{self._session.plan.strategy} runs all micro batches of a step through the stages together: replace "
                "the loop over the step by step.run(model, loss_fn)"
            )
        for index, micro in enumerate(self.micros):
            self._current = index
            self._session.begin_micro(last=index == len(self.micros) - 1)
            yield micro

    def backward(self, loss_sum: torch.Tensor, count: int | None = None) -> None:
        """Backward of this micro batch's summed loss, normalised by the global count of labels.

        Args:
            loss_sum: 0-d; the sum (not the mean) of the loss over this micro batch.
            count: the number of terms in that sum, as a check against ``micro.num_tokens``.

        Raises:
            UserError: ``count`` is not what was agreed on, or the loss is no scalar.
        """
        session, micro = self._session, self.micros[self._current]
        if loss_sum.ndim != 0:
            shape = tuple(loss_sum.shape)
            raise UserError(f"step.backward needs a 0-d summed loss, got shape {shape}; use reduction='sum'")
        if count is not None and int(count) != micro.num_tokens and not micro.filler:
            raise UserError(
                f"step.backward: count={int(count)}, but the micro batch has {micro.num_tokens} labels that count; "
                "pass micro.num_tokens, or tell session.steps(loader, count=...) how labels are counted"
            )
        if self._backwards != self._current:
            raise UserError(
                f"step.backward was called {self._backwards} times before micro batch {self._current}; "
                "call it once for each micro batch"
            )
        _refuse_mean(loss_sum, micro)
        self._backwards += 1
        loss = loss_sum * self.weight(micro)
        session.phase = "backward"
        (loss if session.scaler is None else session.scaler.scale(loss)).backward()
        if not micro.filler and session.place.tp == 0:  # tensor-parallel ranks have the same loss
            self._loss_sum += loss_sum.detach()
        session.phase = "control"  # what the user sends between micro batches is not the plan's traffic
        if self._backwards == len(self.micros) and session.ranks.world_size > 1:
            self._loss_work = dist.all_reduce(self._loss_sum, async_op=True)

    def weight(self, micro: Micro) -> float:
        """What a summed loss is multiplied by: the mean over ranks is then that over all labels of the global batch."""
        session = self._session
        return 0.0 if micro.filler or not self.tokens else session.reduced_ranks / self.tokens

    def run(self, model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        """Forward and backward of every micro batch; under pipeline parallel the only way to do so.

        Args:
            model: what `Session.prepare` returned; called with the inputs (a tuple's or a dict's parts as arguments).
            loss_fn: outputs and labels to the summed loss, 0-d.
        """
        session, pipeline = self._session, self._session.applied.pipeline
        if pipeline is None:
            for micro in self:
                self.backward(loss_fn(call_model(model, micro.inputs), micro.labels), count=micro.num_tokens)
            return
        if self._backwards:
            raise UserError(f"step.run was called twice for step {self.number}; call it once")

        def checked(outputs: Any, labels: Any) -> torch.Tensor:
            loss = loss_fn(outputs, labels)
            if loss.ndim != 0:
                raise UserError(f"step.run: loss_fn returned shape {tuple(loss.shape)}; it must sum to a 0-d loss")
            _refuse_mean(loss, self.micros[0])
            return loss

        session.phase = "forward"
        scale = 1.0
        if session.scaler is not None:
            scale = float(session.scaler.scale(torch.ones((), device=session.device)))
        found = pipeline.train(self.micros, checked, lambda micro: self.weight(micro) * scale)
        session.phase = "control"
        if session.place.tp == 0:
            self._loss_sum += found.detach()
        self._current, self._backwards = len(self.micros) - 1, len(self.micros)
        self._loss_work = dist.all_reduce(self._loss_sum, async_op=True)

    def update(self, optimizer: Optimizer, clip_norm: float | None = None) -> StepResult:
        """Clip by the global norm, step the optimizer and clear the gradients.

        Raises:
            TrainingError: the loss or the norm is not a number (on CPU before the weights are touched; on a GPU the
                caller sees it when it reads the result).
        """
        session = self._session
        if self._backwards != len(self.micros):
            raise UserError(
                f"step.update after {self._backwards} of {len(self.micros)} backward calls; "
                "iterate the whole step and call step.backward on every micro batch"
            )
        if self._updated:
            raise UserError(f"step.update was called twice for step {self.number}; call it once")
        self._updated = True
        session.check_optimizer(optimizer)
        reshard(session.applied.outer)  # a forward without a backward would leave stale weights gathered
        session.finish_gradients()
        if session.steps_done == session.first_step:
            session.check_unused()
        if session.scaler is not None:
            session.scaler.unscale_(optimizer)
        session.notify("on_gradients", self)
        norm = session.clip(clip_norm) if clip_norm is not None else None
        if self._loss_work is not None:
            self._loss_work.wait()
        result = StepResult(self.number, self.tokens, self._loss_sum, norm)
        if session.device.type == "cpu":
            check_finite(result, scaled=session.scaler is not None)
        session.phase = "optimizer"
        if session.scaler is not None:
            session.scaler.step(optimizer)
            session.scaler.update()
        else:
            optimizer.step()
        session.phase = "control"
        session.steps_done = self.number
        session.stream.batches += self.batches
        session.notify("on_step_end", self)
        optimizer.zero_grad()
        session.in_step = False
        return result


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model`` on the inputs of a micro batch, whatever they are packed in."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def _refuse_mean(loss: torch.Tensor, micro: Micro) -> None:
    """A mean would be normalised twice; where autograd shows that the loss is one, it is refused."""
    node = loss.grad_fn
    is_mean = node is not None and (
        node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1  # at::Reduction::Mean
    )
    if is_mean:  # whatever the number of labels, so that no rank goes on alone
        raise UserError(
            f"step.backward got a mean ({node.name() if node else ''}) over {micro.num_tokens} labels; it normalises "
            "itself, by the labels of the whole global batch: pass the sum, with reduction='sum'"
        )


def check_finite(result: StepResult, *, scaled: bool = False) -> None:
    """Stop at a loss or a norm that is not a number (an overflowing norm is fp16 scaling's normal business).

    Raises:
        TrainingError: with the step, the value and what usually helps.
    """
    wrong = None
    if result.tokens and not math.isfinite(result.loss):
        wrong = f"the loss is {result.loss}"
    elif not scaled and result.grad_norm is not None and not math.isfinite(result.grad_norm):
        wrong = f"the gradient norm is {result.grad_norm} (loss {result.loss:.4g})"
    if wrong:
        raise TrainingError(
            f"step {result.number}: {wrong}; the weights of the last good checkpoint are untouched. "
            "Try a lower optimizer.lr, more optimizer.warmup_steps or a smaller optimizer.clip_norm"
        )


@dataclass
class Session:
    """A training session on this rank; make one with ``shardwise.start``.

    ``plan`` is known after `prepare`. ``phase`` says what the session is doing, for those who watch it; who must know
    the moment that it changes puts a function into ``phase_watchers``.
    """

    ranks: Ranks
    planner: Planner
    observers: list[Observer] = field(default_factory=list)
    steps_done: int = 0
    first_step: int = 0
    phase_watchers: list[Callable[[str], None]] = field(default_factory=list)
    stopped: bool = False
    scaler: torch.amp.GradScaler | None = None
    saver: Saver | None = None
    in_step: bool = False
    _stream: Stream | None = None
    _plan: Plan | None = None
    _applied: Applied | None = None
    _optimizer: Optimizer | None = None
    _trainable: list[nn.Parameter] = field(default_factory=list)
    _stop_asked: bool = False
    _phase: str = "control"

    @property
    def phase(self) -> str:
        """``forward``, ``backward``, ``clip``, ``optimizer``, or ``control`` between them."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        """Change the phase, and tell those who watch."""
        self._phase = name
        for watcher in self.phase_watchers:
            watcher(name)

    @property
    def stream(self) -> Stream:
        """Where the loop stands in its data."""
        if self._stream is None:
            self._stream = Stream(self.ranks, self.device, (self.place.dp, self.dp))
        return self._stream

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.ranks.device

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        if self._plan is None:
            raise UserError("session.plan is known after session.prepare(model, optimizer)")
        return self._plan

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.plan.dims.dp

    @property
    def place(self) -> Place:
        """Where this rank stands on each axis of the plan."""
        return self.plan.dims.place(self.ranks.rank)

    @property
    def reduced_ranks(self) -> int:
        """Ranks whose gradients are averaged: those that see different tokens."""
        return self.plan.dims.dp * self.plan.dims.cp

    @property
    def applied(self) -> Applied:
        """The model as it stands under the plan."""
        if self._applied is None:
            raise UserError("call session.prepare(model, optimizer) first")
        return self._applied

    @property
    def module(self) -> nn.Module:
        """The user's own module, without DDP around it."""
        return self.applied.module

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that `prepare` returned."""
        if self._optimizer is None:
            raise UserError("call session.prepare(model, optimizer) first")
        return self._optimizer

    @property
    def spec(self) -> ModelSpec:
        """Structural facts of the model."""
        return self.applied.spec

    def prepare(self, model: nn.Module, optimizer: Optimizer, sample: Any = None) -> tuple[nn.Module, Optimizer]:
        """Put the model under the plan and point the optimizer at its parameters.

        Weights are rank 0's. Build learning-rate schedulers from the optimizer that is returned. ``sample`` is what
        the model takes for one micro batch, as the loader gives it; tensor, pipeline and context parallel look at one
        forward of it (values do not matter), of token ids [1, length] if it is left out.

        Raises:
            ModelError: the session has a model already, or the model does not allow the plan.
        """
        if self._applied is not None:
            raise ModelError("session.prepare was called before; a session trains one model")
        self._plan = self.planner(model, optimizer)
        names = parameter_names(model)
        self._applied = apply(model, self._plan, self.device, sample)
        self._optimizer = apply_to_optimizer(optimizer, names, self._applied, self._plan)
        self._trainable = [p for p in self._applied.module.parameters() if p.requires_grad]
        self.scaler = grad_scaler(self._plan)
        if self.scaler is not None and not all(row[0] for row in gather_ints([len(self._trainable)], self.ranks)):
            raise ModelError("fp16 needs parameters to train on every pipeline stage, and one has none; use bf16")
        if self.ranks.is_main:
            for note in self._applied.warnings:
                logging.getLogger("shardwise").warning(note)
        self.notify("on_prepared")
        return self._applied.outer, self._optimizer

    def steps(
        self, loader: Iterable[Any], *, limit: int | None = None, count: Callable[[Any], int] = count_labels
    ) -> Iterator[Step]:
        """One `Step` for each global batch of ``loader``, which yields micro batches.

        Args:
            loader: yields ``(inputs, labels)`` or dicts with ``labels``. Each rank is given its own share, unless the
                loader has a ``DistributedSampler``.
            limit: stop after this many steps.
            count: number of loss terms that labels stand for; integer labels other than ``-100``, else samples.
        """
        share = windows(self.stream.open(loader), self.plan.grad_accum)
        return self.run_windows(share, limit=limit, count=count)

    def run_windows(
        self, share: Iterable[list[Any]], *, limit: int | None = None, count: Callable[[Any], int] = count_labels
    ) -> Iterator[Step]:
        """As `steps`, from windows that are this rank's own already."""
        source, last = iter(share), None
        if self._applied is not None:  # of a loop that was left in the middle of a step
            discard_gradients(self.applied.outer)
        self.first_step, self.in_step = self.steps_done, False
        while limit is None or limit > 0:
            micros = [self._micro(batch, count) for batch in next(source, [])]
            last = micros[-1] if micros else last
            tokens, ready = sum(m.num_tokens for m in micros), int(last is not None)
            rows = gather_ints([tokens, len(micros), int(self._stop_asked), ready], self.ranks)
            if any(stop for _, _, stop, _ in rows):
                self.stopped = True
                return
            length = max(number for _, number, _, _ in rows)
            if length == 0:
                return
            starved = [rank for rank, row in enumerate(rows) if not row[3]]
            if starved or last is None:
                raise DataError(
                    f"rank {starved[0]} got no batch at all while others did: fewer batches than ranks; "
                    "use a smaller batch size or fewer ranks"
                )
            micros += [Micro(last.inputs, last.labels, num_tokens=0, filler=True)] * (length - len(micros))
            number = self.steps_done + 1
            step = Step(self, number, micros, *self._in_all(rows))
            self.in_step = True
            self.notify("on_step_start", step)
            try:
                yield step
            finally:
                if self.steps_done != number:
                    self.notify("on_step_abandoned", step)
            if self.steps_done != number:
                raise UserError(f"step {number} ended without step.update(optimizer); call it once for each step")
            limit = None if limit is None else limit - 1

    def _in_all(self, rows: list[list[int]]) -> tuple[int, int]:
        """Labels and micro batches of all ranks, those that several ranks work on together counted once."""
        places = [self.plan.dims.place(rank) for rank in range(len(rows))]
        once = [(place, row) for place, row in zip(places, rows, strict=True) if place.tp == place.pp == 0]
        return sum(row[0] for _, row in once), sum(row[1] for place, row in once if place.cp == 0)

    def save(
        self,
        folder: str | Folder,
        *,
        state: dict[str, Any] | None = None,
        keep: int = 2,
        async_save: bool = False,
    ) -> Folder:
        """Save model, optimizer, generators and the place in the data as ``folder/step-00000020``. Collective.

        To be called between two steps. ``folder`` is on a disk that all ranks see, or a URL (``s3://...``). ``state``
        is the caller's own, as JSON (rank 0's is kept). The ``keep`` newest checkpoints stay. With ``async_save``
        training goes on while it is written; the next save, or `close`, waits for it and raises what went wrong.

        Raises:
            UserError: in the middle of a step, or the folder cannot be written to or is another run's.
            CheckpointError: a rank could not write its part. Earlier checkpoints stay.
        """
        folder = folder_of(folder)
        wanted = (str(folder), keep, async_save)
        if self.saver is not None and (str(self.saver.folder), self.saver.keep, self.saver.async_save) != wanted:
            self.saver.close()
            self.saver = None
        if self.saver is None:
            self.saver = Saver(folder, keep=keep, async_save=async_save, guarded=True)
        return save_session(self, self.saver, state)

    def load(self, folder: str | Folder, *, verify: bool = True) -> dict[str, Any] | None:
        """Go on from the newest checkpoint in ``folder``: returns the caller's state, ``None`` where there is none.

        Collective; after `prepare` and before the first `steps`. Strategy and world size may be others than before.
        Passes over the data that were done yield no steps, and the one that was under way goes on at the micro batch
        where it stood, whatever the number of ranks: no sample comes twice, and none is left out. The order of later
        passes is that of the uninterrupted run too, on another number of ranks only if the loader shuffles by a
        ``generator`` of its own: the global one also serves dropout, of which each rank has its share. Under ``ddp``
        and ``zero1`` on three ranks or more the first step afterwards is summed in another order: last digits differ.

        Raises:
            UserError: a pass has begun, or it is no checkpoint of `save`.
            CheckpointError: it is damaged, or of another model or optimizer.
        """
        return load_session(self, folder, verify)

    def stop(self) -> None:
        """Ask for the end at the next step's border; one rank's wish stops all. Safe in a signal handler."""
        self._stop_asked = True

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop; collective, and remembered as ``stopped``."""
        self.stopped = self.stopped or any(row[0] for row in gather_ints([int(self._stop_asked)], self.ranks))
        return self.stopped

    def close(self) -> None:
        """Leave the world: ends a save that is under way, destroys the group if the session made it, and lets go of the
        model.

        Raises:
            CheckpointError: the last save, in the background, went wrong.
        """
        saver, self.saver = self.saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        leave(self.ranks)
        self._applied = self._optimizer = None
        self._trainable = []
        self.observers, self.phase_watchers = [], []

    def check_unused(self) -> None:
        """DDP waits for the gradient of every parameter; one that takes no part in the loss is said by name.

        Raises:
            ModelError: after the first step, before PyTorch would fail in the second.
        """
        if not isinstance(self.applied.outer, DistributedDataParallel):
            return
        unused = [clean_name(name) for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise ModelError(
                f"{', '.join(unused[:3])}{more} got no gradient: they take no part in the loss, and "
                f"{self.plan.strategy} waits for them; freeze them with requires_grad_(False), or use fsdp"
            )

    def begin_micro(self, *, last: bool) -> None:
        """Called by `Step` before each micro batch."""
        set_gradient_sync(self.applied.outer, last or self.plan.syncs_every_micro_batch)
        self.phase = "forward"

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most ``clip_norm``; returns the norm before that, 0-d."""
        self.phase = "clip"
        home, meshes = home_of(self.module), self.applied.meshes
        if home is not None and meshes is not None:
            named = [(clean_name(name), p) for name, p in self.module.named_parameters() if p.requires_grad]
            norm = global_norm(named, home, meshes)
            scale_to(self._trainable, clip_norm, norm)
            return norm
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(self._trainable, clip_norm, norm)
        return norm

    def finish_gradients(self) -> None:
        """What the model's own axes still have to add up, once all backwards of a step are done."""
        if home_of(self.module) is None:
            return
        self.phase = "backward"
        finish_partial(self._trainable)
        if self.applied.pipeline is not None:
            self.applied.pipeline.finish_gradients()
        self.phase = "control"

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """The optimizer must be the one that `prepare` returned: another one would step stale parameters."""
        if optimizer is not self._optimizer:
            raise UserError(
                "step.update got another optimizer than session.prepare returned; "
                "write `model, optimizer = session.prepare(model, optimizer)`"
            )

    def notify(self, event: str, *args: Any) -> None:
        """Tell every observer."""
        for observer in self.observers:
            getattr(observer, event)(self, *args)

    def _micro(self, batch: Any, count: Callable[[Any], int]) -> Micro:
        inputs, labels = split_batch(batch)
        if self.plan.dims.cp > 1:
            inputs, labels = sequence_share((inputs, labels), self.plan.dims.cp, self.place.cp)
        number = count(labels)
        if self.device.type != "cpu":
            inputs, labels = _pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(self.device, non_blocking=True), (inputs, labels)
            )
        return Micro(inputs=inputs, labels=labels, num_tokens=number)
