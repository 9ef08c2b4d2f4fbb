"""Report when a rank starts and ends waiting for others, to an optional listener.

Free without one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Listener(Protocol):
    """Listener at the start and end of every wait and named work, on the thread of the event."""

    def enter(self, part: str) -> None:
        """Enter ``part``, nested in the current one."""

    def leave(self) -> None:
        """Leave the current part; the enclosing one continues."""


class Waits:
    """Waits of this process, which is one rank."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def enter(self, part: str) -> None:
        """Enter ``part`` until `leave`, or until a new phase of the step ends it."""
        if self.listener is not None:
            self.listener.enter(part)

    def leave(self) -> None:
        """Leave the part that was entered last."""
        if self.listener is not None:
            self.listener.leave()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Count time within the context as ``name`` (`shardwise.measure.step_time.timing`).

        Not in compiled code.
        """
        if torch.compiler.is_compiling() or self.listener is None:  # in this order: no code is recompiled for it
            return _NOTHING
        return _Part(self.listener, name)


class _Part(AbstractContextManager[None]):
    __slots__ = ("listener", "name")

    def __init__(self, listener: Listener, name: str) -> None:
        self.listener, self.name = listener, name

    def __enter__(self) -> None:
        self.listener.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.listener.leave()


_NOTHING: AbstractContextManager[None] = nullcontext()
COMM_TIMER = Waits()
EXPOSED_DP = "exposed_dp"
"""Part of waiting for data-parallel collectives."""
