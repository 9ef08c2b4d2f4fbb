"""Clocks that split a rank's time into parts: each moment counts once, so parts add up.

On a CPU the host's own clock is read at every change. On a GPU the host runs ahead of the device, and its waits are
not informative: an event is recorded in the compute stream at every change, and the time between two events is what
the device spent there, idle or not. Nothing waits for the device; a lap is read when its last event has passed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from itertools import pairwise
from typing import Any

import torch

from shardwise.measure.step_time.timing import BETWEEN, PHASES

EARLY = "early_reduce"
"""Part of ``exposed_dp`` that reduces gradients before the last micro batch; merged into it in a `Timing`."""
COUNTED = (*PHASES, *BETWEEN, EARLY)
"""Parts that a clock separates, in the order of a lap's numbers."""
_INDEX = {part: index for index, part in enumerate(COUNTED)}

StepInterval = list[int]
"""Nanoseconds of each of `COUNTED` between two step ends."""


class Clock(ABC):
    """Clock of a rank's parts. ``enter`` and ``leave`` nest inside a phase.

    A new phase ends them all.
    """

    def __init__(self) -> None:
        self._current = _INDEX["other"]
        self._open: list[int] = []
        self._frozen = False

    def phase(self, part: str) -> None:
        """Switch to the phase ``part``, ending all open parts."""
        self._frozen = part in BETWEEN
        self._open.clear()
        self._turn(_INDEX[part])

    def enter(self, part: str) -> None:
        """Enter ``part`` inside the current one; between steps it is not separated."""
        self._open.append(self._current)
        self._turn(self._current if self._frozen else _INDEX[part])

    def leave(self) -> None:
        """Leave the part entered last; does nothing if a new phase has ended it already."""
        if self._open:
            self._turn(self._open.pop())

    @abstractmethod
    def _turn(self, part: int) -> None:
        """Switch to ``part``."""

    @abstractmethod
    def interval(self) -> None:
        """End a step."""

    @abstractmethod
    def take(self) -> StepInterval | None:
        """Return the oldest finished lap that was not returned yet; ``None`` if there is none yet."""


class HostClock(Clock):
    """Clock of a rank that computes on its CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._since = time.perf_counter_ns()
        self._spent = [0] * len(COUNTED)
        self._intervals: deque[StepInterval] = deque()

    def _turn(self, part: int) -> None:
        now = time.perf_counter_ns()
        self._spent[self._current] += now - self._since
        self._since, self._current = now, part

    def interval(self) -> None:
        """End a step."""
        self._turn(self._current)
        self._intervals.append(self._spent)
        self._spent = [0] * len(COUNTED)

    def take(self) -> StepInterval | None:
        """Return the oldest finished lap that was not returned yet."""
        return self._intervals.popleft() if self._intervals else None


class DeviceClock(Clock):
    """Clock of a rank that computes on a GPU: events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spare: list[Any] = []
        self._marks: list[tuple[int, Any]] = [(self._current, self._event())]
        self._intervals: deque[list[tuple[int, Any]]] = deque()

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _turn(self, part: int) -> None:
        if part != self._current:
            self._current = part
            self._marks.append((part, self._event()))

    def interval(self) -> None:
        """End a step."""
        border = self._event()
        self._intervals.append([*self._marks, (self._current, border)])
        self._marks = [(self._current, border)]

    def take(self) -> StepInterval | None:
        """Return the oldest finished lap; ``None`` until the device has passed all of its events."""
        # from the last on, which is sufficient with one stream; a loop with several may pass them in any order
        if not self._intervals or not all(event.query() for _, event in reversed(self._intervals[0])):
            return None
        marks = self._intervals.popleft()
        spent = [0] * len(COUNTED)
        for (part, begin), (_, end) in pairwise(marks):
            spent[part] += round(begin.elapsed_time(end) * 1e6)
        self._spare += [event for _, event in marks[:-1]]  # the last one begins the next lap
        return spent


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a rank that computes on ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
