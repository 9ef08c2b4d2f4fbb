"""`ReceiptCallback` for transformers' Trainer and what is built on it, such as TRL's SFTTrainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from typing import Any, get_args

import transformers

from shardwise.errors import UserError
from shardwise.observation.expected_settings import expectation_of
from shardwise.observation.observer import LoopObserver, OnDifference, observe
from shardwise.receipts.receipt import Receipt

_LOG = logging.getLogger("shardwise")


class ReceiptCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that compares the first two steps with the ``TrainingArguments``, and prints the receipt on rank 0.

    Args:
        on_difference: ``report``, or ``error`` to end the training on every rank, after step 2, if a line is false.
        expect: what was meant, in place of the ``TrainingArguments``; see `shardwise.observe`.
        on_receipt: called on rank 0 with the receipt, in place of printing it.
    """

    def __init__(
        self,
        on_difference: OnDifference = "report",
        *,
        expect: Any = None,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        if on_difference not in get_args(OnDifference):
            raise UserError(f"ReceiptCallback: on_difference = {on_difference!r}: use report or error")
        self._on_difference, self._expect, self._on_receipt = on_difference, expect, on_receipt
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
        expected = expectation_of(args if self._expect is None else self._expect, {})
        loader = kwargs.get("train_dataloader")
        batches = len(loader) if isinstance(loader, Sized) else None
        if expected.grad_accum is not None and batches is not None and batches < 2 * expected.grad_accum:
            expected = expected.model_copy(update={"grad_accum": None})  # the end of an epoch shortens a step
        self._observer = observe(kwargs["model"], kwargs["optimizer"], expected, on_receipt=self._on_receipt)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise what differs, if asked to.

        Raises:
            ReceiptError: a line of the receipt is false.
        """
        if self._on_difference == "error" and self.receipt is not None:
            self.receipt.require()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove what is left of a training of fewer than two steps."""
        self._detach()

    def _detach(self) -> None:
        if self._observer is not None:
            self._observer.detach()
