"""Trace summary on the terminal: the sentences, and a table of the busiest operations."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.measure.profiler.summary import TraceSummary, bound_of
from shardwise.measure.profiler.trace_text import rate_text, short_time, words


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
