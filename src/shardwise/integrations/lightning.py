"""Receipts, a check of gradients, and `ShardwiseStrategy` for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import lightning

from shardwise.errors import UserError
from shardwise.integrations.lightning_strategy import ShardwiseStrategy as ShardwiseStrategy
from shardwise.observation.collect import torch_optimizers
from shardwise.observation.expected_settings import expectation_of, of_lightning
from shardwise.observation.gradient_check import GradientCheck, option_problems
from shardwise.observation.observer import LoopObserver, OnDifference, observe, print_after_output
from shardwise.observation.window_replay import Closures
from shardwise.receipts.receipt import Receipt


class LightningReceiptCallback(lightning.Callback):  # type: ignore[misc]
    """Callback that compares the first two optimizer steps with the Trainer's settings, and prints the receipt.

    Args:
        on_difference: ``report``, or ``error`` to end the training on every rank, after step 2, if a line is false.
        expect: what was meant, in place of the Trainer's strategy and precision; see `shardwise.observe`.
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
            raise UserError(f"LightningReceiptCallback: on_difference = {on_difference!r}: use report or error")
        expectation_of(expect, {})  # a mistake in it is an error now, not after the data is prepared
        self._on_difference, self._expect, self._on_receipt = on_difference, expect, on_receipt
        self._output = output
        self._observer: LoopObserver | None = None

    @property
    def receipt(self) -> Receipt | None:
        """Receipt after step 2, the same on every rank; ``None`` before."""
        return None if self._observer is None else self._observer.receipt

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to observe the prepared model and optimizers."""
        self._detach()
        stated = of_lightning(trainer.strategy, str(trainer.precision)) if self._expect is None else self._expect
        expected = expectation_of(stated, {})
        accum = _accumulation(trainer)
        batches = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_progress.current.completed
        automatic = bool(getattr(pl_module, "automatic_optimization", True))
        if expected.grad_accum is None and automatic and batches >= 2 * accum:  # the end of an epoch shortens a step
            expected = expected.model_copy(update={"grad_accum": accum})
        norm = trainer.gradient_clip_val
        if (
            expected.clip_norm is None
            and automatic
            and norm
            and str(trainer.gradient_clip_algorithm or "norm") != "value"
        ):
            expected = expected.model_copy(update={"clip_norm": float(norm)})
        self._observer = observe(
            trainer.strategy.model, trainer.optimizers, expected, on_receipt=self._on_receipt, output=self._output
        )

    def on_train_batch_end(self, *_: Any) -> None:
        """Raise what differs, if asked to.

        Raises:
            ReceiptError: a line of the receipt is false.
        """
        if self._on_difference == "error" and self.receipt is not None and not self.receipt.ok:
            self._detach()
            self.receipt.require()

    def on_exception(self, *_: Any) -> None:
        """Remove what is left of a training that failed."""
        self._detach()

    def on_train_end(self, *_: Any) -> None:
        """Remove what is left of a training of fewer than two steps, and log that it has no receipt."""
        if self._observer is not None:
            self._observer.end()

    def _detach(self) -> None:
        if self._observer is not None:
            self._observer.detach()


def _accumulation(trainer: Any) -> int:
    """Return the micro batches of a step; a scheduler among the callbacks sets them when the epoch begins."""
    for one in trainer.callbacks:
        if hasattr(one, "get_accumulate_grad_batches"):
            return int(one.get_accumulate_grad_batches(trainer.current_epoch))
    return int(trainer.accumulate_grad_batches)


class LightningGradientCallback(lightning.Callback):  # type: ignore[misc]
    """Callback that compares the gradients of one optimizer step with those of one process: see `check_gradients`.

    It records ``training_step``, whose loss is the mean over its own batch, and replays it in a copy of the module
    without its trainer: what ``self.log`` is given then goes nowhere. Automatic optimization only.

    Args:
        step: which of the training's steps is checked.
        items: called with the arguments of ``training_step``: how many items the mean is over.
        on_difference: ``report``, or ``error`` to raise on every rank, before the step, if the gradient is wrong.
        on_report: called on rank 0 with the report, in place of printing it.
    """

    def __init__(
        self,
        *,
        step: int = 1,
        items: Callable[..., Any] | None = None,
        on_difference: OnDifference = "report",
        on_report: Callable[[Receipt], None] = print_after_output,
    ) -> None:
        if problems := option_problems(step, on_difference):
            raise UserError("LightningGradientCallback: " + "; ".join(problems))
        self._step, self._items, self._on_difference, self._on_report = step, items, on_difference, on_report
        self._check: GradientCheck | None = None

    @property
    def report(self) -> Receipt | None:
        """Report after the step that is checked, the same on every rank; ``None`` before."""
        return None if self._check is None else self._check.report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record the losses of the prepared module.

        Raises:
            UserError: the module steps its optimizers itself.
        """
        if not pl_module.automatic_optimization:
            raise UserError("LightningGradientCallback: automatic_optimization = False; call shardwise.check_gradients")
        live = pl_module.training_step

        def replayed(module: Any, *args: Any, **kwargs: Any) -> Any:
            return type(module).training_step(module, *args, **kwargs)

        def trained(_: Any, *args: Any, **kwargs: Any) -> Any:
            return live(*args, **kwargs)

        check = GradientCheck(
            trainer.strategy.model,
            torch_optimizers(trainer.optimizers),
            Closures(replayed, replayed, self._items, trained),
            step=self._step,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            absent=(trainer,),
            on_difference=self._on_difference,
            on_report=self._on_report,
        )
        self._check = check
        pl_module.training_step = lambda *args, **kwargs: check(pl_module, *args, **kwargs)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module its own ``training_step`` back; log if the step that is checked never came."""
        if self._check is not None:
            self._check.end()
            pl_module.__dict__.pop("training_step", None)
