"""Progress of a run on rank 0: a bar with loss, rate and ETA on a terminal, or plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardwise.diagnosis.diagnose import why_nothing
from shardwise.diagnosis.finding import Finding
from shardwise.measure.step_time.timing import Timing
from shardwise.measure.utilisation import Utilisation, utilisation_lines
from shardwise.receipts.receipt import Receipt
from shardwise.report.terminal import print_findings, receipt_table, timing_table
from shardwise.train.data.corpus import Corpus
from shardwise.train.tasks.registry import TaskData
from shardwise.units import count_text, counted, seconds_text

if TYPE_CHECKING:
    from shardwise.train.evaluate import Evaluation
    from shardwise.train.run_interface import Outcome

PLAIN_LINES = 10
ALL = 0.9995  # a share that is printed as 100.0 %


class ProgressReporter:
    """Reporter of a run: to stdout, or to stderr if stdout is for a program."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.console = Console(stderr=as_json, highlight=False, soft_wrap=True)
        self._as_json = as_json
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._first = self._total = self._tenth = 0
        self._started = time.perf_counter()

    def log(self, text: str) -> None:
        """Print one line without markup, which a folder's name may resemble."""
        self.console.print(text, markup=False)

    def announce(self, text: str) -> None:
        """Print what takes a while before the first step, unless a program reads along."""
        if not self._as_json:
            self.log(text)

    def begin(self, first: int, total: int) -> None:
        """Open the bar, or announce the first step without a terminal."""
        self._first, self._total, self._started = first, total, time.perf_counter()
        self._tenth = first * PLAIN_LINES // max(1, total)
        if not self.console.is_terminal:
            if first < total:
                self.announce(f"step {first + 1} ...")
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("step", total=total, completed=first, news="")
        self._bar.start()

    def step(
        self, number: int, loss: float, per_second: float, noun: str = "tokens", trained_share: float = 1.0
    ) -> None:
        """Move the bar; without a terminal, print one line for each tenth of the run."""
        trained = f", {trained_share:.1%} with a loss" if trained_share < ALL else ""
        found = f"loss {loss:.4f}" if math.isfinite(loss) else "no label in this step"
        news = f"{found}  {count_text(per_second)} {noun}/s{trained}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=number, news=news)
        elif number * PLAIN_LINES // self._total > self._tenth or number == self._first + 1:
            self._tenth = number * PLAIN_LINES // self._total
            done = (number - self._first) / max(1, self._total - self._first)
            left = (time.perf_counter() - self._started) * (1 - done) / done
            self.console.print(f"step {number}/{self._total}  {news}  {seconds_text(left)} left")

    def evaluating(self, share: float) -> None:
        """Show the bar of an evaluation."""
        if self._bar is None:
            return
        if self._evaluation is None:
            self._evaluation = self._bar.add_task("evaluating, %", total=100, news="")
        self._bar.update(self._evaluation, completed=round(share * 100), visible=share < 1)

    def evaluated(self, number: int, found: Evaluation) -> None:
        """Print the result of an evaluation."""
        if not found.is_of_text:
            self.console.print(f"held out after step {number}: {label_metrics(found.labels())}", markup=False)
            return
        parts = [f"loss {found.loss:.4f}", f"perplexity {found.perplexity:.4g}"]
        parts.append(f"{found.bits_per_byte:.4f} bits per byte")
        parts += [f"{name} {value:.4g}" for name, value in found.metrics.items()]
        parts += [f"{name} {loss:.4f}" for name, loss in found.sources.items()]
        self.console.print(f"held out after step {number}: {', '.join(parts)}", markup=False)

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def finish(self, outcome: Outcome, corpus: TaskData, receipts: Sequence[Receipt | None], output: str) -> None:
        """Print the end of a run: held-out result against its baselines, then the receipts."""
        if outcome.best is not None and outcome.best.value is not None:
            self.console.print(f"best: {outcome.best}; its checkpoint is kept", markup=False)
        if outcome.evaluation is not None and not outcome.evaluation.is_of_text:
            self.console.print(f"held out: [bold]{label_metrics(outcome.evaluation.labels())}[/]")
        elif outcome.evaluation is not None and isinstance(corpus, Corpus) and corpus.order1_bits:
            bits = outcome.evaluation.bits_per_byte
            verdict = "under" if bits < corpus.order1_bits else "over"
            self.console.print(
                f"held-out bits per byte: [bold]{bits:.3f}[/], {verdict} the order-1 baseline {corpus.order1_bits:.3f} "
                f"(order 0: {corpus.order0_bits:.3f})"
            )
        shown = [receipt for receipt in receipts if receipt is not None]
        for receipt in shown:
            self.console.print(receipt_table(receipt))
        if len(shown) < len(receipts):
            self.console.print("receipts: not checked, because this process ran fewer than two steps")
        took = seconds_text(time.perf_counter() - self._started)
        done = f"done: {counted(outcome.steps, 'step')} in {took}; metrics and checkpoints are in '{output}'"
        self.console.print(done, markup=False)

    def time_spent(
        self, timing: Timing | None, use: Utilisation | None, findings: Sequence[Finding], page: Path | None
    ) -> None:
        """Print step time by part, hardware use, and findings."""
        if timing is None:
            return
        self.console.print(timing_table(timing))
        for line in utilisation_lines(use) if use is not None else ():
            self.console.print(line, markup=False)
        print_findings(findings, self.console, nothing=why_nothing(timing))
        if page is not None:
            self.console.print(f"report: {page}", markup=False)


def label_metrics(found: dict[str, float]) -> str:
    """Format held-out metrics of labels: ``loss 0.1234, accuracy 97.5 %``."""
    texts = {name: f"{100 * value:.1f} %" if name == "accuracy" else f"{value:.4f}" for name, value in found.items()}
    return ", ".join(f"{name} {value}" for name, value in texts.items())
