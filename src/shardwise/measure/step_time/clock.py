"""A rank's time in parts: each moment counts as exactly one, so that they add up to what a stopwatch says.

On a CPU the host's own clock is read at every border. On a GPU the host runs ahead of the device, and what it waits for
says nothing: an event is put into the compute stream at every border, and the time between two events is what the
device spent there, idle or not. Nothing waits for the device; a lap is read when its last event has passed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from itertools import pairwise
from typing import Any

import torch

from shardwise.measure.step_time.timing import BETWEEN, PARTS

EARLY = "early_reduce"
"""The part of ``exposed_dp`` that reduces gradients before the last micro batch; folded into it in a `Timing`."""
COUNTED = (*PARTS, *BETWEEN, EARLY)
"""What a clock tells apart, in the order of a lap's numbers."""
_INDEX = {part: index for index, part in enumerate(COUNTED)}

Lap = list[int]
"""Nanoseconds of each of `COUNTED` between two borders of steps."""


class Clock(ABC):
    """Tells the parts of a rank's time. ``enter`` and ``leave`` nest inside of a phase; a new phase ends them all."""

    def __init__(self) -> None:
        self._current = _INDEX["other"]
        self._open: list[int] = []
        self._frozen = False

    def phase(self, part: str) -> None:
        """From now on it is ``part``, whatever was open."""
        self._frozen = part in BETWEEN
        self._open.clear()
        self._turn(_INDEX[part])

    def enter(self, part: str) -> None:
        """``part`` begins inside of what goes on; not told apart in what lies between steps."""
        self._open.append(self._current)
        self._turn(self._current if self._frozen else _INDEX[part])

    def leave(self) -> None:
        """What was entered last ends; nothing where a new phase has ended it already."""
        if self._open:
            self._turn(self._open.pop())

    @abstractmethod
    def _turn(self, part: int) -> None:
        """A border: from now on it is ``part``."""

    @abstractmethod
    def lap(self) -> None:
        """A step ends here."""

    @abstractmethod
    def take(self) -> Lap | None:
        """The oldest finished lap that was not taken yet; ``None`` where there is none (so far)."""


class HostClock(Clock):
    """The clock of a rank that computes on its CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._since = time.perf_counter_ns()
        self._spent = [0] * len(COUNTED)
        self._laps: deque[Lap] = deque()

    def _turn(self, part: int) -> None:
        now = time.perf_counter_ns()
        self._spent[self._current] += now - self._since
        self._since, self._current = now, part

    def lap(self) -> None:
        """A step ends here."""
        self._turn(self._current)
        self._laps.append(self._spent)
        self._spent = [0] * len(COUNTED)

    def take(self) -> Lap | None:
        """The oldest finished lap that was not taken yet."""
        return self._laps.popleft() if self._laps else None


class DeviceClock(Clock):
    """The clock of a rank that computes on a GPU: events on the stream that is current at a border."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spare: list[Any] = []
        self._marks: list[tuple[int, Any]] = [(self._current, self._event())]
        self._laps: deque[list[tuple[int, Any]]] = deque()

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _turn(self, part: int) -> None:
        if part != self._current:
            self._current = part
            self._marks.append((part, self._event()))

    def lap(self) -> None:
        """A step ends here."""
        border = self._event()
        self._laps.append([*self._marks, (self._current, border)])
        self._marks = [(self._current, border)]

    def take(self) -> Lap | None:
        """The oldest finished lap that was not taken yet; ``None`` while the device has not passed all of it."""
        # from the last on, which says it all where there is one stream; a loop with several may pass them in any order
        if not self._laps or not all(event.query() for _, event in reversed(self._laps[0])):
            return None
        marks = self._laps.popleft()
        spent = [0] * len(COUNTED)
        for (part, begin), (_, end) in pairwise(marks):
            spent[part] += round(begin.elapsed_time(end) * 1e6)
        self._spare += [event for _, event in marks[:-1]]  # the last one begins the next lap
        return spent


def clock_for(device: torch.device) -> Clock:
    """The clock of a rank that computes on ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
