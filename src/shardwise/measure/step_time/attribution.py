"""`Attribution`: attribute the time of every step to its components, on every rank.

Each rank's clock separates its parts; the numbers of a step are sent with the message that starts the next one, so
there is no extra message, and rank 0 adds them up. A rank's wait beyond that of the rank of its group
that waited least is ``slowest_rank``: the link did not need that long. Within a step ranks may be late in turn,
and then some of that waiting is attributed to the link. A pipeline's stages wait for each other by design: that stays
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
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.places import Ints
from shardwise.distributed.process_group import gather_ints, gather_table
from shardwise.measure.step_time.clock import COUNTED, EARLY, StepInterval, clock_for
from shardwise.measure.step_time.comm_hooks import CommHooks
from shardwise.measure.step_time.timing import BETWEEN, PHASES, WAIT_PHASES, PhaseStats, Timing
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.train.session import Session
from shardwise.train.step import Step

WARM_UP = 3
"""First steps that are excluded, if there are more: they allocate and warm up, and receipts inspect them."""
LATE = 0.02
"""Share of a step that others must wait for a rank before it counts as late."""
_COLUMNS = {part: index for index, part in enumerate(COUNTED)}
_NS = 1e-9
_EXTRA = 5  # whether there is a lap, labels, early reductions, nanoseconds without a core, and by a stopwatch

Table = npt.NDArray[np.float64]


class Attribution:
    """Observer of a session that attributes its time; see `Timing`. One per process at a time.

    ``disturbed`` returns for a step's number whether something other than training slowed it: it is excluded.
    ``on_step_times`` is called on rank 0 for each step with the rank that was late, if any, and for each of
    `COUNTED` the seconds of all ranks.
    """

    size = _EXTRA + len(COUNTED)

    def __init__(self, session: Session) -> None:
        self._session = session
        self._clock = clock_for(session.device)
        self._comm_hooks: CommHooks | None = None
        self._waiting = CpuWait()
        self._own: deque[tuple[int, int, int, int]] = deque()  # of laps that the clock may not have read yet
        self._intervals = self._tokens = 0
        self._border = time.perf_counter_ns()
        self._arrived: deque[Table] = deque()  # laps that not all ranks have sent
        self._laps = np.zeros(session.ranks.world_size, dtype=np.int64)  # that each rank has sent
        self._complete = 0  # laps that all ranks have sent
        self._full, self._fresh = PhaseTotals(), PhaseTotals()
        self._seen = 0
        self._problem = self._engine = ""
        self.disturbed: Callable[[int], bool] = lambda number: False
        self.on_step_times: Callable[[int | None, Mapping[str, Table]], None] | None = None

    @classmethod
    def attach(cls, session: Session) -> Attribution:
        """Start observing ``session``."""
        one = cls(session)
        session.observers.append(one)
        session.phase_watchers.append(one._on_phase)
        session.header.append(one)
        session.at_close.callback(one.detach)
        return one

    # called by the session

    def on_prepared(self, session: Session) -> None:
        """Install the hooks around the model's waits."""
        COMM_TIMER.listener = self._clock
        self._comm_hooks = CommHooks(session)
        self._engine = "" if session.applied.engine is None else session.applied.engine.title

    def on_step_start(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Record the step's tokens; its labels, where only they are known."""
        known = step.tokens if step.processed is None else step.processed
        self._tokens = -1 if self.disturbed(step.number) else known

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Do nothing: the lap ends with the next step."""

    def _on_phase(self, phase: str) -> None:
        if self._comm_hooks is not None:
            COMM_TIMER.listener = self._clock  # of several sessions in a process, the active one
        if phase == "data":
            self._end_interval()
        piped = self._session.applied.pipeline is not None if phase == "forward" else False
        self._clock.phase("pipeline" if piped else phase)

    def _end_interval(self) -> None:
        self._clock.interval()
        early = self._comm_hooks.early if self._comm_hooks is not None else 0
        if self._comm_hooks is not None:
            self._comm_hooks.early, self._problem = 0, self._comm_hooks.problem
        lost = self._waiting.interval()
        now = time.perf_counter_ns()
        self._own.append((self._tokens if self._intervals else -1, early, lost, now - self._border))
        self._border = now
        self._intervals += 1
        self._tokens = 0

    # sent with each step's message

    def post(self) -> list[int]:
        """Return the oldest lap that the clock has read and that was not sent."""
        interval: StepInterval | None = self._clock.take()
        if interval is None:
            return [0] * self.size
        return [1, *self._own.popleft(), *interval]

    def deliver(self, rows: Ints) -> None:
        """Receive one lap of each rank, or none; a step is complete when all have sent theirs."""
        if not self._session.ranks.is_main:
            return
        came = rows[:, 0] != 0
        if came.any():  # the n-th lap of a rank belongs to the n-th of all others
            at = self._laps - self._complete
            if int(at[came].max()) == len(self._arrived):
                self._arrived.append(np.zeros((len(rows), self.size - 1)))
            for place in np.unique(at[came]):
                here = came & (at == place)
                self._arrived[place][here] = rows[here, 1:]
            self._laps += came
        while self._laps.min() > self._complete:
            table = self._arrived.popleft()
            self._complete += 1
            if table[0, 0] > 0:  # a lap with a full step in it
                self._add(table)

    def finish(self) -> None:
        """Send the remaining laps. Collective; stops the clock and removes the hooks."""
        if self._comm_hooks is None:
            return
        self._wait_for_device()
        self._end_interval()
        self._wait_for_device()  # the last lap's end event must have passed, too
        for _ in range(max(row[0] for row in gather_ints([len(self._own)], self._session.ranks))):
            self.deliver(gather_table(self.post(), self._session.ranks))
        self.detach()

    def _wait_for_device(self) -> None:
        if self._session.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._session.device)

    def detach(self) -> None:
        """Stop the clock and remove all hooks."""
        if self._comm_hooks is not None:
            self._problem = self._comm_hooks.problem
            self._comm_hooks.remove()
            self._comm_hooks = None
        if COMM_TIMER.listener is self._clock:
            COMM_TIMER.listener = None
        self._waiting.close()
        session = self._session
        for kept, mine in ((session.observers, self), (session.header, self), (session.phase_watchers, self._on_phase)):
            if mine in kept:
                kept.remove(mine)  # type: ignore[arg-type]

    # results, on rank 0

    def timing(self) -> Timing | None:
        """Return the run so far, after the warm-up; ``None`` before the first step, and off rank 0."""
        return self._full.timing(self._session.plan, self._unmeasured()) if self._seen else None

    def window(self, *, by_rank: bool = True) -> Timing | None:
        """Return the steps since the last call, warm-up included; ``None`` if there are none."""
        fresh, self._fresh = self._fresh, PhaseTotals()
        return fresh.timing(self._session.plan, self._unmeasured(), by_rank=by_rank) if fresh.steps else None

    def log_fields(self) -> dict[str, Any]:
        """Return `window` as values of a metrics line: mean seconds of each part and between steps."""
        window = self.window(by_rank=False)
        if window is None:
            return {}
        parts = {part: None if one is None else one.mean_s for part, one in window.parts.items()}
        return {"parts": parts, "between_s": window.between_s, "late_rank": window.late_rank}

    def _add(self, table: Table) -> None:
        plan = self._session.plan
        self._seen += 1
        if self._seen == WARM_UP + 1:
            self._full = PhaseTotals(warm_up=WARM_UP)
        elif self._seen <= WARM_UP:  # so far only the newest step is meaningful
            self._full = PhaseTotals(warm_up=self._seen - 1)
        self._full.add(table.copy(), plan)
        late = self._fresh.add(table, plan)
        if self.on_step_times is not None:
            parts = table[:, _EXTRA - 1 :]
            self.on_step_times(late, dict(zip(COUNTED, parts.T, strict=True)))

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
    """Sums over steps, so that a long run takes little more memory (8 bytes a step).

    ``warm_up`` is the number of earlier steps, which are excluded.
    """

    def __init__(self, warm_up: int = 0) -> None:
        self.warm_up = warm_up
        self.steps = 0
        self._sums: Table | None = None
        self._periods = array("d")
        self._tokens = self._early = self._early_s = 0.0
        self._late: Counter[int] = Counter()

    def add(self, table: Table, plan: Plan) -> int | None:
        """Add a step: [ranks, labels, early reductions, ns off-core, by a stopwatch, `COUNTED`]; return who was late.

        The table is modified: seconds, with waits for a late rank as ``slowest_rank``.
        """
        table[:, 2] = np.where(table[:, 2] < 0, np.nan, table[:, 2])
        table[:, 2:] *= _NS
        parts = table[:, _EXTRA - 1 :]
        self._early_s += float(parts[:, _COLUMNS[EARLY]].mean())
        parts[:, _COLUMNS["exposed_dp"]] += parts[:, _COLUMNS[EARLY]]
        late = split_off_waiting(parts, plan.dims)
        if late is not None:
            self._late[late] += 1
        self._periods.append(float(parts[:, : len(PHASES)].sum(axis=1).mean()))
        self._tokens += float(table[0, 0])
        self._early += float(table[:, 1].mean())
        self._sums = table.copy() if self._sums is None else self._sums + table
        self.steps += 1
        return late

    def timing(self, plan: Plan, unmeasured: dict[str, str], *, by_rank: bool = True) -> Timing:
        """Return the means over the steps; ``by_rank``: those of each rank, too."""
        assert self._sums is not None
        means = self._sums[:, _EXTRA - 1 :] / self.steps
        lost = self._sums[:, 2] / self.steps
        missing = absent(plan)
        unmeasured = {part: why for part, why in unmeasured.items() if part not in missing}
        none = missing | unmeasured.keys()
        for part in none:  # unseparated time is added to the part around it
            around = _COLUMNS["backward" if part in unmeasured else "other"]
            means[:, around] += means[:, _COLUMNS[part]]
            means[:, _COLUMNS[part]] = 0.0
        full = sum(self._periods)
        late = self._late.most_common(1)
        alone = plan.dims.world_size == 1 or plan.dims.pp > 1
        return Timing(
            steps=self.steps,
            warm_up=self.warm_up,
            world_size=len(means),
            step_s=full / self.steps,
            median_step_s=statistics.median(self._periods),
            tokens_per_s=self._tokens / full if full else None,
            parts={part: None if part in none else spread(means[:, _COLUMNS[part]]) for part in PHASES},
            between_s={part: float(means[:, _COLUMNS[part]].mean()) for part in BETWEEN},
            ranks=tuple(
                {part: float(row[_COLUMNS[part]]) for part in (*PHASES, *BETWEEN)}
                for row in (means if by_rank else means[:0])
            ),
            late_rank=late[0][0] if late else None,
            late_share=None if alone else (late[0][1] / self.steps if late else 0.0),
            cpu_wait_s=None if np.isnan(lost).any() else spread(lost),
            stopwatch_s=float((self._sums[:, 3] / self.steps).mean()),
            early_reduce_s=self._early_s / self.steps,
            early_reduces=self._early / self.steps,
            unmeasured=unmeasured,
        )


def split_off_waiting(parts: Table, dims: ParallelDims) -> int | None:
    """Move waits for a late rank to ``slowest_rank``, in place: [ranks, `COUNTED`] seconds.

    Returns the rank that was late, ``None`` if none was by more than `LATE` of the step.
    """
    full = float(parts[:, : len(PHASES)].sum(axis=1).mean())
    for part in WAIT_PHASES:
        column, group = parts[:, _COLUMNS[part]], _group_numbers(part, dims)
        least = np.full(len(column), np.inf)
        np.minimum.at(least, group, column)
        parts[:, _COLUMNS["slowest_rank"]] += column - least[group]
        column[:] = least[group]
    waited = parts[:, _COLUMNS["slowest_rank"]]
    if len(waited) < 2 or dims.pp > 1 or waited.max() <= LATE * full:
        return None
    return int(waited.argmin())


@lru_cache(maxsize=64)
def groups_of(part: str, dims: ParallelDims) -> list[list[int]]:
    """Return the groups of ranks that wait for each other in ``part``."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(dims.world_size):
        place = dims.place(rank)
        key = {
            "exposed_dp": (place.pp, place.tp),
            "exposed_tp": (place.pp, place.dp, place.cp),
            "exposed_cp": (place.pp, place.dp, place.tp),
            "exposed_ep": (rank // dims.ep,),
        }.get(part, ())
        found.setdefault(key, []).append(rank)
    return list(found.values())


@lru_cache(maxsize=64)
def _group_numbers(part: str, dims: ParallelDims) -> npt.NDArray[np.intp]:
    """Return each rank's group number, at a cost independent of the number of groups."""
    numbers = np.zeros(dims.world_size, dtype=np.intp)
    for number, group in enumerate(groups_of(part, dims)):
        numbers[group] = number
    return numbers


def spread(seconds: Table) -> PhaseStats:
    """Return the mean of ranks' seconds, and their extremes."""
    return PhaseStats(
        mean_s=float(seconds.mean()),
        low_s=float(seconds.min()),
        high_s=float(seconds.max()),
        highest_rank=int(seconds.argmax()),
    )


def absent(plan: Plan) -> set[str]:
    """Return the parts that a step of ``plan`` cannot have."""
    dims = plan.dims
    there = {
        "exposed_dp": dims.dp * dims.cp > 1,
        "exposed_tp": dims.tp > 1,
        "exposed_cp": dims.cp > 1,
        "exposed_ep": dims.ep > 1,
        "pipeline": dims.pp > 1,
        "slowest_rank": dims.world_size > 1,
        "recompute": plan.recompute != "none",
        "transfer": plan.device != "cpu",
    }
    return {part for part, possible in there.items() if not possible}


class CpuWait:
    """Time the training thread was ready without a core, from the kernel's account (Linux only)."""

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
            return int(waited) if int(ran) else None  # all zeros: a kernel without this account
        except (OSError, ValueError, IndexError):
            return None

    def interval(self) -> int:
        """Return nanoseconds since the last lap; -1 if unknown."""
        now, last = self._read(), self._last
        self._last = now
        return -1 if now is None or last is None else now - last

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
