"""Show plans, receipts, timing, findings and traces of a run on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.diagnosis.finding import Finding
from shardwise.hardware.cluster import ClusterSpec
from shardwise.measure.profiler.summary import TraceSummary, bound_of
from shardwise.measure.profiler.trace_text import rate_text, short_time, words
from shardwise.measure.step_time.timing import NAMES, PHASES, Timing
from shardwise.model.facts import ModelSpec
from shardwise.receipts.receipt import Receipt
from shardwise.search.choose import Choice
from shardwise.train.config import Config
from shardwise.train.data.data_receipt import data_receipt
from shardwise.train.data.rows import RowData
from shardwise.train.model import added_tokens
from shardwise.train.tasks.registry import TaskData
from shardwise.units import bytes_text, count_text, counted, money_text

_MARKS = {"alarm": "[bold red]alarm[/]", "hint": "[yellow]hint[/]", "fine": "[green]fine[/]"}
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def receipt_table(receipt: Receipt) -> Table:
    """Build one row for each claim: planned, found, and a mark."""
    table = Table(title=f"receipt: {receipt.title}", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("what")
    table.add_column("planned", overflow="fold")
    table.add_column("found", overflow="fold")
    marks = {True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}
    for line in receipt.lines:
        table.add_row(marks[line.ok], escape(line.name), escape(line.planned), escape(line.found))
    return table


def print_receipt(receipt: Receipt, console: Console | None = None) -> None:
    """Print a receipt to standard error, which programs do not parse."""
    (console or Console(stderr=True)).print(receipt_table(receipt))


def print_findings(findings: Sequence[Finding], console: Console, *, nothing: str = "") -> None:
    """Print findings.

    ``nothing`` is printed if there are none (`shardwise.diagnosis.diagnose.why_nothing`).
    """
    if not findings:
        if nothing:
            console.print(escape(nothing))
        return
    for finding in findings:
        for line in lines_of(finding):
            console.print(line, soft_wrap=True)


def lines_of(finding: Finding) -> list[str]:
    """Format one finding as rich's markup: the sentence, its evidence, its cost, and the fix."""
    text = escape(finding.text)
    lines = [f"{_MARKS[finding.level]}  {f'[bold]{text}[/]' if finding.level == 'alarm' else text}"]
    lines += [f"       [dim]{escape(line)}[/]" for line in finding.evidence]
    if finding.money is not None:
        lines.append(f"       cost: {money_text(finding.money)} an hour, of all devices")
    if finding.fix:
        lines.append(f"       fix: {escape(finding.fix)}")
    return lines


