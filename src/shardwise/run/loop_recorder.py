"""Run folder of a custom loop: metrics as it runs; step time, findings and the report by ``session.report()``."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardwise.diagnosis.diagnose import diagnose, why_nothing
from shardwise.diagnosis.finding import Finding
from shardwise.diagnosis.observe import HostRecorder, observe
from shardwise.diagnosis.observed import LostGradient
from shardwise.errors import MachineError
from shardwise.measure.step_time.attribution import Attribution
from shardwise.measure.step_time.timing import Timing
from shardwise.receipts.effects import EffectsRecorder
from shardwise.receipts.lost_gradients import LostGradients
from shardwise.report.html.page import write_report
from shardwise.report.terminal import print_findings, timing_table
from shardwise.run.run_summary import write_environment
from shardwise.train.metrics import MetricsFile, logged_lost_gradients, read_metrics
from shardwise.train.run_files import RunFile
from shardwise.train.session import Session
from shardwise.train.step import Step, StepResult

LOG_S = 1.0  # between two lines: reading a loss waits for the device


class LoopRecorder(HostRecorder):
    """Observer of a session that writes what ``shardwise report`` reads; also counts the host's use.

    The first step is always logged, then one each second. ``effects`` has the receipt, if one is made, ``lost`` what
    has lost its gradient.
    """

    def __init__(
        self, folder: Path, attribution: Attribution, effects: EffectsRecorder | None, lost: LostGradients | None
    ) -> None:
        super().__init__()
        self._folder, self._attribution, self._effects, self._lost = folder, attribution, effects, lost
        self._metrics: MetricsFile | None = None
        self._clock, self._since = time.perf_counter(), 0
        self._tokens = self._tokens_since = 0
        self._last: float | None = None
        self._result: StepResult | None = None

    def on_step_start(self, session: Session, step: Step) -> None:
        """Open the folder before the first step."""
        if self._metrics is None and session.ranks.is_main:
            self._open(session)

    def on_step_end(self, session: Session, step: Step) -> None:
        """Log the step, if a second has passed since the last one that was."""
        super().on_step_end(session, step)
        self._tokens += step.tokens
        self._tokens_since += step.tokens
        self._result = step.result
        if self._last is None or time.perf_counter() - self._clock >= LOG_S:
            self._log(session)

    def _log(self, session: Session) -> None:
        """Write a line for the steps since the last one."""
        result, now = self._result, time.perf_counter()
        if self._metrics is None or result is None or result.number == self._since:
            return
        seconds, steps = now - self._clock, result.number - self._since
        self._last = result.loss
        self._metrics.write(
            step=result.number,
            loss=self._last,
            learning_rate=session.optimizer.param_groups[0]["lr"],
            grad_norm=result.grad_norm,
            **session.routing.log_fields(),
            tokens=self._tokens,
            step_time_s=seconds / steps,
            tokens_per_s=self._tokens_since / seconds,
            time=time.time(),
            **self._attribution.log_fields(),
            **({} if self._lost is None else self._lost.log_fields()),
        )
        self._clock, self._since, self._tokens_since = now, result.number, 0

    def conclude(self, session: Session) -> Path | None:
        """Write the results and the report; return the page's path on rank 0. Collective."""
        self._attribution.finish()
        host = self.finish(session.ranks)
        timing = self._attribution.timing()
        if self._metrics is None:
            return None
        self._log(session)
        self._metrics.close()
        lost = [LostGradient.model_validate(one) for one in logged_lost_gradients(self._folder / RunFile.METRICS)]
        found = None if timing is None else observe(session, timing, host=host, lost_gradients=lost)
        findings = () if found is None else diagnose(found)
        receipt = None if self._effects is None else self._effects.receipt
        summary = {
            "schema": 1,
            "steps": session.steps_done,
            "tokens": self._tokens,
            "loss": self._last if self._last is not None and math.isfinite(self._last) else None,
            "strategy": session.plan.strategy,
            "timing": None if timing is None else timing.model_dump(mode="json"),
            "findings": [finding.model_dump(mode="json") for finding in findings],
            "receipts": {"effects": None if receipt is None else receipt.to_dict()},
        }
        (self._folder / RunFile.SUMMARY).write_text(json.dumps(summary))
        return self._print(timing, findings)

    def _print(self, timing: Timing | None, findings: Sequence[Finding]) -> Path | None:
        page = write_report(self._folder, logging.getLogger("shardwise").warning)
        console = Console(highlight=False, soft_wrap=True)
        if timing is not None:
            console.print(timing_table(timing))
            print_findings(findings, console, nothing=why_nothing(timing))
        if page is not None:
            console.print(f"report: {page}", markup=False)
        return page

    def _open(self, session: Session) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / RunFile.SUMMARY).unlink(missing_ok=True)
            (self._folder / RunFile.PLAN).write_text(session.plan.to_toml())
            write_environment(self._folder)
            path = self._folder / RunFile.METRICS
            self._metrics = MetricsFile(path, session.steps_done)
            self._tokens = sum(line.get("tokens", 0) for line in [*read_metrics(path)][-1:])
        except OSError as error:
            raise MachineError(
                f"start(..., output='{self._folder}'): {error.strerror}; give a folder that can be written to"
            ) from None
        self._clock, self._since = time.perf_counter(), session.steps_done
