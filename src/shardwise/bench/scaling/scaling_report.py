"""Text report of ``bench scaling``: efficiency, losses, value of the last device, the curve."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shardwise.bench.scaling.predict import Point, ScalingCurve
from shardwise.measure.scaling_facts import LeftOut, Loss, Scaling, ScalingRow, warnings_of
from shardwise.measure.step_time.timing import NAMES, Timing
from shardwise.units import count_text, money_text, seconds_text

PART_NAMES = {**NAMES, "untold": "not told apart"}
"""Parts of a step in words."""
TITLES = {"weak": "weak scaling: a batch for each device", "strong": "strong scaling: one global batch"}
SHOWN_LOSS = 0.005
"""Losses below this part of the step are summed up."""


def print_scaling(
    scaling: Scaling, rows: Sequence[ScalingRow], curves: Sequence[ScalingCurve], price: float | None, console: Console
) -> None:
    """Print all tables and lines."""
    for line in warnings_of(scaling):
        console.print(f"warning: {line}")
    for one in scaling.left_out:
        console.print(f"left out: {_left_out(one)}")
    for curve in curves:
        mine = [row for row in rows if row.mode == curve.mode]
        console.print(efficiency_table(mine, curve))
        for line in loss_lines(mine, scaling):
            console.print(line)
        for line in last_device_lines(mine, price):
            console.print(line)
        if any(point.step_s is not None and not _measured(point, mine) for point in curve.points):
            console.print(curve_table(curve, mine))
        for line in curve_lines(curve):
            console.print(line)


def efficiency_table(rows: Sequence[ScalingRow], curve: ScalingCurve) -> Table:
    """Build a table with a line for each size."""
    table = Table(title=TITLES[curve.mode], title_justify="left")
    for column in ("devices", "step", "tokens/s", "efficiency", "8 of 10 cases", "by formula"):
        table.add_column(column, justify="right", no_wrap=True)
    points = {point.devices: point for point in curve.points}
    for row in rows:
        point = points.get(row.devices)
        model = None if point is None else point.model_s
        table.add_row(
            f"{row.devices}{' !' if row.crowded else ''}",
            _ms(row.step_s),
            count_text(row.tokens_per_s),
            f"{row.efficiency:.1%}",
            f"{row.low:.0%} to {row.high:.0%}" if row.low != row.high else "–",
            "unknown" if model is None else _ms(model),
        )
    return table


def loss_lines(rows: Sequence[ScalingRow], scaling: Scaling) -> list[str]:
    """List the lost time of each size by cause, largest first."""
    found = []
    timings: dict[tuple[str, int], Timing | None] = {(one.mode, one.devices): one.timing for one in scaling.samples}
    for row in rows[1:]:
        if row.losses is None:
            found.append(f"  {row.devices} devices: where the time goes was not measured")
            continue
        large = [one for one in row.losses if abs(one.share) >= SHOWN_LOSS]
        rest = sum(one.seconds for one in row.losses if abs(one.share) < SHOWN_LOSS)
        parts = [_loss(one) for one in large]
        parts += [f"the rest {_signed(rest)}"] if large and abs(rest) > 5e-5 else []
        what = f"loses {_ms(row.lost_s)} of a step" if row.lost_s >= 0 else f"wins {_ms(-row.lost_s)} of a step"
        found.append(f"  {row.devices} devices: {what}: {', '.join(parts) or 'nothing above 0.5 %'}")
        timing = timings[row.mode, row.devices]
        late = None if timing is None else timing.late_rank
        if timing is not None and late is not None and (timing.late_share or 0) > 0.5:
            found.append(f"    rank {late} came last in {timing.late_share:.0%} of the steps")
    return found


def _loss(loss: Loss) -> str:
    return f"{PART_NAMES[loss.part]} {_signed(loss.seconds)} ({loss.share:+.1%})"


def last_device_lines(rows: Sequence[ScalingRow], price: float | None) -> list[str]:
    """Tokens and money that the devices since the previous size have added."""
    if len(rows) < 2:
        return []
    last, before = rows[-1], rows[-2]
    added = last.added_tokens_per_s
    if added is None or last.worth is None:
        return []
    number = last.devices - before.devices
    who = (
        f"the last of {last.devices} devices" if number == 1 else f"each of the last {number} of {last.devices} devices"
    )
    if added <= 0:
        cost = "" if price is None else f", for {money_text(price)} an hour"
        return [f"{who} takes {count_text(-added)} tokens/s away{cost}: there are more without"]
    first = f"{who} adds {count_text(added)} tokens/s, {last.worth:.0%} of what one of the first adds"
    if price is None:
        return [f"{first}; money: unknown, give --price (US dollars for an hour of a device)"]
    return [
        f"{first}: for {money_text(price)} an hour, {money_text(last.added_dollars_per_million_tokens)} a million "
        f"tokens (on average {money_text(last.dollars_per_million_tokens)}, on the smallest size "
        f"{money_text(rows[0].dollars_per_million_tokens)})"
    ]


def curve_table(curve: ScalingCurve, rows: Sequence[ScalingRow]) -> Table:
    """Build a table of the predicted sizes beyond the measured ones."""
    table = Table(title=f"predicted, {curve.mode} scaling", title_justify="left")
    for column in ("devices", "step", "8 of 10 cases", "tokens/s", "efficiency", "8 of 10 cases"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in curve.points:
        if _measured(point, rows) or point.step_s is None:
            continue
        table.add_row(
            str(point.devices),
            _ms(point.step_s),
            _between(point.low_s, point.high_s),
            count_text(point.tokens_per_s),
            f"{point.efficiency:.0%}",
            f"{point.low:.0%} to {point.high:.0%}",
        )
    return table


def curve_lines(curve: ScalingCurve) -> list[str]:
    """List the curve's assumptions, its anchor measurement, and its limits."""
    found = []
    if any(point.step_s is not None for point in curve.points):
        found += [f"  assumed: {text}" for text in curve.assumptions]
    if curve.measured_over_model is not None:
        found.append(
            f"  moved by {curve.measured_over_model:.2f} ×, so that it goes through the {curve.anchor} devices measured"
        )
    reasons: dict[str, list[int]] = {}
    for point in curve.points:
        if point.reason:
            reasons.setdefault(point.reason, []).append(point.devices)
    for reason, sizes in reasons.items():
        which = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        found.append(f"  {which} devices: unknown; {reason}")
    return found


def _measured(point: Point, rows: Sequence[ScalingRow]) -> bool:
    return any(row.devices == point.devices for row in rows)


def _left_out(one: LeftOut) -> str:
    return f"{one.devices} devices, {one.mode}: {one.reason}"


def _ms(seconds: float | None) -> str:
    if seconds is None or seconds >= 10:
        return seconds_text(seconds)
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _between(low: float | None, high: float | None) -> str:
    """Format ``88 to 153 ms``: the unit once, if both have the same."""
    if low is None or high is None or (low < 1) != (high < 1) or high >= 10:
        return f"{_ms(low)} to {_ms(high)}"
    return f"{low * 1e3:.0f} to {high * 1e3:.0f} ms" if high < 1 else f"{low:.2f} to {high:.2f} s"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{_ms(abs(seconds))}"
