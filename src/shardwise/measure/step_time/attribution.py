"""`Attribution`: where the time of every step goes, on every rank, always on.

Each rank's clock tells its parts apart; the numbers of a step travel in the message that the next one begins with, so
that nothing is sent for them, and rank 0 adds them up. What a rank waits for others longer than the one of its group
that waited least is ``slowest_rank``: nobody had to wait for a link that long. Within a step ranks may be late in turn,
and then some of that waiting stays with the link. A pipeline's stages wait for each other by design: theirs stays
``pipeline``.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.distributed.comm_timer import WAITS as PLACES
from shardwise.distributed.process_group import gather_ints
from shardwise.measure.step_time.clock import COUNTED, EARLY, Lap, clock_for
from shardwise.measure.step_time.comm_hooks import Borders
from shardwise.measure.step_time.timing import BETWEEN, PARTS, WAITS, PhaseStats, Timing
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.train.session import Session
from shardwise.train.step import Step

WARM_UP = 3
"""Steps that are left out at first, where there are more: they allocate, teach, and receipts look at them."""
LATE = 0.02
"""Part of a step that others must wait for a rank before it counts as late."""
_COLUMNS = {part: index for index, part in enumerate(COUNTED)}
_NS = 1e-9
_EXTRA = 5  # whether there is a lap at all, labels, early reductions, nanoseconds without a core, and by a stopwatch

Table = npt.NDArray[np.float64]


class Attribution:
    """Attached to a session, it tells where time goes; see `Timing`. One for a process at a time.

    ``disturbed`` says of a step's number whether something slowed it that is no part of training: it is left out.
    """

    size = _EXTRA + len(COUNTED)

    def __init__(self, session: Session) -> None:
        self._session = session
        self._clock = clock_for(session.device)
        self._borders: Borders | None = None
        self._waiting = _CpuWait()
        self._own: deque[tuple[int, int, int, int]] = deque()  # of laps that the clock may not have read yet
        self._laps = self._tokens = 0
        self._border = time.perf_counter_ns()
        self._arrived: list[deque[list[int]]] = [deque() for _ in range(session.ranks.world_size)]
        self._whole, self._fresh = PhaseTotals(), PhaseTotals()
        self._seen = 0
        self._problem = self._engine = ""
        self.disturbed: Callable[[int], bool] = lambda number: False

    @classmethod
    def attach(cls, session: Session) -> Attribution:
        """Watch ``session`` from now on."""
        one = cls(session)
        session.observers.append(one)
        session.phase_watchers.append(one._on_phase)
        session.mail.append(one)
        return one

    # what the session tells

    def on_prepared(self, session: Session) -> None:
        """The model stands: borders can be put around what it waits for."""
        PLACES.listener = self._clock
        self._borders = Borders(session)
        self._engine = "" if session.applied.engine is None else session.applied.engine.title

    def on_step_start(self, session: Session, step: Step) -> None:
        """Nothing to do."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Nothing to do."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """What the step was about."""
        self._tokens = -1 if self.disturbed(step.number) else step.tokens

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Nothing to do: the lap ends with the next step."""

    def _on_phase(self, phase: str) -> None:
        if self._borders is not None:
            PLACES.listener = self._clock  # of several sessions in a process, the one that does something now
        if phase == "data":
            self._end_lap()
        piped = self._session.applied.pipeline is not None if phase == "forward" else False
        self._clock.phase("pipeline" if piped else phase)

    def _end_lap(self) -> None:
        self._clock.lap()
        early = self._borders.early if self._borders is not None else 0
        if self._borders is not None:
            self._borders.early, self._problem = 0, self._borders.problem
        lost = self._waiting.lap()
        now = time.perf_counter_ns()
        self._own.append((self._tokens if self._laps else -1, early, lost, now - self._border))
        self._border = now
        self._laps += 1
        self._tokens = 0

    # what travels with the steps

    def post(self) -> list[int]:
        """The oldest lap that the clock has read and nobody was told of."""
        lap: Lap | None = self._clock.take()
        if lap is None:
            return [0] * self.size
        return [1, *self._own.popleft(), *lap]

    def deliver(self, rows: list[list[int]]) -> None:
        """One lap of each rank, or none; a step is known when all have told theirs."""
        if not self._session.ranks.is_main:
            return
        for queue, row in zip(self._arrived, rows, strict=True):
            if row[0]:
                queue.append(row[1:])
        while all(self._arrived):
            table = np.array([queue.popleft() for queue in self._arrived], dtype=np.float64)
            if table[0, 0] > 0:  # a lap with a whole step in it
                self._add(table)

    def finish(self) -> None:
        """Tell what no step has told yet. Collective; the clock stops, and what was put around waits is taken away."""
        if self._borders is None:
            return
        self._wait_for_device()
        self._end_lap()
        self._wait_for_device()  # the border of the last lap, too, is to have passed
        for _ in range(max(row[0] for row in gather_ints([len(self._own)], self._session.ranks))):
            self.deliver(gather_ints(self.post(), self._session.ranks))
        self.detach()

    def _wait_for_device(self) -> None:
        if self._session.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._session.device)

    def detach(self) -> None:
        """Stop the clock and take everything away."""
        if self._borders is not None:
            self._problem = self._borders.problem
            self._borders.remove()
            self._borders = None
        if PLACES.listener is self._clock:
            PLACES.listener = None
        self._waiting.close()
        session = self._session
        for kept, mine in ((session.observers, self), (session.mail, self), (session.phase_watchers, self._on_phase)):
            if mine in kept:
                kept.remove(mine)  # type: ignore[arg-type]

    # what came of it, on rank 0

    def timing(self) -> Timing | None:
        """The run so far, after the warm-up; ``None`` before the first step is known, and on other ranks."""
        return self._whole.timing(self._session.plan, self._unmeasured()) if self._seen else None

    def window(self) -> Timing | None:
        """What became known since the last call, warm-up included; ``None`` where nothing did."""
        fresh, self._fresh = self._fresh, PhaseTotals()
        return fresh.timing(self._session.plan, self._unmeasured()) if fresh.steps else None

    def told(self) -> dict[str, Any]:
        """`window` as values of a line of metrics: mean seconds of each part, and of what lies between steps."""
        window = self.window()
        if window is None:
            return {}
        parts = {part: None if one is None else one.mean_s for part, one in window.parts.items()}
        return {"parts": parts, "between_s": window.between_s, "late_rank": window.late_rank}

    def _add(self, table: Table) -> None:
        plan = self._session.plan
        self._seen += 1
        if self._seen == WARM_UP + 1:
            self._whole = PhaseTotals(warm_up=WARM_UP)
        elif self._seen <= WARM_UP:  # so far only the newest step is worth telling
            self._whole = PhaseTotals(warm_up=self._seen - 1)
        for totals in (self._whole, self._fresh):
            totals.add(table.copy(), plan)

    def _unmeasured(self) -> dict[str, str]:
        plan = self._session.plan
        found: dict[str, str] = {}
        if plan.compile:
            compiled = "blocks are compiled, and their collectives with them"
            found = {"exposed_tp": compiled, "exposed_cp": compiled, "recompute": "blocks are compiled"}
        if self._problem:
            found["exposed_dp"] = self._problem
        if self._engine:
            found["clip"] = f"{self._engine} clips inside of its update"
        return found


class PhaseTotals:
    """Sums over steps, so that a long run takes no more memory than a short one (8 bytes a step).

    ``warm_up`` is how many steps came before, and are left out.
    """

    def __init__(self, warm_up: int = 0) -> None:
        self.warm_up = warm_up
        self.steps = 0
        self._sums: Table | None = None
        self._periods = array("d")
        self._tokens = self._early = self._early_s = 0.0
        self._late: Counter[int] = Counter()

    def add(self, table: Table, plan: Plan) -> None:
        """One step: [ranks, labels, early reductions, nanoseconds without a core, by a stopwatch, `COUNTED`].

        It is changed.
        """
        table[:, 2] = np.where(table[:, 2] < 0, np.nan, table[:, 2])
        table[:, 2:] *= _NS
        parts = table[:, _EXTRA - 1 :]
        self._early_s += float(parts[:, _COLUMNS[EARLY]].mean())
        parts[:, _COLUMNS["exposed_dp"]] += parts[:, _COLUMNS[EARLY]]
        late = split_off_waiting(parts, plan.dims)
        if late is not None:
            self._late[late] += 1
        self._periods.append(float(parts[:, : len(PARTS)].sum(axis=1).mean()))
        self._tokens += float(table[0, 0])
        self._early += float(table[:, 1].mean())
        self._sums = table if self._sums is None else self._sums + table
        self.steps += 1

    def timing(self, plan: Plan, unmeasured: dict[str, str]) -> Timing:
        """What the steps come to."""
        assert self._sums is not None
        means = self._sums[:, _EXTRA - 1 :] / self.steps
        lost = self._sums[:, 2] / self.steps
        missing = absent(plan)
        unmeasured = {part: why for part, why in unmeasured.items() if part not in missing}
        none = missing | unmeasured.keys()
        for part in none:  # the little that was told apart goes back to where the rest is
            around = _COLUMNS["backward" if part in unmeasured else "other"]
            means[:, around] += means[:, _COLUMNS[part]]
            means[:, _COLUMNS[part]] = 0.0
        whole = sum(self._periods)
        late = self._late.most_common(1)
        alone = plan.dims.world_size == 1 or plan.dims.pp > 1
        return Timing(
            steps=self.steps,
            warm_up=self.warm_up,
            world_size=len(means),
            step_s=whole / self.steps,
            median_step_s=statistics.median(self._periods),
            tokens_per_s=self._tokens / whole if whole else None,
            parts={part: None if part in none else spread(means[:, _COLUMNS[part]]) for part in PARTS},
            between_s={part: float(means[:, _COLUMNS[part]].mean()) for part in BETWEEN},
            ranks=tuple({part: float(row[_COLUMNS[part]]) for part in (*PARTS, *BETWEEN)} for row in means),
            late_rank=late[0][0] if late else None,
            late_share=None if alone else (late[0][1] / self.steps if late else 0.0),
            cpu_wait_s=None if np.isnan(lost).any() else spread(lost),
            stopwatch_s=float((self._sums[:, 3] / self.steps).mean()),
            early_reduce_s=self._early_s / self.steps,
            early_reduces=self._early / self.steps,
            unmeasured=unmeasured,
        )


def split_off_waiting(parts: Table, dims: ParallelDims) -> int | None:
    """Move what ranks waited for a late one to ``slowest_rank``, in place: [ranks, `COUNTED`] seconds of a step.

    Returns the rank that was late, ``None`` where none was by more than `LATE` of the step.
    """
    whole = float(parts[:, : len(PARTS)].sum(axis=1).mean())
    for part in WAITS:
        column, group = parts[:, _COLUMNS[part]], _group_numbers(part, dims)
        least = np.full(len(column), np.inf)
        np.minimum.at(least, group, column)
        parts[:, _COLUMNS["slowest_rank"]] += column - least[group]
        column[:] = least[group]
    waited = parts[:, _COLUMNS["slowest_rank"]]
    if len(waited) < 2 or dims.pp > 1 or waited.max() <= LATE * whole:
        return None
    return int(waited.argmin())


@lru_cache(maxsize=64)
def groups_of(part: str, dims: ParallelDims) -> list[list[int]]:
    """The ranks that wait for each other in ``part``."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(dims.world_size):
        place = dims.place(rank)
        key = {
            "exposed_dp": (place.pp, place.tp),
            "exposed_tp": (place.pp, place.dp, place.cp),
            "exposed_cp": (place.pp, place.dp, place.tp),
        }.get(part, ())
        found.setdefault(key, []).append(rank)
    return list(found.values())


