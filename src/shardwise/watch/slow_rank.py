"""`SlowRank`: a rank that all others wait for, step after step; training goes on."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.measure.gpu.nvml import NvmlSource
from shardwise.measure.step_time.attribution import Attribution
from shardwise.measure.step_time.timing import NAMES, PHASES, WAIT_PHASES
from shardwise.units import seconds_text
from shardwise.watch.devices import held_down
from shardwise.watch.watch_events import add_event

WAITED = 0.5
"""Share of a step that the others must wait for one rank before it is called slow."""
STEPS, SECONDS = 3, 2.0
"""It must be the same rank in so many steps, and for so long: short steps vary."""
RECOVERED = 10
"""Steps in a row without waiting after which a slow rank is none."""
WARM_UP = 3
"""First steps, which are not judged: they compile and allocate."""
_WORK = tuple(part for part in PHASES if part not in (*WAIT_PHASES, "slowest_rank", "pipeline"))

Seconds = npt.NDArray[np.float64]


@dataclass
class SlowRank:
    """Rank 0's judge of each step's times. ``say`` prints a line; ``report`` keeps what it says.

    ``uuids`` are those of the GPUs of this node's ranks, the first ones, which ``source`` knows. A pipeline's stages
    wait for each other by design: nothing is said of them.
    """

    say: Callable[[str], None]
    report: Path
    uuids: Sequence[str] = ()
    source: NvmlSource | None = None
    _seen: int = 0
    _fine: int = 0
    _rank: int | None = None
    _named: int | None = None
    _steps: int = 0
    _sums: dict[str, Seconds] = field(default_factory=dict)

    @classmethod
    def attach(
        cls, attribution: Attribution, say: Callable[[str], None], report: Path, uuids: Sequence[str] = ()
    ) -> None:
        """Judge the steps that ``attribution`` measures."""
        attribution.on_step_times = cls(say, report, uuids).judge

    def judge(self, late: int | None, seconds: Mapping[str, Seconds]) -> None:
        """Take a step: the rank that was late, if any, and of each part the seconds of all ranks."""
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        step = float(np.stack([seconds[part] for part in PHASES]).sum(axis=0).mean())
        if late is None or np.median(np.delete(seconds["slowest_rank"], late)) < WAITED * step:
            self._fine += 1
            if self._named is None or self._fine >= RECOVERED:
                self._recovered()
            return
        self._fine = 0
        if late == self._named:
            return
        if late != self._rank:
            self._rank, self._steps = late, 0
            self._sums = {}
        self._steps += 1
        self._sums = {part: seconds[part] + self._sums.get(part, 0.0) for part in PHASES}
        if self._steps >= STEPS and sum(sums[late] for sums in self._sums.values()) >= SECONDS:
            self._named = late
            self._name(late)

    def _recovered(self) -> None:
        if self._named is not None:
            self.say(f"rank {self._named} is as fast as the others again")
        self._rank = self._named = None

    def _name(self, rank: int) -> None:
        columns = {part: (seconds / self._steps).tolist() for part, seconds in self._sums.items()}
        means = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        peers = [row for other, row in enumerate(means) if other != rank]
        more = {part: means[rank][part] - statistics.median(row[part] for row in peers) for part in _WORK}
        part = max(more, key=lambda one: more[one])
        step, waits = sum(means[rank].values()), statistics.median(row["slowest_rank"] for row in peers)
        text = (
            f"rank {rank} is slow: in the last {self._steps} steps the others waited for it {seconds_text(waits)} of "
            f"{seconds_text(step)}; {NAMES[part]} takes it {seconds_text(means[rank][part])}, and them "
            f"{seconds_text(means[rank][part] - more[part])}"
        )
        clock = self._clock(rank)
        reason, text = ("clock throttled", f"{text}; {clock}") if clock else ("slow rank", text)
        self.say(text)
        add_event(self.report, {"reason": reason, "ranks": [rank], "text": text, "seconds": means})

    def _clock(self, rank: int) -> str:
        """Why the clock of the rank's GPU is held down; empty if it is not, or unknown."""
        if rank >= len(self.uuids):
            return ""
        with contextlib.suppress(Exception):  # a run must not fail for this
            return held_down(self.uuids[rank], (self.source or NvmlSource()).brief())
        return ""
