"""The plot of ``bench scaling``: throughput and efficiency over devices, and where the lost time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.bench.scaling.scaling_report import PART_NAMES

DPI = 110
SETTINGS = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True}
COLOURS = {"weak": "tab:blue", "strong": "tab:orange"}
LOSS_COLOURS = {
    "exposed_dp": "tab:red",
    "slowest_rank": "tab:purple",
    "control": "tab:pink",
    "backward": "tab:blue",
    "forward": "tab:cyan",
    "optimizer": "tab:green",
    "data": "tab:olive",
    "exposed_tp": "tab:orange",
    "exposed_cp": "tab:brown",
}
SHOWN = 6
"""Losses of a size that have a colour of their own."""


def draw(document: dict[str, Any], file: Path) -> bool:
    """Draw a document of ``bench scaling`` into a PNG file; False where there is no matplotlib.

    Points are measured, bars at them 8 cases in 10 as the scatter of steps tells; lines and bands are predicted.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    with rc_context(SETTINGS):
        figure = Figure(figsize=(15.0, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        rate, share, lost = figure.subplots(1, 3)
        for mode, colour in COLOURS.items():
            rows = [row for row in document["rows"] if row["mode"] == mode]
            if rows:
                line = _line(rows, next((c["points"] for c in document["curves"] if c["mode"] == mode), []))
                _throughput(rate, rows, line, colour, mode)
                _efficiency(share, rows, line, colour, mode)
        _frame(rate, "tokens/s", log=True)
        _frame(share, "efficiency: tokens/s a device, of the smallest size's", log=False)
        share.axhline(1.0, color="0.4", lw=0.8)
        share.set_ylim(bottom=0.0)
        share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _losses(lost, [row for row in document["rows"] if row["losses"] and row["efficiency"] != 1.0])
        subject = document["subject"]
        facts = (subject["model"], subject["strategy"], subject["precision"], subject["device"], document["date"])
        figure.suptitle(", ".join(str(fact) for fact in facts), fontsize=9)
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def _line(rows: list[Any], points: list[Any]) -> list[tuple[int, float, float, float]]:
    """Devices, and efficiency with its interval: the last measured size without crowding, and what is predicted."""
    last = [row for row in rows if not row["crowded"]] or rows
    start = max(last, key=lambda row: int(row["devices"]))
    beyond = [p for p in points if p["step_s"] and p["devices"] > start["devices"]]
    return [(one["devices"], one["efficiency"], one["low"], one["high"]) for one in [start, *beyond]]


def _throughput(
    axis: Any, rows: list[Any], line: list[tuple[int, float, float, float]], colour: str, mode: str
) -> None:
    sizes = [row["devices"] for row in rows]
    each = rows[0]["tokens_per_s"] / rows[0]["devices"]
    axis.plot(sizes, [row["tokens_per_s"] for row in rows], "o", color=colour, ms=5, label=f"{mode}, measured")
    many = [size for size, *_ in line]
    if len(line) > 1:
        rate = [size * each * middle for size, middle, _, _ in line]
        axis.plot(many, rate, color=colour, lw=1, label=f"{mode}, predicted")
        low, high = [n * each * low for n, _, low, _ in line], [n * each * high for n, _, _, high in line]
        axis.fill_between(many, low, high, color=colour, alpha=0.15, lw=0)
    largest = max([*sizes, *many])
    axis.plot([sizes[0], largest], [each * sizes[0], each * largest], color=colour, lw=0.8, ls=":")


def _efficiency(
    axis: Any, rows: list[Any], line: list[tuple[int, float, float, float]], colour: str, mode: str
) -> None:
    sizes, found = [row["devices"] for row in rows], [row["efficiency"] for row in rows]
    error = [[row["efficiency"] - row["low"] for row in rows], [row["high"] - row["efficiency"] for row in rows]]
    axis.errorbar(sizes, found, yerr=error, fmt="o", ms=5, color=colour, capsize=2)
    place: dict[str, Any] = {"xytext": (7, 5)} if mode == "weak" else {"xytext": (-7, -13), "ha": "right"}
    for row in rows[1:]:
        text = f"{row['efficiency']:.0%}{' (shared cores)' if row['crowded'] else ''}"
        axis.annotate(text, (row["devices"], row["efficiency"]), textcoords="offset points", color=colour, **place)
    if len(line) > 1:
        many = [size for size, *_ in line]
        axis.plot(many, [middle for _, middle, _, _ in line], color=colour, lw=1)
        axis.fill_between(many, [n[2] for n in line], [n[3] for n in line], color=colour, alpha=0.15, lw=0)


def _frame(axis: Any, title: str, *, log: bool) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axis.xaxis.set_minor_locator(_no_ticks())
    axis.set_xlabel("devices")
    axis.set_title(title, fontsize=9)
    if log:
        axis.set_yscale("log")
        axis.legend(fontsize=8)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _losses(axis: Any, rows: list[Any]) -> None:
    """A bar for each size: seconds of a step above the ideal by part; what is won is left of zero."""
    axis.set_title("ms of a step above the ideal, by part", fontsize=9)
    if not rows:
        axis.text(0.5, 0.5, "one size, or no parts measured", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    labelled: set[str] = set()
    for place, row in enumerate(rows[::-1]):
        right = left = 0.0
        kept = sorted(row["losses"], key=lambda one: -abs(one["seconds"]))
        named = [one for one in kept[:SHOWN] if one["part"] != "untold"]
        rest = sum(one["seconds"] for one in kept) - sum(one["seconds"] for one in named)
        for part, seconds in [*((one["part"], one["seconds"]) for one in named), ("rest", rest)]:
            value, name = seconds * 1e3, PART_NAMES.get(part, "the rest")
            start = right if value >= 0 else left
            colour = LOSS_COLOURS.get(part, "0.6" if part == "rest" else "0.4")
            axis.barh(place, value, left=start, color=colour, height=0.6, label=None if name in labelled else name)
            labelled.add(name)
            right, left = (right + value, left) if value >= 0 else (right, left + value)
    names = [f"{row['mode']}, {row['devices']}" for row in rows[::-1]]
    axis.set_yticks(range(len(names)), names)
    axis.axvline(0.0, color="0.3", lw=0.8)
    axis.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)
