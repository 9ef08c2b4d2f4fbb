"""`check_gradients`: one accumulation window of anybody's loop against a replay without sharding, in float64."""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.distributed.process_group import leave
from shardwise.errors import UserError
from shardwise.measure import state
from shardwise.measure.collectives import CollectiveRecorder
from shardwise.observation.collect import innermost, is_deepspeed, torch_optimizers
from shardwise.observation.gradient_window import GradientWindow
from shardwise.observation.loop_trace import before_update, remove_hooks
from shardwise.observation.micro_batches import MicroBatch, kept, kept_buffers, loss_of, on_tensors
from shardwise.observation.observer import OnDifference, control_group, print_after_output
from shardwise.observation.plain_copy import layers_around
from shardwise.observation.window_replay import Closures
from shardwise.receipts.receipt import Receipt

_LOG = logging.getLogger("shardwise")
_MOST_CALLS = 1000  # without a step: each keeps its micro batch


class GradientCheck:
    """Loss closure that records one accumulation window, and has it judged when the optimizer steps.

    Called as the closure itself; ``report`` is there, on every rank, after the first step. After it, or after `detach`,
    calls go straight through.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        closures: Closures,
        *,
        step: int = 1,
        scaler: Any = None,
        clip_norm: float | None = None,
        absent: tuple[object, ...] = (),
        on_difference: OnDifference = "report",
        on_report: Callable[[Receipt], None] = print_after_output,
    ) -> None:
        self.report: Receipt | None = None
        self._model, (self._root, self._wrapper) = model, innermost(model)
        self._closures, self._optimizers = closures, optimizers
        self._live = closures.live or closures.called
        self._scaler, self._clip_norm, self._absent = scaler, clip_norm, absent
        self._on_difference, self._on_report = on_difference, on_report
        self._ranks, self._step = control_group(), step
        self._batches: list[MicroBatch] = []
        self._raw: dict[int, torch.Tensor] = {}
        self._leftover = False
        self._scale, self._calls, self._records, self._to_come = 1.0, 0, True, step - 1
        last = optimizers[-1]
        self._is_main = not dist.is_initialized() or dist.get_rank() == 0  # at exit the group may be gone
        # of the text alone: a check that the program has dropped must not keep its model until the exit
        self._warn = functools.partial(
            _LOG.warning, f"check_gradients: no report, as the training ended before its step {step}"
        )
        if self._is_main:
            atexit.register(self._warn)
        self._hooks = [last.register_step_pre_hook(self._before_step), last.register_step_post_hook(self._after_step)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, and record the micro batch while the window lasts."""
        if not self._records or self._to_come or not torch.is_grad_enabled():
            return self._live(*args, **kwargs)
        if self._batches and self._was_skipped():
            self._batches, self._raw = [], {}  # this one begins anew
        self._calls += 1
        if self._calls > _MOST_CALLS:
            _LOG.warning(
                f"check_gradients: no report, as the optimizer made no step in {_MOST_CALLS} calls of the loss"
            )
            self.detach()
            return self._live(*args, **kwargs)
        stored, named = on_tensors((args, kwargs), kept)
        with _disable_current_modes(), torch.no_grad():
            buffers = kept_buffers(self._root)
        batch = MicroBatch(stored, named, torch.get_rng_state(), buffers)
        recorder = CollectiveRecorder(lambda: "forward")
        with recorder:
            result = self._live(*args, **kwargs)
        batch.dtypes = recorder.matmul_dtypes
        loss = loss_of(result)
        if loss is not None and loss.requires_grad:
            with _disable_current_modes():
                batch.loss = loss.detach().clone()
            loss.register_hook(lambda gradient: self._on_backward(batch, gradient))
        return result

    def detach(self) -> None:
        """Stop recording, and forget what was recorded."""
        self._end(None)

    def end(self) -> None:
        """Detach where the training has ended, and log on rank 0 if it never came to the step that is checked."""
        if self._records and self._is_main:
            self._warn()
        self.detach()

    def _end(self, running: Any) -> None:
        if not self._records:
            return
        atexit.unregister(self._warn)
        self._records, self._batches, self._raw = False, [], {}
        remove_hooks(self._hooks, self._root, running)
        if self._ranks is not None:
            leave(self._ranks)

    def __enter__(self) -> GradientCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end() if kind is None else self.detach()

    def _was_skipped(self) -> bool:
        """Return whether fp16's scaler has skipped a step: gradients were not finite, and are cleared."""
        left = (state.local(p.grad) for p in self._root.parameters() if p.grad is not None)
        if any(bool(gradient.count_nonzero()) for gradient in left):
            return False
        return self._scaler is not None or not all(bool(g.isfinite().all()) for g in self._raw.values())

    def _on_backward(self, batch: MicroBatch, gradient: torch.Tensor) -> None:
        if not self._records:
            return
        batch.weight = gradient.detach().clone()
        if not self._batches:
            left = [state.local(p.grad) for p in self._root.parameters() if p.grad is not None]
            with _disable_current_modes():
                self._leftover = any(bool(one.count_nonzero()) for one in left)
        if not any(one is batch for one in self._batches):
            self._batches.append(batch)
        engine = torch.autograd.Variable._execution_engine
        # twice: the wrapper's own callback, which ends its reduction, is queued between the two
        engine.queue_callback(lambda: engine.queue_callback(self._after_backward))

    def _after_backward(self) -> None:
        """Keep this rank's gradients; those after the last backward count."""
        with _disable_current_modes(), torch.no_grad():
            self._raw = {
                id(p): state.local(p.grad).detach().to("cpu", torch.float64, copy=True)
                for p in self._root.parameters()
                if p.grad is not None
            }
        scale = getattr(self._scaler, "get_scale", None)
        self._scale = float(scale()) if scale is not None else 1.0

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return before_update(args, kwargs, self._judge) if self._records and not self._to_come else None

    def _after_step(self, *_: Any) -> None:
        self._to_come = max(0, self._to_come - 1)  # only now: a step's closure computes its window inside of it

    def _judge(self) -> None:
        if not self._records:
            return
        window = GradientWindow(
            root=self._root,
            wrapper=self._kind(),
            closures=self._closures,
            batches=self._batches,
            raw=self._raw,
            scale=self._scale,
            leftover=self._leftover,
            clip_norm=self._clip_norm,
            aliases=layers_around(self._model, self._root),
            absent=self._absent,
            ranks=self._ranks,
        )
        try:
            with _disable_current_modes():
                self.report = window.judge()
        except Exception as error:  # of the loop's own parts; it goes on
            _LOG.warning(f"check_gradients: no report: {type(error).__name__}: {error}")
        finally:
            self._end(self._hooks[0])
        if self.report is None:
            return
        if self._is_main:
            self._on_report(self.report)
        if self._on_difference == "error":
            self.report.require()

    def _kind(self) -> str:
        if self._wrapper is not None:
            return "DDP"
        kinds = (("FSDP2", FSDPModule), ("FSDP1", FSDP1))
        return next((name for name, kind in kinds if any(isinstance(m, kind) for m in self._root.modules())), "none")


