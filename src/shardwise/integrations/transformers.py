"""`ReceiptCallback` and `check_gradients` for transformers' Trainer and what is built on it, as TRL's SFTTrainer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, get_args

import torch
import transformers

from shardwise.errors import UserError
from shardwise.observation.collect import is_deepspeed, torch_optimizers
from shardwise.observation.expected_settings import expectation_of
from shardwise.observation.gradient_check import GradientCheck, option_problems
from shardwise.observation.observer import LoopObserver, OnDifference, observe, print_after_output
from shardwise.observation.window_replay import Closures
from shardwise.receipts.receipt import Receipt

_LOG = logging.getLogger("shardwise")


class ReceiptCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that compares the first two steps with the ``TrainingArguments``, and prints the receipt on rank 0.

    Args:
        on_difference: ``report``, or ``error`` to end the training on every rank, after step 2, if a line is false.
        expect: what was meant, in place of the ``TrainingArguments``; see `shardwise.observe`.
        on_receipt: called on rank 0 with the receipt, in place of printing it.
        output: folder for the receipt and the times of steps, which ``shardwise report`` renders; see `observe`.
    """

    def __init__(
        self,
        on_difference: OnDifference = "report",
        *,
        expect: Any = None,
        on_receipt: Callable[[Receipt], None] | None = None,
        output: str | Path | None = None,
    ) -> None:
        if on_difference not in get_args(OnDifference):
            raise UserError(f"ReceiptCallback: on_difference = {on_difference!r}: use report or error")
        expectation_of(expect, {})  # a mistake in it is an error now, not after the data is prepared
        self._on_difference, self._expect, self._on_receipt = on_difference, expect, on_receipt
        self._output = output
        self._observer: LoopObserver | None = None

    @property
    def receipt(self) -> Receipt | None:
        """Receipt after step 2, the same on every rank; ``None`` before."""
        return None if self._observer is None else self._observer.receipt

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to observe the prepared model and optimizer."""
        self._detach()  # of a training that failed: the Trainer has no event for it
        if getattr(args, "torch_compile", False):  # the Trainer hides the compiled model around the one that it gives
            _LOG.warning("ReceiptCallback: no receipt, as torch_compile=True compiles the model with its hooks")
            return
        if any(is_deepspeed(one) for one in torch_optimizers(kwargs["optimizer"])):
            _LOG.warning("ReceiptCallback: no receipt, as the Trainer gives its callbacks no DeepSpeed engine")
            return
        expected = expectation_of(args if self._expect is None else self._expect, {})
        loader = kwargs.get("train_dataloader")
        batches = len(loader) if isinstance(loader, Sized) else None
        if (
            expected.grad_accum is not None
            and batches is not None
            and is_short(batches, expected.grad_accum, args, state)
        ):
            expected = expected.model_copy(update={"grad_accum": None})
        self._observer = observe(
            kwargs["model"], kwargs["optimizer"], expected, on_receipt=self._on_receipt, output=self._output
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise what differs, if asked to.

        Raises:
            ReceiptError: a line of the receipt is false.
        """
        if self._on_difference == "error" and self.receipt is not None and not self.receipt.ok:
            self._detach()
            self.receipt.require()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove what is left of a training of fewer than two steps, and log that it has no receipt."""
        if self._observer is not None:
            self._observer.end()

    def _detach(self) -> None:
        if self._observer is not None:
            self._observer.detach()


def is_short(batches: int, accum: int, args: Any, state: Any) -> bool:
    """Return whether the end of an epoch may shorten the second step from now on, also after a resumption."""
    if batches % accum == 0:
        return False
    if args.fp16 or batches < accum or (state.global_step and args.ignore_data_skip):
        return True  # the scaler skips steps
    step = (state.global_step + 1) % -(-batches // accum)
    return batches - step * accum < accum


class GradientCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that compares the gradients of one optimizer step with those of one process: see `check_gradients`.

    Args:
        trainer: its `compute_loss` is recorded, with ``num_items_in_batch`` as the loop gives it, and replayed as the
            mean over each micro batch's own items.
        step: which of the training's steps is checked.
        on_difference: ``report``, or ``error`` to raise on every rank, before the step, if the gradient is wrong.
        on_report: called on rank 0 with the report, in place of printing it.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        step: int = 1,
        on_difference: OnDifference = "report",
        on_report: Callable[[Receipt], None] = print_after_output,
    ) -> None:
        if problems := option_problems(step, on_difference):
            raise UserError("GradientCallback: " + "; ".join(problems))
        self._trainer, self._step = trainer, step
        self._on_difference, self._on_report = on_difference, on_report
        self._check: GradientCheck | None = None

    @property
    def report(self) -> Receipt | None:
        """Report after the step that is checked, the same on every rank; ``None`` before."""
        return None if self._check is None else self._check.report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record the losses of the prepared model."""
        self._detach()
        trainer = self._trainer
        if getattr(args, "torch_compile", False):
            _LOG.warning("GradientCallback: no report, as torch_compile=True compiles the model with its hooks")
            return
        if is_deepspeed(trainer.model_wrapped):
            _LOG.warning("GradientCallback: no report, as DeepSpeed keeps gradients in buffers of its own")
            return
        live = trainer.compute_loss

        def called(*given: Any, **named: Any) -> Any:
            return _alone(trainer).compute_loss(*given, **named)

        def mean(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return _alone(trainer).compute_loss(model, inputs)

        def items(inputs: Any, *_: Any, **__: Any) -> Any:
            return _alone(trainer)._get_num_items_in_batch([inputs], torch.device("cpu"))

        self._check = GradientCheck(
            trainer.model_wrapped,
            torch_optimizers(kwargs["optimizer"]),
            Closures(called, mean, items, live),
            step=self._step,
            scaler=getattr(trainer.accelerator, "scaler", None),
            on_difference=self._on_difference,
            on_report=self._on_report,
        )
        trainer.compute_loss = self._check

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the trainer its own ``compute_loss`` back; log if the step that is checked never came."""
        if self._check is not None:
            self._check.end()
        self._detach()

    def _detach(self) -> None:
        if self._check is not None:
            self._check.detach()
            if self._trainer.__dict__.get("compute_loss") is self._check:
                del self._trainer.compute_loss


def check_gradients(trainer: Any, **options: Any) -> GradientCallback:
    """Add a `GradientCallback` with ``options`` to ``trainer``, and return it; call it before ``trainer.train()``.

    Raises:
        UserError: ``trainer`` is none, or an option is impossible.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise UserError(
            f"check_gradients: trainer = {type(trainer).__name__}: give the Trainer; for a model and its optimizer "
            "use shardwise.check_gradients"
        )
    callback = GradientCallback(trainer, **options)
    trainer.add_callback(callback)
    return callback


class _OneProcess:
    """Accelerator that gathers from nobody else: a replay is one process."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any) -> Any:
        """Return this process's own."""
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return this process's own."""
        return tensor


def _alone(trainer: Any) -> Any:
    """Return a copy of the trainer whose losses leave no trace in its metrics."""
    made = copy.copy(trainer)
    made.__dict__.pop("compute_loss", None)
    made.accelerator = _OneProcess(trainer.accelerator)
    for name in ("_metrics", "_total_losses"):
        if name in made.__dict__:
            setattr(made, name, copy.deepcopy(made.__dict__[name]))
    return made