def timing_table(timing: Timing) -> Table:
    """Build one row per part: seconds over ranks, its share, and the extreme ranks."""
    rate = "" if timing.tokens_per_s is None else f", {count_text(timing.tokens_per_s)} tokens/s"
    ranks = counted(timing.world_size, "rank")
    table = Table(
        title=f"step time breakdown ({milliseconds(timing.step_s)}): {counted(timing.steps, 'step')}, {ranks}{rate}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("part", no_wrap=True)
    for column in ("a step", "share", "least", "most", "on"):
        table.add_column(column, justify="right")
    for part in PHASES:
        found = timing.parts.get(part)
        if found is not None:
            several = timing.world_size > 1
            table.add_row(
                NAMES[part],
                milliseconds(found.mean_s),
                f"{timing.share(part):.1%}",
                milliseconds(found.low_s) if several else "",
                milliseconds(found.high_s) if several else "",
                f"rank {found.highest_rank}" if several else "",
            )
        elif part in timing.unmeasured:
            table.add_row(NAMES[part], "unknown", "", "", "", timing.unmeasured[part])
    for part, seconds in timing.between_s.items():
        if seconds:
            table.add_row(f"between steps: {NAMES[part]}", milliseconds(seconds), "", "", "", "")
    if timing.stopwatch_s is not None:
        full, watch = milliseconds(timing.whole_s), milliseconds(timing.stopwatch_s)
        table.caption = f"parts and the time between steps add up to {full}; by stopwatch {watch}"
        table.caption_justify = "left"
    return table


def milliseconds(seconds: float) -> str:
    """Format ``12.3 ms``, or seconds from ten on."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def print_trace(
    summary: TraceSummary, console: Console, *, peak_flops: float | None = None, bytes_per_s: float | None = None
) -> None:
    """Print a trace summary; ``peak_flops`` and ``bytes_per_s`` are the device's, if known."""
    if summary.file:
        console.print(
            f"trace: '{summary.file}' in the run folder; open it in Perfetto or chrome://tracing", markup=False
        )
    for sentence in words(summary, peak_flops, bytes_per_s):
        console.print(f"  {sentence}", markup=False)
    console.print(operations_table(summary, peak_flops, bytes_per_s))


def operations_table(summary: TraceSummary, peak_flops: float | None = None, bytes_per_s: float | None = None) -> Table:
    """Build a table of the busiest operations by their own time.

    Rates are of products whose shapes are in the trace.

    Empty columns are omitted: on a CPU the launcher, without the device's figures the bound.
    """
    on_device = summary.device == "cuda"
    bounds = [bound_of(one.intensity, peak_flops, bytes_per_s) for one in summary.operations]
    table = Table(title="busiest kernels" if on_device else "busiest operators", title_justify="left")
    table.add_column("operation", overflow="fold")
    if on_device:
        table.add_column("launched by", overflow="fold")
    for name in ("calls", "own time", "share", "rate", *(("bound by",) if any(bounds) else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for one, bound in zip(summary.operations, bounds, strict=True):
        table.add_row(
            escape(one.name),
            *((escape(one.operator or "unknown"),) if on_device else ()),
            str(one.calls),
            short_time(one.self_s),
            f"{one.share:.1%}",
            rate_text(one.flops_per_s) if one.flops_per_s is not None else "",
            *((bound,) if any(bounds) else ()),
        )
    return table


def _print_data(corpus: TaskData, console: Console, config: Config) -> None:
    if isinstance(corpus, RowData):
        notes = [f"task {corpus.task}", *(corpus.facts or {}).get("told", [])]
        for number, line in enumerate(notes):
            console.print(f"{'      ' if number else 'data: '}{line}", markup=False)
        return
    receipt = data_receipt(corpus, config)
    for number, line in enumerate(receipt.lines()):
        console.print(f"{'      ' if number else 'data: '}{line}", markup=False)
    if receipt.packing == "joined":
        masked = config.data.mask_borders
        borders = "has no loss on their first tokens" if masked else "has loss on their first tokens, too"
        console.print(
            f"      joined: documents of one sample attend to each other, and it {borders}; "
            'data.pack="isolated" keeps each document apart',
            markup=False,
        )


def print_plan(
    choice: Choice, spec: ModelSpec, cluster: ClusterSpec, corpus: TaskData, console: Console, config: Config
) -> None:
    """Print the full plan."""
    plan = choice.plan
    packed = sum(p.num_elements for p in spec.parameters if p.dtype == "uint8" and plan.parsed.adapter == "qlora")
    full = spec.num_parameters + packed  # two in a byte
    frozen = full - spec.num_trainable
    console.print(
        f"model: {count_text(full)} parameters"
        + (f", {count_text(frozen)} of them frozen" if frozen else "")
        + (f" ({count_text(2 * packed)} in 4 bits)" if packed else "")
        + f", {len(spec.blocks)} repeated blocks"
        + (f", tied: {'; '.join(' = '.join(names) for names in spec.tied)}" if spec.tied else "")
    )
    if (added := added_tokens(config, corpus.vocab_size)) is not None:
        console.print(
            f"       {added.count} tokens of data.tokenizer are new to it: its embedding and its head are resized from "
            f"{added.old} to {added.new} rows, and the new ones begin as the mean of the others"
        )
    _print_data(corpus, console, config)
    memory = bytes_text(cluster.device_memory_bytes)
    where = f"{cluster.world_size} × {cluster.device_name}, {memory} each"
    computes = f"{choice.precision or plan.precision}, recompute {plan.recompute_words}"
    console.print(f"plan: [bold]{plan.strategy}[/] on {where} ({plan.dims}), {computes}")
    console.print(f"      {plan.reason}")
    for name, why in choice.rejected:
        console.print(f"      not {name}: {why}")
    console.print(f"batch: {plan.batch_equation()}")
    table = Table(title="predicted memory of a rank", title_justify="left", title_style="bold")
    for name in CATEGORIES:
        table.add_column(name, justify="right")
    table.add_row(*(bytes_text(getattr(choice.estimate, name)) for name in CATEGORIES))
    console.print(table)
