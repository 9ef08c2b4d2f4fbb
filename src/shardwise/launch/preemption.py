"""Stop requests by signals: SIGTERM and SIGUSR1 of a scheduler, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shardwise.errors import Preempted

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler takes a machine away; a run saves, and ends with `Preempted`."""

SAME_S = 5.0
"""Time in which several of them are one request: Slurm signals each process of a job, and torchrun forwards its own."""


class Terminated(KeyboardInterrupt):
    """A scheduler's signal while nothing can be saved yet."""


class StopSignals:
    """Handlers of a rank's stop signals; ``stop(signal)`` requests the end at the next step boundary.

    A scheduler's second request ends the process at once, so that an unfinished save is abandoned and the checkpoint
    before it stays the newest. Once ``saved`` is set, signals are ignored: torchrun sends SIGTERM to the other ranks
    as soon as one of them has exited.
    """

    def __init__(self, stop: Callable[[int], None]) -> None:
        self.saved = False
        self._stop = stop
        self._first = Repeated()
        for number in (signal.SIGINT, *PREEMPTING):
            signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.saved:
            return
        if number in PREEMPTING and self._first.repeated():
            os._exit(Preempted.exit_code)
        self._stop(number)


class Repeated:
    """Tell a second request from the same one that came by several ways."""

    def __init__(self) -> None:
        self._since: float | None = None

    def repeated(self) -> bool:
        """Count a request; return whether it is a second one."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since > SAME_S


@contextmanager
def terminated() -> Iterator[None]:
    """Raise `Terminated` in the main thread at a scheduler's signal inside, as Python does at Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = os.getpid()

    def stop(number: int, _: FrameType | None) -> None:
        if os.getpid() != mine:  # a forked worker, which a pool ends by SIGTERM
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated

    before: dict[signal.Signals, Any] = {number: signal.signal(number, stop) for number in PREEMPTING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
