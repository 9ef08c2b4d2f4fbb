"""`RunRecord`: all numbers of one run, as in ``report.json``; the only source of the page.

Bytes, seconds and US dollars; ``None`` is unknown, never zero. Keys may be added under the same ``schema``; none
is removed or changes its meaning.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.cost.memory.estimate import Estimate
from shardwise.diagnosis.finding import Finding
from shardwise.measure.step_time.timing import Timing
from shardwise.measure.utilisation import Utilisation
from shardwise.plan.plan import Plan
from shardwise.receipts.receipt import Receipt

State = Literal["finished", "unfinished", "running", "unknown"]
Column = tuple[float | None, ...]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Figures(_Frozen):
    """Key figures of a run.

    ``tokens_per_s`` and ``step_s`` are over the steps after the warm-up if the run timed its parts, else medians of
    the logged lines without the first. ``step_seconds`` are all logged steps together, ``pause_seconds`` the time that
    checkpoints blocked the ranks; evaluation, start-up and the time between a crash and the resume are in neither.
    ``labels`` are the ``tokens`` with a loss. ``device_hours`` are ``step_seconds`` and ``pause_seconds`` of all
    devices, and ``cost`` is those at ``price_per_device_hour``. ``mfu`` counts no recompute. ``heldout`` (loss and
    accuracy of labels), ``samples_per_s`` and ``labels`` replace bits per byte and tokens where a sample is not text to
    go on with.
    """

    steps: int = 0
    steps_planned: int | None = None
    tokens: int | None = None
    labels: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    heldout_bits_per_byte: float | None = None
    tokens_per_s: float | None = None
    heldout: dict[str, float] = {}
    samples_per_s: float | None = None
    step_s: float | None = None
    step_predicted_s: float | None = None
    step_predicted_low_s: float | None = None
    step_predicted_high_s: float | None = None
    mfu: float | None = None
    mfu_predicted: float | None = None
    flops_per_s: float | None = None
    peak_bytes: int | None = None
    peak_predicted_bytes: int | None = None
    step_seconds: float | None = None
    pause_seconds: float | None = None
    device_hours: float | None = None
    price_per_device_hour: float | None = None
    cost: float | None = None


class Series(_Frozen):
    """Columns of equal length, one row for each ``lines_per_row`` logged lines.

    ``step`` and ``tokens`` are those of the last line of a row; everything else is the mean of the lines that have it.
    ``parts_s`` are seconds of a step by part, ``between_s`` seconds between steps.
    """

    lines_per_row: int = 1
    step: tuple[int, ...] = ()
    time: Column = ()
    tokens: Column = ()
    loss: Column = ()
    learning_rate: Column = ()
    grad_norm: Column = ()
    step_time_s: Column = ()
    tokens_per_s: Column = ()
    samples_per_s: Column = ()
    parts_s: dict[str, Column] = {}
    between_s: dict[str, Column] = {}


class LoggedEvaluation(_Frozen):
    """Bits per byte of the held-out documents after a step."""

    step: int
    heldout_bits_per_byte: float


class SavedCheckpoint(_Frozen):
    """Checkpoint of a run: its size, the ranks' pause for it, and the time until it was on disk."""

    step: int
    num_bytes: int | None = None
    stall_s: float | None = None
    write_s: float | None = None


class Memory(_Frozen):
    """Bytes on the fullest rank, predicted and measured; measured peaks are by phase.

    ``device_memory_bytes`` is the memory of a device, or of a CPU rank its share of the host's.
    """

    predicted: Estimate | None = None
    at_rest: dict[str, int] = {}
    peaks: dict[str, int] = {}
    reserved: dict[str, int] = {}
    device_used_bytes: int | None = None
    device_memory_bytes: int | None = None
    process_peak_bytes: int | None = None


class CollectiveTime(_Frozen):
    """Collectives of one kind in one phase of a step, on one rank.

    ``seconds`` are those in which at least one was in flight, from its call to its end, beside the computation or not;
    ``None`` where the end is not seen, for the reason ``unknown``.
    """

    rank: int = 0
    name: str
    phase: str
    calls: int
    num_bytes: int
    seconds: float | None = None
    unknown: str = ""


class Curve(_Frozen):
    """Line of a plot: ``x`` and ``y`` of equal length, and an optional interval.

    Curves of one ``group`` belong together and have one colour, such as a measured one and its prediction; ``ideal`` is
    the reference for the others.
    """

    name: str
    group: str = ""
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    predicted: bool = False
    ideal: bool = False


class BenchSamples(_Frozen):
    """Measurements of another command shown with the run: curves, a table, sentences."""

    source: str
    curves: tuple[Curve, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


class RunRecord(_Frozen):
    """Record of one run. ``missing`` lists in sentences what its folder lacks, and why.

    ``collectives`` and ``notes`` are those of a loop that Shardwise observed and did not run; ``not_judged`` says of
    each kind of finding that is not looked for in it why it is not.

    ``through_step`` is set if timing, findings and receipts end before the last logged step.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    made_at: str
    made_by: str
    state: State
    state_text: str
    missing: tuple[str, ...] = ()
    through_step: int | None = None
    figures: Figures = Figures()
    series: Series = Series()
    evaluations: tuple[LoggedEvaluation, ...] = ()
    saves: tuple[SavedCheckpoint, ...] = ()
    timing: Timing | None = None
    findings: tuple[Finding, ...] | None = None
    not_judged: dict[str, str] = {}
    memory: Memory = Memory()
    receipts: dict[str, Receipt | None] = {}
    plan: Plan | None = None
    config: dict[str, dict[str, Any]] = {}
    environment: dict[str, str] | None = None
    utilisation: Utilisation | None = None
    scaling: BenchSamples | None = None
    links: BenchSamples | None = None
    collectives: tuple[CollectiveTime, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        """Noun of what is counted in a second: tokens, or samples that are no text."""
        return "tokens" if self.figures.samples_per_s is None else "samples"

    @property
    def per_s(self) -> float | None:
        """Throughput of the run, in `noun`."""
        return self.figures.tokens_per_s if self.noun == "tokens" else self.figures.samples_per_s

    @property
    def logged_per_s(self) -> Column:
        """Throughput of each row of the series, in `noun`."""
        return self.series.tokens_per_s if self.noun == "tokens" else self.series.samples_per_s

    def to_json(self) -> str:
        """Serialize as ``report.json``; non-finite numbers are ``null``."""
        return self.model_dump_json(by_alias=True)
