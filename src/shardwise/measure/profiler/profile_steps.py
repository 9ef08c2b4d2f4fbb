"""Trace some steps with ``torch.profiler``, on request: ``[train] profile = "20:3"``.

`StepTrace` observes a session: it starts the profiler before the first of the steps, puts the session's phases into the
trace, and stops after the last one. `StepTrace.write` then writes the file (Chrome's format, for ``chrome://tracing``,
Perfetto or TensorBoard) and summarizes it in words. The profiler sees operators, shapes, and on a GPU kernels and
copies; neither memory nor Python frames. It slows the traced steps; the slowdown is measured and reported.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from shardwise.environment import quiet_profiler
from shardwise.errors import ConfigError
from shardwise.measure.profiler.events import MARK, read_events
from shardwise.measure.profiler.summary import Overhead, TraceSummary, summarise
from shardwise.train.config import TrainTable
from shardwise.train.config_values import FIRST_TRACED
from shardwise.train.session import Session
from shardwise.train.step import Step

SUMMARY = "trace.json"
_torch: Any = torch.autograd  # its stubs lack the profiler's functions


def trace_file(output: Path, rank: int) -> Path:
    """Return the path of a rank's trace in the run folder."""
    return output / ("trace.json.gz" if rank == 0 else f"trace.rank{rank}.json.gz")


class StepTrace:
    """Trace the steps of ``train.profile`` on the ranks of ``train.profile_ranks``.

    ``notes`` are lines for people: moved steps, skips and failures. `disturbs` is the same on every rank, and
    gives the steps that took longer because of it.

    Raises:
        ConfigError: a rank to trace does not exist.
    """

    def __init__(self, table: TrainTable, rank: int, world_size: int) -> None:
        missing = [str(one) for one in table.profile_ranks if one >= world_size]
        if table.profiled is not None and missing:
            raise ConfigError(
                f"train.profile_ranks names {', '.join(missing)}, and the ranks are 0 to {world_size - 1}; "
                "name ranks that there are"
            )
        self.notes: list[str] = []
        self._asked, self._rank = table.profiled, rank
        self._mine = rank in table.profile_ranks
        self._output = Path(table.output)
        self._steps: range | None = None
        self._profile: Any = None
        self._stopped = False
        self._phase: Any = None
        self._begun = self._start_s = 0.0
        self._traced_s: float | None = None
        self._plain: list[float] = []
        self._step_began = 0.0

    def disturbs(self, number: int) -> bool:
        """Return whether step ``number`` is traced on some rank."""
        return self._steps is not None and number in self._steps

    def on_prepared(self, session: Session) -> None:
        """Do nothing."""

    def on_step_start(self, session: Session, step: Step) -> None:
        """Start if the first traced step begins."""
        if self._asked is not None and self._steps is None:
            self._close_finished(session.first_step)
        if self._mine and self._steps is not None and step.number == self._steps.start:
            self._start(session)
        self._step_began = time.perf_counter()

    def on_gradients(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Stop if the last traced step ends."""
        if self._profile is None or self._stopped:
            if step.number >= session.first_step + FIRST_TRACED and self._steps and step.number < self._steps.start:
                self._plain.append(time.perf_counter() - self._step_began)
            return
        if self._steps is not None and step.number >= self._steps.stop - 1:
            self._stop(session)

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Stop a running trace with the loop."""
        if self._profile is not None and not self._stopped:
            self._stop(session)

    def _close_finished(self, done: int) -> None:
        """Choose the steps to trace in a run that resumes after ``done`` steps."""
        assert self._asked is not None
        first, count = self._asked
        self._steps = range(0)
        if first + count - 1 <= done:
            if not trace_file(self._output, self._rank).exists():
                self.notes.append(f"train.profile asks for step {first}, but this run resumes after step {done}")
            return
        begin = max(first, done + FIRST_TRACED)
        if begin > first and self._mine:
            self.notes.append(
                f"the trace begins at step {begin}, not {first}: this run resumes after step {done}, and the first "
                "steps warm up"
            )
        self._steps = range(begin, begin + count)

    def _start(self, session: Session) -> None:
        if _torch._profiler_enabled():
            self.notes.append(f"step {session.steps_done + 1} is not traced: another profiler is on")
            return  # the steps stay the same as on the other ranks, which wait for this one after them
        activities = [ProfilerActivity.CPU]
        if session.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(session.device)
        before = time.perf_counter()
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        with quiet_profiler():
            self._profile.start()
        self._begun = time.perf_counter()
        self._start_s = self._begun - before
        session.phase_watchers.append(self._enter)
        self._enter(session.phase)

    def _enter(self, phase: str) -> None:
        self._leave()
        self._phase = record_function(f"{MARK}{phase}")
        self._phase.__enter__()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _stop(self, session: Session) -> None:
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        assert self._steps is not None
        self._traced_s = (time.perf_counter() - self._begun) / len(self._steps)
        session.phase_watchers.remove(self._enter)
        self._leave()
        self._profile.stop()
        self._stopped = True

    def write(self) -> TraceSummary | None:
        """Write the trace that ended since the last call, and summarise it; ``None`` without one.

        Call it between two steps. The summary is written beside the trace, for rank 0 as ``trace.json``. A failure
        is a line of ``notes``: a run does not fail for its trace.
        """
        if self._profile is None or not self._stopped:
            return None
        profile, self._profile = self._profile, None
        file = trace_file(self._output, self._rank)
        before = time.perf_counter()
        try:
            profile.export_chrome_trace(str(file))
            written = time.perf_counter() - before
            found = summarise(read_events(file))
            cost = Overhead(
                plain_step_s=statistics.median(self._plain) if self._plain else None,
                traced_step_s=self._traced_s,
                start_s=self._start_s,
                write_s=written,
            )
            steps = self._steps or range(0)
            facts = {"rank": self._rank, "first_step": steps.start, "steps": len(steps), "file": file.name}
            summary = found.model_copy(update={**facts, "overhead": cost})
            summary_file(file).write_text(summary.model_dump_json())
        except (OSError, ValueError, RuntimeError) as error:
            self.notes.append(f"the trace '{file}' cannot be written: {' '.join(str(error).split())}")
            return None
        return summary


def summary_file(trace: Path) -> Path:
    """Return the path of a trace's summary: beside it, without ``.gz``."""
    return trace.with_suffix("")
