"""`Devices`: what NVML and the kernel's log say of the GPUs of a node's ranks, beside the ranks."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.measure.gpu.nvml import GpuSource, GpuState, NvmlSource
from shardwise.measure.gpu.xids import MEANING, Xid, read_xids

LOST = (62, 79, 95, 119, 120)
"""Xid errors after which a GPU computes no more until it is reset or the machine restarted; see `MEANING`."""
_ANSWER_S = 3.0
_CARD = re.compile(r"([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.|$)")


def device_uuid(device: Any) -> str:
    """NVML's UUID of a CUDA device of torch's."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def write_device(folder: Path, rank: int, uuid: str) -> None:
    """Tell the monitor which GPU a rank computes on."""
    (folder / f"rank-{rank}.device").write_text(uuid, "ascii")


@dataclass
class Devices:
    """GPUs of this node's ranks, which write their UUIDs to ``rank-N.device`` in ``folder``; none on CPUs.

    What the kernel's log has before the first look is of an earlier time.
    """

    folder: Path
    source: GpuSource | None = None
    xids: Callable[[], tuple[Xid, ...] | None] = read_xids
    _before: Counter[tuple[str, int]] = field(default_factory=Counter)
    _buses: dict[str, str] = field(default_factory=dict)
    _known: bool = False

    def remember(self) -> None:
        """Read which GPUs there are and what the log has, once, while the ranks move."""
        if self._known or not self.ranks():
            return
        self._known = True
        states, xids = self._read()
        self._before = _counts(xids)
        self._buses = {one.uuid: one.bus.lower() for one in states or () if one.uuid and one.bus}

    def ranks(self) -> dict[int, str]:
        """UUID of each rank's GPU."""
        found = {}
        for file in self.folder.glob("rank-*.device"):
            with contextlib.suppress(OSError, ValueError):
                found[int(file.stem.removeprefix("rank-"))] = file.read_text("ascii")
        return found

    def lost(self) -> dict[int, str]:
        """Ranks whose GPU is lost, and how that is known; of what `remember` has not seen, nothing is said."""
        ranks = {rank: uuid for rank, uuid in self.ranks().items() if uuid in self._buses}
        if not ranks:
            return {}
        states, xids = self._read()
        fresh = _counts(xids) - self._before
        found = {}
        for rank, uuid in sorted(ranks.items()):
            bus = self._buses[uuid]
            numbers = [number for (at, number) in sorted(fresh) if number in LOST and _same(at, bus)]
            if numbers:
                what, fix = MEANING[numbers[0]]
                found[rank] = f"GPU ({bus}) is lost: Xid {numbers[0]}, {what}; {fix}"
            elif states is not None and uuid not in {one.uuid for one in states}:
                found[rank] = f"GPU ({bus}) is lost: the driver does not list it any more; restart the machine"
        return found

    def _read(self) -> tuple[Sequence[GpuState] | None, tuple[Xid, ...] | None]:
        """Ask with a limit on time, as a driver may not answer; ``None`` for what is unknown."""
        states: list[Sequence[GpuState]] = []
        xids: list[tuple[Xid, ...] | None] = []

        def ask() -> None:
            xids.append(self.xids())
            with contextlib.suppress(Exception):
                machine = (self.source or NvmlSource()).read()
                if machine.problem is None:
                    states.append(machine.gpus)

        thread = threading.Thread(target=ask, name="shardwise-watch-gpus", daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return (states[0] if states else None), (xids[0] if xids else None)


def held_down(uuid: str, states: Sequence[GpuState]) -> str:
    """Why a GPU's clock is below its maximum, if the hardware holds it down; empty if not, or if it is unknown."""
    one = next((state for state in states if state.uuid == uuid), None)
    if one is None or not one.throttled:
        return ""
    clocks = [one.sm_clock_hz, one.max_sm_clock_hz]
    speed = "" if None in clocks else " at {:.2f} of {:.2f} GHz".format(*(float(hz or 0) / 1e9 for hz in clocks))
    heat = "" if one.temperature_c is None else f", {one.temperature_c:.0f} °C"
    return f"its GPU's clock is held down{speed}{heat}: {', '.join(one.throttled)}"


def _counts(xids: tuple[Xid, ...] | None) -> Counter[tuple[str, int]]:
    return Counter({(one.bus, one.number): one.times for one in xids or ()})


def _same(bus: str, other: str) -> bool:
    """Whether two PCI addresses are of one card: domains have 4 or 8 digits, and a function may be missing."""
    cards = [_CARD.search(text.lower()) for text in (bus, other)]
    return cards[0] is not None and cards[1] is not None and cards[0].groups() == cards[1].groups()
