"""`observe` for Accelerate: what the `Accelerator` has prepared, against what it was asked for."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from shardwise.errors import UserError
from shardwise.observation.expected_settings import expectation_of
from shardwise.observation.observer import LoopObserver
from shardwise.observation.observer import observe as observe_loop


def observe(accelerator: Any, expect: Any = None, **options: Any) -> LoopObserver:
    """Observe two steps of an Accelerate loop; call it after ``accelerator.prepare`` on every rank.

    Args:
        accelerator: has prepared one model, and its optimizers.
        expect: what was meant, in place of the accelerator's plugins; see `shardwise.observe`.
        options: those of `shardwise.observe`.

    Raises:
        UserError: it has prepared no model or no optimizer, or several models.
    """
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(models) != 1 or not optimizers:
        raise UserError(
            f"observe: the accelerator has prepared {len(models)} models and {len(optimizers)} optimizers; prepare one "
            "model and its optimizer first, or give shardwise.observe a model, its optimizer and expect=accelerator"
        )
    expected = expectation_of(accelerator if expect is None else expect, {})
    accum, batches = expected.grad_accum, [len(one) for one in accelerator._dataloaders if isinstance(one, Sized)]
    if accum is not None and accelerator.gradient_state.sync_with_dataloader and any(n < 2 * accum for n in batches):
        expected = expected.model_copy(update={"grad_accum": None})  # the end of an epoch shortens a step
    return observe_loop(models[0], list(optimizers), expected, **options)