@lru_cache(maxsize=64)
def _group_numbers(part: str, dims: ParallelDims) -> npt.NDArray[np.intp]:
    """The number of each rank's group, at a cost that does not grow with the number of groups."""
    numbers = np.zeros(dims.world_size, dtype=np.intp)
    for number, group in enumerate(groups_of(part, dims)):
        numbers[group] = number
    return numbers


def spread(seconds: Table) -> PhaseStats:
    """The mean of ranks' seconds, and their extremes."""
    return PhaseStats(
        mean_s=float(seconds.mean()),
        low_s=float(seconds.min()),
        high_s=float(seconds.max()),
        highest_rank=int(seconds.argmax()),
    )


def absent(plan: Plan) -> set[str]:
    """Parts that a step of ``plan`` cannot have."""
    dims = plan.dims
    there = {
        "exposed_dp": dims.dp * dims.cp > 1,
        "exposed_tp": dims.tp > 1,
        "exposed_cp": dims.cp > 1,
        "pipeline": dims.pp > 1,
        "slowest_rank": dims.world_size > 1,
        "recompute": plan.recompute != "none",
        "transfer": plan.device != "cpu",
    }
    return {part for part, possible in there.items() if not possible}


class _CpuWait:
    """How long the thread that trains was ready to run without a core, from the kernel's own account (Linux only)."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._last = self._read()

    def _read(self) -> int | None:
        if self._file is None:
            return None
        try:
            ran, waited = os.pread(self._file, 100, 0).split()[:2]
            return int(waited) if int(ran) else None  # all zeros: a kernel that keeps no account
        except (OSError, ValueError, IndexError):
            return None

    def lap(self) -> int:
        """Nanoseconds since the last lap; -1 where nobody can tell."""
        now, last = self._read(), self._last
        self._last = now
        return -1 if now is None or last is None else now - last

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
