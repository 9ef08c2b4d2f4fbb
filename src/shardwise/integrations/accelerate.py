"""`observe` for Accelerate: what the `Accelerator` has prepared, against what it was asked for."""

from __future__ import annotations

from typing import Any

from shardwise.errors import UserError
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
    return observe_loop(models[0], list(optimizers), accelerator if expect is None else expect, **options)