def option_problems(step: Any, on_difference: Any) -> list[str]:
    """Return what is impossible of the options that every check has."""
    problems = []
    if on_difference not in get_args(OnDifference):
        problems.append(f"on_difference = {on_difference!r}: use report or error")
    if not isinstance(step, int) or step < 1:
        problems.append(f"step = {step!r}: use the number of an optimizer step, from 1")
    return problems


def check_gradients(
    model: nn.Module,
    optimizer: Any,
    compute_loss: Callable[..., Any],
    *,
    items: Callable[..., Any] | None = None,
    step: int = 1,
    scaler: Any = None,
    clip_norm: float | None = None,
    on_difference: OnDifference = "report",
    on_report: Callable[[Receipt], None] | None = None,
) -> GradientCheck:
    """Compare one accumulation window's gradients with those of one process, in float64; name what differs.

    Call it on every rank, and call what it returns in place of ``compute_loss``. It records the micro batches until the
    optimizer's first step; then every rank replays its own on its CPU, in a copy of the model without DDP, FSDP or
    compilation, and the sums over ranks are compared with the loop's gradients. It changes nothing of the run.

    Args:
        model: as the loop calls it: plain, inside DDP or FSDP, or compiled.
        optimizer: the optimizer, or a sequence of them; the last one's step ends the window.
        compute_loss: gets the model among its arguments, and returns the loss of one micro batch, the mean or the sum
            over its items and not divided by the number of micro batches: a scalar, ``(loss, ...)``, ``{"loss": ...}``
            or an object with ``loss``.
        items: called like ``compute_loss``, without the model: how many items the mean of a micro batch is over. Left
            out, the labels that its cross entropy counts, else its rows.
        step: which of the optimizer's steps from now on ends the window.
        scaler: the loop's ``GradScaler``.
        clip_norm: norm that a loop without DDP or FSDP clips to.
        on_difference: ``report``, or ``error`` to raise on every rank, before the step, if the gradient is wrong.
        on_report: called on rank 0 with the report, in place of printing it.

    Raises:
        UserError: a setting is impossible.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"check_gradients: model = {model!r:.60}: give the model that the loop calls, an nn.Module")
    optimizers = torch_optimizers(optimizer)
    problems = option_problems(step, on_difference)
    function: Any = compute_loss  # it may be a loss
    if not callable(function):
        kind = type(function).__name__
        problems.append(f"compute_loss is a {kind}: give the function that returns the loss of a micro batch")
    if clip_norm is not None and not clip_norm > 0:
        problems.append(f"clip_norm = {clip_norm!r}: use a norm above 0, or leave it out")
    if any(isinstance(part, FSDP1) and not part._use_orig_params for part in model.modules()):
        problems.append("FSDP1 has use_orig_params = False, where PyTorch gives no whole gradients: use True")
    if any(is_deepspeed(part) for part in (model, *optimizers)):
        problems.append("the model is in DeepSpeed's engine, whose gradients are in buffers of its own")
    elif not optimizers or not all(hasattr(one, "register_step_pre_hook") for one in optimizers):
        problems.append("optimizer has no step hooks; give torch.optim optimizers, or wrappers around them")
    if problems:
        raise UserError("check_gradients: " + "; ".join(problems))
    return GradientCheck(
        model,
        optimizers,
        Closures(compute_loss, compute_loss, items),
        step=step,
        scaler=scaler,
        clip_norm=clip_norm,
        on_difference=on_difference,
        on_report=on_report or print_after_output,
    )
