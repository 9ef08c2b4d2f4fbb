"""Optimizer step: its micro batches, their backward passes, and the update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.control_message import collective_of
from shardwise.errors import UserError
from shardwise.model.call_module import call
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.parallel.engines.engine import Engine
from shardwise.train.nonfinite.nonfinite_error import NonFiniteError
from shardwise.train.nonfinite.replay_step import explained, random_state
from shardwise.train.session_interface import TrainingSession

_LOOKED_AT = 8  # parameters, for one with a gradient: under fsdp none may have it before the last micro batch
_NEVER_HALVED = ("NllLossBackward0", "NllLoss2DBackward0", "BinaryCrossEntropyWithLogitsBackward0", "CtcLossBackward0")
"""Losses whose sum nobody divides by a small number on purpose, as a half of a squared error is."""


@dataclass(frozen=True)
class Micro:
    """Micro batch on this rank, on the device.

    ``num_tokens`` counts the labels that take part in the loss. A ``padding`` pads the step on a rank that has run out
    of data while others have not: it is computed, with weight 0 and count 0. Unpacks as ``inputs, labels``.
    """

    inputs: Any
    labels: Any
    num_tokens: int
    padding: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter((self.inputs, self.labels))


class StepResult:
    """Result of a step. Reading ``loss`` or ``grad_norm`` waits for the device."""

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
        """Global norm of the gradient before clipping; ``None`` without ``clip_norm``."""
        return None if self._grad_norm is None else float(self._grad_norm.item())

    def __repr__(self) -> str:
        norm = "" if self._grad_norm is None else f", grad_norm={self.grad_norm:.4g}"
        return f"StepResult(number={self.number}, tokens={self.tokens}, loss={self.loss:.6g}{norm})"


class Step:
    """Optimizer step: iterate its micro batches, call `backward` on each, then `update` once.

    ``number`` counts from 1, ``tokens`` and ``batches`` are the labels and the micro batches in the full global batch,
    ``micros`` are this rank's. ``processed`` are the tokens of the full global batch, with or without a label; ``None``
    where only the labels are known. ``clip_norm`` is the argument of `update`, and ``result`` what it returns.
    ``random_state``, ``losses`` and ``ran``, the arguments of `run`, are for a replay.
    """

    def __init__(
        self, session: TrainingSession, number: int, micros: list[Micro], tokens: int, batches: int = 0
    ) -> None:
        self.number = number
        self.tokens = tokens
        self.batches = batches
        self.processed: int | None = None
        self._session = session
        self.micros = micros
        self._current = -1
        self._backwards = 0
        self._kept: nn.Parameter | None = None  # has a gradient after a backward, unless it was cleared
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=session.device)
        self._updated = False
        self.result: StepResult | None = None
        self.clip_norm: float | None = None
        self.random_state = random_state(session.device)
        self.losses: list[torch.Tensor] = []
        self.ran: tuple[nn.Module, Callable[[Any, Any], torch.Tensor]] | None = None

    def again(self) -> Step:
        """Return the step anew, on the same micro batches."""
        return Step(self._session, self.number, self.micros, self.tokens, self.batches)

    @property
    def micro(self) -> int:
        """Number of the current micro batch, from 1; 0 before the first, and in a pipeline."""
        return self._current + 1

    def __iter__(self) -> Iterator[Micro]:
        """Yield each micro batch in turn; gradients synchronise during the backward of the last one."""
        if self._session.applied.pipeline is not None:
            raise UserError(
                f"{self._session.plan.strategy} runs all micro batches of a step through the stages together: replace "
                "the loop over the step by step.run(model, loss_fn)"
            )
        for index, micro in enumerate(self.micros):
            self._current = index
            self._session.micros_left = len(self.micros) - 1 - index
            self._session.begin_micro(last=index == len(self.micros) - 1, padding=micro.padding)
            yield micro

    def backward(self, loss_sum: torch.Tensor, count: int | None = None) -> None:
        """Run backward of this micro batch's summed loss, normalised by the global count of labels.

        Args:
            loss_sum: 0-d; the sum (not the mean) of the loss over this micro batch.
            count: the number of terms in that sum, as a check against ``micro.num_tokens``.

        Raises:
            UserError: ``count`` differs from the agreed number, or the loss is not a scalar.
        """
        session, micro = self._session, self.micros[self._current]
        if isinstance(loss_sum, DTensor):
            raise UserError(
                "step.backward got a loss with sharded weights (DTensor), such as a penalty "
                "on model.parameters(); compute it in the model's forward, use weight_decay, or ddp or zero1"
            )
        if loss_sum.ndim != 0:
            shape = tuple(loss_sum.shape)
            raise UserError(f"step.backward needs a 0-d summed loss, got shape {shape}; use reduction='sum'")
        if count is not None and int(count) != micro.num_tokens and not micro.padding:
            raise UserError(
                f"step.backward: count={int(count)}, but the micro batch has {micro.num_tokens} labels that count; "
                "pass micro.num_tokens, or set session.steps(loader, count=...) to count labels"
            )
        if self._kept is not None and self._kept.grad is None:
            raise UserError(
                "optimizer.zero_grad() between two micro batches of a step has discarded the gradients of the first; "
                "leave it out: step.update clears them"
            )
        if self._backwards != self._current:
            raise UserError(
                f"step.backward was called {self._backwards} times before micro batch {self._current}; "
                "call it once for each micro batch"
            )
        _refuse_mean(loss_sum, micro, session.plan.grad_accum)
        session.check_forward()
        session.meet_before_backward()
        session.agreement.begin_backward()
        self._backwards += 1
        self.losses.append(loss_sum.detach())
        loss = loss_sum * self.weight(micro)
        session.phase = "backward"
        with collective_of(session.ranks.control):
            self._run_backward(loss)
        if not micro.padding and session.place.tp == 0:  # tensor-parallel ranks have the same loss
            self._loss_sum += loss_sum.detach()
        session.agreement.finish_backward()
        if self._backwards < len(self.micros) and session.applied.engine is None:
            some = itertools.islice(session.module.parameters(), _LOOKED_AT)
            self._kept = next((p for p in some if p.grad is not None), None)
        session.phase = "other"  # collectives of the user's code between micro batches are not the plan's traffic
        if self._backwards == len(self.micros):
            session.agreement.send(self._loss_sum)

    def _run_backward(self, loss: torch.Tensor) -> None:
        session = self._session
        if session.applied.engine is not None:
            session.applied.engine.backward(loss)
        else:
            with nullcontext() if session.in_backward is None else session.in_backward.running():
                (loss if session.scaler is None else session.scaler.scale(loss)).backward()

    def weight(self, micro: Micro) -> float:
        """Return the loss factor that makes the mean over ranks the mean over all global labels."""
        session = self._session
        return 0.0 if micro.padding or not self.tokens else session.reduced_ranks / self.tokens

    def run(self, model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        """Run forward and backward of every micro batch; required under pipeline parallel.

        Args:
            model: the model from `Session.prepare`; called with the inputs (a tuple's or a dict's parts as arguments).
            loss_fn: outputs and labels to the summed loss, 0-d.
        """
        session, pipeline = self._session, self._session.applied.pipeline
        self.ran = model, loss_fn
        if pipeline is None:
            for micro in self:
                self.backward(loss_fn(call(model, micro.inputs), micro.labels), count=micro.num_tokens)
            return
        if self._backwards:
            raise UserError(f"step.run was called twice for step {self.number}; call it once")

        def checked(outputs: Any, labels: Any) -> torch.Tensor:
            loss = loss_fn(outputs, labels)
            if loss.ndim != 0:
                raise UserError(f"step.run: loss_fn returned shape {tuple(loss.shape)}; it must sum to a 0-d loss")
            _refuse_mean(loss, self.micros[0], session.plan.grad_accum)
            return loss

        session.micros_left, session.phase = 0, "forward"
        scale = 1.0
        if session.scaler is not None:
            scale = float(session.scaler.scale(torch.ones((), device=session.device)))
        found = pipeline.train(self.micros, checked, lambda micro: self.weight(micro) * scale)
        session.phase = "other"
        if session.place.tp == 0:
            self._loss_sum += found.detach()
        self._current, self._backwards = len(self.micros) - 1, len(self.micros)
        session.agreement.send(self._loss_sum)
        with COMM_TIMER.part("pipeline"):  # the last stages finish before the first ones: their part of the bubble
            session.agreement.arrive()

    def update(self, optimizer: Optimizer, clip_norm: float | None = None) -> StepResult:
        """Clip by the global norm, step the optimizer (if the backward did not), clear gradients.

        Raises:
            NonFiniteError: the loss or the norm is not a number, with its source (on CPU before the weights are
                changed; on a GPU the caller sees it when it reads the result).
        """
        session = self._session
        if self._backwards != len(self.micros):
            raise UserError(
                f"step.update after {self._backwards} of {len(self.micros)} backward calls; "
                "iterate over the full step and call step.backward on every micro batch"
            )
        if self._updated:
            raise UserError(f"step.update was called twice for step {self.number}; call it once")
        if clip_norm is not None and session.in_backward is not None:
            raise UserError(
                f"step.update(clip_norm={clip_norm:g}): under optimizer_in_backward the weights are stepped before the "
                'norm of all gradients is known; leave clip_norm out (optimizer.clip_norm="none")'
            )
        self._updated, self.clip_norm = True, clip_norm
        session.check_optimizer(optimizer)
        reshard(session.applied.outer)  # a forward without a backward would leave stale weights gathered
        session.finish_gradients()
        with COMM_TIMER.part("control"):
            session.agreement.settle(self._loss_sum)
        if session.scaler is not None:
            with COMM_TIMER.part("clip"):
                session.scaler.unscale_(optimizer)
        session.notify("on_gradients", self)
        engine = session.applied.engine
        norm = session.clip(clip_norm) if clip_norm is not None and engine is None else None
        result = StepResult(self.number, self.tokens, self._loss_sum, norm)
        if session.device.type == "cpu":
            with explained(session, self):
                check_finite(result, scaled=session.scaler is not None)
        session.phase = "optimizer"
        if engine is not None:
            result = self._updated_by(engine, clip_norm)
        elif session.scaler is not None:
            session.scaler.step(optimizer)
            session.scaler.update()
        elif session.in_backward is None:
            optimizer.step()
        session.phase = "other"
        self.result = result
        session.steps_done = self.number
        session.stream.batches += self.batches
        session.stream.steps += 1
        session.notify("on_step_end", self)
        if engine is None:
            with COMM_TIMER.part("optimizer"):  # returning memory takes its time
                optimizer.zero_grad()
        session.in_step = False
        return result

    def _updated_by(self, engine: Engine, clip_norm: float | None) -> StepResult:
        """Clip and update through an engine; the norm is known only afterwards.

        Raises:
            NonFiniteError: the norm is not a number; the engine leaves the weights unchanged, or they are lost.
        """
        found = engine.update(clip_norm)
        norm = torch.tensor(found, dtype=torch.float64)
        check_finite(StepResult(self.number, self.tokens, self._loss_sum, norm))
        return StepResult(self.number, self.tokens, self._loss_sum, None if clip_norm is None else norm)


def _refuse_mean(loss: torch.Tensor, micro: Micro, grad_accum: int) -> None:
    """Refuse a mean, or a sum divided by the accumulation, where autograd shows that the loss is one.

    Both would be normalised twice. Only what no sum of a loss looks like is refused: a mean times a number may be a
    sum, and half a squared error is one.
    """
    divisor, node = _undivided(loss.grad_fn)
    if node is None:
        return
    reduction = getattr(node, "_saved_reduction", None)  # at::Reduction: 1 is the mean, 2 the sum
    kind = node.name()
    mean = kind == "MeanBackward0" or reduction == 1
    if mean and (divisor is None or divisor >= 1):  # whatever the number of labels, so that no rank continues alone
        also = "" if divisor is None else f" divided by {divisor:g}"
        raise UserError(
            f"step.backward got a mean ({kind}){also} over {micro.num_tokens} labels; it normalises itself, by the "
            "labels of the full global batch: pass the sum, with reduction='sum'"
        )
    if divisor == grad_accum > 1 and reduction == 2 and kind in _NEVER_HALVED:
        raise UserError(
            f"step.backward got a summed loss ({kind}) divided by {divisor:g}, which is grad_accum; it normalises "
            "itself, by the labels of all micro batches: leave the division out"
        )


def _undivided(node: Any) -> tuple[float | None, Any]:
    """Return the number that the last operation divides by, if it does, and the operation before it."""
    if node is None or node.name() != "DivBackward0":
        return None, node
    by = getattr(node, "_saved_other", None)
    if not isinstance(by, torch.Tensor) or by.ndim or by.device.type != "cpu":  # reading it must not wait for a device
        return None, node
    return float(by.detach()), node.next_functions[0][0]


def check_finite(result: StepResult, *, scaled: bool = False) -> None:
    """Stop at a non-finite loss or norm (an overflowing norm is normal under fp16 scaling).

    Raises:
        NonFiniteError: with the step, the value and what usually helps.
    """
    wrong = None
    if result.tokens and not math.isfinite(result.loss):
        wrong = f"the loss is {result.loss}"
    elif not scaled and result.grad_norm is not None and not math.isfinite(result.grad_norm):
        wrong = f"the gradient norm is {result.grad_norm} (loss {result.loss:.4g})"
    if wrong:
        raise NonFiniteError(result.number, wrong)
