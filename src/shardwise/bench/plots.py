"""Plots of the benchmarks; each function returns False if matplotlib is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.bench.quartiles import Quartiles
from shardwise.bench.scaling.scaling_report import PART_NAMES

DPI = 110
SETTINGS = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True}
OURS, OTHERS = "tab:blue", "0.65"
LINK_COLOURS = {
    "all_reduce": "tab:blue",
    "all_gather": "tab:green",
    "reduce_scatter": "tab:orange",
    "all_to_all": "tab:purple",
    "send": "0.25",
}
MODE_COLOURS = {"weak": "tab:blue", "strong": "tab:orange"}
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
    "exposed_ep": "tab:gray",
}
SHOWN = 6
"""Losses of a size that have a separate colour."""
SCHEDULE_COLOURS = {"gpipe": "tab:orange", "1f1b": "tab:blue", "interleaved-1f1b": "tab:green"}
AIM = 0.98


def draw_checkpoints(document: dict[str, Any], file: Path) -> bool:
    """Draw the document of ``bench checkpoint`` into a PNG file; False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    cases = document["cases"]
    with rc_context(SETTINGS):
        figure = Figure(figsize=(11, 0.4 + 2.6 * len(cases)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(cases), 3, squeeze=False)
        for (durable, stall, dip), case in zip(axes, cases, strict=True):
            rows = case["summary"][::-1]
            _bars(durable, rows, "seconds", f"{case['strategy']}: seconds until durable", "{:.2f}")
            _bars(stall, rows, "stall_s", "seconds the training stood still", "{:.3f}")
            _bars(dip, rows, "dip", "step time of the ten steps after ÷ without a save", "{:.2f}")
            dip.axvline(1.0, color="0.3", lw=1)
            dip.set_xlim(left=min(0.9, *(row["dip"]["low"] for row in rows)))
        gib = cases[0]["state_bytes"] / 1024**3
        figure.suptitle(
            f"Saving {gib:.2f} GiB of model and optimizer from {document['ranks']} ranks; medians and quartiles, "
            f"{document['device']}, {document['date']}"
        )
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def _bars(axis: Any, rows: list[dict[str, Any]], key: str, title: str, form: str) -> None:
    """Draw a bar for each contender's median, with its quartiles."""
    medians = [row[key]["median"] for row in rows]
    below = [row[key]["median"] - row[key]["low"] for row in rows]
    above = [row[key]["high"] - row[key]["median"] for row in rows]
    names = [row["contender"] for row in rows]
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    axis.barh(names, medians, color=colours, xerr=[below, above], error_kw={"lw": 1, "ecolor": "0.2"})
    for position, (median, up) in enumerate(zip(medians, above, strict=True)):
        axis.annotate(form.format(median), (median + up, position), (3, 0), textcoords="offset points", va="center")
    axis.set_title(title, fontsize=9)
    axis.margins(x=0.18)


def draw_links(document: dict[str, Any], file: Path) -> bool:
    """Draw the document of ``bench comm`` into a PNG file; False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = list(dict.fromkeys(item["axis"] for item in document["measured"]))
    with rc_context(SETTINGS):
        figure = Figure(figsize=(10.5, 3.7 * len(axes)), layout="constrained")
        FigureCanvasAgg(figure)
        for (rates, times), axis in zip(figure.subplots(len(axes), 2, squeeze=False), axes, strict=True):
            items = [item for item in document["measured"] if item["axis"] == axis]
            expected = [link for link in document["links"] if link["axis"] == axis]
            _rates(rates, items, expected)
            _times(times, items)
            scope = f"{items[0]['ranks']} ranks, " + ("one node" if items[0]["where"] == "node" else "across nodes")
            rates.set_title(f"{axis} ({scope}): bus bandwidth", fontsize=9)
            times.set_title(f"{axis}: seconds of a call; dashed: latency + bus bytes / bandwidth", fontsize=9)
        facts = (document["device_name"], document["backend"], f"{document['ranks']} ranks", document["date"])
        figure.suptitle(", ".join(facts), fontsize=9)
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def _rates(axis: Any, items: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Draw bus bandwidth of the medians, and the catalogue's value, if any, as a dotted line."""
    fastest = max(max(item["bus_bytes_per_s_by_size"]) for item in items)
    unit, name = (1e9, "GB/s") if fastest >= 1e9 else (1e6, "MB/s")
    for item in items:
        colour = LINK_COLOURS[item["collective"]]
        scaled = [rate / unit for rate in item["bus_bytes_per_s_by_size"]]
        axis.plot(item["sizes_bytes"], scaled, ".-", color=colour, lw=1.2, ms=4, label=item["collective"])
        line = next((link for link in expected if link["collective"] == item["collective"]), None)
        if line is not None and line["expected_bytes_per_s"]:
            axis.axhline(line["expected_bytes_per_s"] / unit, color=colour, lw=0.8, ls=":")
    axis.set_ylim(bottom=0)
    axis.set_ylabel(name)
    axis.legend(fontsize=8)
    _sizes(axis, items)


def _times(axis: Any, items: list[dict[str, Any]]) -> None:
    """Draw medians with the fastest and slowest round, and the fit."""
    for item in items:
        colour, sizes = LINK_COLOURS[item["collective"]], item["sizes_bytes"]
        axis.plot(sizes, item["median_s"], ".-", color=colour, lw=1.2, ms=4)
        low, high = ([pick(row) for row in item["samples_s"]] for pick in (min, max))
        axis.fill_between(sizes, low, high, color=colour, alpha=0.12, lw=0)
        if item["latency_s"] is not None and item["bus_bytes_per_s"] is not None:
            share = item["bus_bytes_per_s_by_size"][-1] / item["algorithm_bytes_per_s"][-1]
            line = [item["latency_s"] + size * share / item["bus_bytes_per_s"] for size in sizes]
            axis.plot(sizes, line, "--", color=colour, lw=0.8)
    axis.set_yscale("log")
    axis.set_ylabel("s")
    _sizes(axis, items)


def _sizes(axis: Any, items: list[dict[str, Any]]) -> None:
    """Label every fourth power of two on the axis."""
    from shardwise.units import bytes_text

    axis.set_xscale("log", base=2)
    sizes = sorted({size for item in items for size in item["sizes_bytes"]})
    ticks = sizes[::-3][::-1]
    axis.set_xticks(ticks, [bytes_text(size).replace(".00", "") for size in ticks], fontsize=8)
    axis.set_xlabel("message (as nccl-tests counts it)")


def draw_scaling(document: dict[str, Any], file: Path) -> bool:
    """Draw a document of ``bench scaling`` into a PNG file; False without matplotlib.

    Points are measured, their bars cover 8 cases in 10 according to the scatter of steps; lines and bands are
    predicted.
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
        for mode, colour in MODE_COLOURS.items():
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
    """Devices, efficiency and its interval: the last uncrowded measured size, then predictions."""
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
    offset: dict[str, Any] = {"xytext": (7, 5)} if mode == "weak" else {"xytext": (-7, -13), "ha": "right"}
    for row in rows[1:]:
        text = f"{row['efficiency']:.0%}{' (shared cores)' if row['crowded'] else ''}"
        axis.annotate(text, (row["devices"], row["efficiency"]), textcoords="offset points", color=colour, **offset)
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
    """Draw a bar per size: seconds of a step above the ideal by part; gains are left of zero."""
    axis.set_title("ms of a step above the ideal, by part", fontsize=9)
    if not rows:
        axis.text(0.5, 0.5, "one size, or no parts measured", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    labelled: set[str] = set()
    for position, row in enumerate(rows[::-1]):
        right = left = 0.0
        kept = sorted(row["losses"], key=lambda one: -abs(one["seconds"]))
        named = [one for one in kept[:SHOWN] if one["part"] != "untold"]
        rest = sum(one["seconds"] for one in kept) - sum(one["seconds"] for one in named)
        for part, seconds in [*((one["part"], one["seconds"]) for one in named), ("rest", rest)]:
            value, name = seconds * 1e3, PART_NAMES.get(part, "the rest")
            start = right if value >= 0 else left
            colour = LOSS_COLOURS.get(part, "0.6" if part == "rest" else "0.4")
            axis.barh(position, value, left=start, color=colour, height=0.6, label=None if name in labelled else name)
            labelled.add(name)
            right, left = (right + value, left) if value >= 0 else (right, left + value)
    names = [f"{row['mode']}, {row['devices']}" for row in rows[::-1]]
    axis.set_yticks(range(len(names)), names)
    axis.axvline(0.0, color="0.3", lw=0.8)
    axis.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)


def draw_steps(document: dict[str, Any], file: Path) -> bool:
    """Draw the document of ``bench step`` into a PNG file; False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    strategies = list(dict.fromkeys(item["strategy"] for item in document["bubble"]))
    number = 1 + len(strategies)
    with rc_context(SETTINGS):
        figure = Figure(figsize=(5.6 * number, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        ratios, *rest = figure.subplots(1, number, squeeze=False)[0]
        timed = [item for item in document["samples"] if item["plain_s"]]
        _ratios(ratios, {item["strategy"]: _each(item["plain_s"], item["shardwise_s"]) for item in timed})
        ratios.axvline(AIM, color="0.3", lw=1, ls=":")
        ratios.set_title(f"plain step time ÷ Shardwise's; dotted: the aim, {AIM}", fontsize=9)
        for axis, strategy in zip(rest, strategies, strict=True):
            _bubbles(axis, strategy, [item for item in document["bubble"] if item["strategy"] == strategy])
        ranks = f"{document['ranks']} ranks of {document['threads_per_rank']} thread(s)"
        facts = (document["model"], document["precision"], ranks, document["device"], document["date"])
        figure.suptitle(", ".join(facts), fontsize=9)
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def draw_against(document: dict[str, Any], file: Path) -> bool:
    """Draw the document of ``bench step --against`` into a PNG file; False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    ours = {row["strategy"]: row for row in document["rows"] if row["name"] == "shardwise"}
    with rc_context(SETTINGS):
        figure = Figure(figsize=(4.2 * len(ours), 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axis, (strategy, own) in zip(figure.subplots(1, len(ours), squeeze=False)[0], ours.items(), strict=True):
            peers = [row for row in document["rows"] if row["strategy"] == strategy and row is not own]
            rows = {
                f"{row['name']}\n{row['version']}": _each(row["step_s"], own["step_s"])
                for row in peers
                if row["step_s"] and not row["void"]
            }
            _ratios(axis, rows)
            axis.set_title(f"{strategy}: step time ÷ Shardwise's", fontsize=9)
        ranks = f"{document['ranks']} ranks of {document['threads_per_rank']} thread(s)"
        facts = (document["model"], document["precision"], ranks, document["device"], document["date"])
        figure.suptitle(", ".join(facts), fontsize=9)
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def _each(others: list[float], ours: list[float]) -> list[float]:
    """Ratio of each turn."""
    return [other / own for other, own in zip(others, ours, strict=True)]


def _ratios(axis: Any, rows: dict[str, list[float]]) -> None:
    """Draw each turn's ratio as a dot, the quartiles as a bar, the median as text."""
    for position, ratios in enumerate(reversed(rows.values())):
        of = Quartiles.of(ratios)
        axis.plot(ratios, [position] * len(ratios), ".", color="0.7", ms=3)
        axis.plot([of.low, of.high], [position, position], color="tab:blue", lw=5, alpha=0.6, solid_capstyle="butt")
        axis.plot([of.median], [position], "|", color="black", ms=12)
        axis.annotate(f"{of.median:.3f}", (of.median, position), (0, 9), textcoords="offset points", ha="center")
    axis.axvline(1.0, color="0.3", lw=1)
    axis.set_yticks(range(len(rows)), reversed(rows))
    axis.set_ylim(-0.6, len(rows) - 0.3)


def _bubbles(axis: Any, strategy: str, items: list[dict[str, Any]]) -> None:
    """Draw measured points with quartiles, and the formula as a line, by micro-batch count."""
    for schedule in dict.fromkeys(item["schedule"] for item in items):
        rows = sorted((i for i in items if i["schedule"] == schedule), key=lambda i: int(i["micro_batches"]))
        micros = [row["micro_batches"] for row in rows]
        quartiles = [Quartiles.of(row["shares"]) for row in rows]
        formula = [(row["stages"] - 1) / (row["virtual"] * row["micro_batches"] + row["stages"] - 1) for row in rows]
        colour = SCHEDULE_COLOURS.get(schedule, "0.4")
        medians = [of.median for of in quartiles]
        spread = [[of.median - of.low for of in quartiles], [of.high - of.median for of in quartiles]]
        axis.errorbar(micros, medians, yerr=spread, fmt="o", ms=4, color=colour, label=schedule, capsize=2)
        axis.plot(micros, formula, color=colour, lw=1, ls="--")
    axis.set_xscale("log", base=2)
    ticks = sorted({item["micro_batches"] for item in items})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("micro batches")
    axis.legend()
    axis.set_title(f"{strategy}: idle share of a step; dashed: (p - 1) / (v·m + p - 1)", fontsize=9)
