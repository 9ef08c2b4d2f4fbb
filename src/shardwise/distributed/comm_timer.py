"""Where a rank begins and ends to wait for others, for whoever wants to know. Costs nothing where nobody does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Listener(Protocol):
    """Told of every border of a wait or of work that has a name of its own, on the thread where it happens."""

    def enter(self, part: str) -> None:
        """``part`` begins, inside of what was going on."""

    def leave(self) -> None:
        """It ends; what was going on before goes on."""


class Waits:
    """The waits of this process, which is one rank."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def enter(self, part: str) -> None:
        """``part`` begins; what is entered is left, or a new phase of the step ends it."""
        if self.listener is not None:
            self.listener.enter(part)

    def leave(self) -> None:
        """What was entered last ends."""
        if self.listener is not None:
            self.listener.leave()

    def part(self, name: str) -> AbstractContextManager[None]:
        """While it is open, time counts as ``name`` (`shardwise.measure.step_time.timing`); not in compiled code."""
        if torch.compiler.is_compiling() or self.listener is None:  # in this order: no code is compiled anew for it
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
WAITS = Waits()
