"""Step time by part, as a table for people."""

from __future__ import annotations

from rich.table import Table

from shardwise.measure.step_time.timing import NAMES, PARTS, Timing
from shardwise.units import count_text


def timing_table(timing: Timing) -> Table:
    """Build one row per part: seconds over ranks, its share, and the extreme ranks."""
    rate = "" if timing.tokens_per_s is None else f", {count_text(timing.tokens_per_s)} tokens/s"
    ranks = "1 rank" if timing.world_size == 1 else f"{timing.world_size} ranks"
    table = Table(
        title=f"step time breakdown ({milliseconds(timing.step_s)}): {timing.steps} steps, {ranks}{rate}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("part", no_wrap=True)
    for column in ("a step", "share", "least", "most", "on"):
        table.add_column(column, justify="right")
    for part in PARTS:
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
    whole = timing.step_s + sum(timing.between_s.values())
    if timing.stopwatch_s is not None:
        watch = milliseconds(timing.stopwatch_s)
        table.caption = f"parts and the time between steps add up to {milliseconds(whole)}; by stopwatch {watch}"
        table.caption_justify = "left"
    return table


def milliseconds(seconds: float) -> str:
    """Format ``12.3 ms``, or seconds from ten on."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
