"""`observe` for Lightning's Fabric: its strategy and precision are the expectation."""

from __future__ import annotations

from typing import Any

from shardwise.observation.expected_settings import of_lightning
from shardwise.observation.observer import LoopObserver
from shardwise.observation.observer import observe as observe_loop


def observe(fabric: Any, model: Any, optimizer: Any, expect: Any = None, **options: Any) -> LoopObserver:
    """Observe two steps of a Fabric loop; call it after ``fabric.setup`` on every rank.

    Args:
        fabric: its strategy and precision are what was meant, unless ``expect`` says it.
        model: from ``fabric.setup``.
        optimizer: from ``fabric.setup``, or a sequence of them.
        expect: see `shardwise.observe`.
        options: those of `shardwise.observe`.
    """
    stated = of_lightning(fabric.strategy, str(fabric._precision.precision)) if expect is None else expect
    return observe_loop(model, optimizer, stated, **options)
