"""Charts as Plotly figures: plain dicts, drawn by plotly.js in the reader's browser.

A colour written ``var:name`` is looked up in the style sheet when a chart is drawn, so that one figure serves the light
and the dark page. Plotly reads tags in texts, so names that come from a file are escaped.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardwise.measure.step_time.timing import BETWEEN, NAMES, PHASES, WAIT_PHASES, Timing
from shardwise.report.html.run_record import (
    BenchSamples,
    Column,
    Curve,
    LoggedEvaluation,
    Memory,
    RunRecord,
    Series,
)
from shardwise.units import bytes_text, number_text

Figure = dict[str, Any]
SMALL = 0.005
"""Parts below this share of a step are drawn together: they would be no wider than a line."""
SMOOTHED = 60
"""Number of points from which on their running median is drawn over them."""
RANKS = 16
"""Most ranks to draw; of more, those that work longest and those that work shortest."""
CURVES = 6
MIB, GIB = 2**20, 2**30
LABELS = 72
"""Pixels at the right of a chart for the labels of its lines, which would cover them elsewhere."""
_AXIS = {"gridcolor": "var:grid", "linecolor": "var:line", "zeroline": False, "automargin": True, "ticks": ""}
_BARS = {"bargap": 0.3, "yaxis": {"autorange": "reversed", "showgrid": False, "title": {"text": ""}}}

FAMILIES = {
    "computing": ("forward", "backward", "recompute", "clip", "optimizer"),
    "exposed communication": ("exposed_dp", "exposed_tp", "exposed_cp", "exposed_ep", "pipeline", "control"),
    "waiting for slowest rank": ("slowest_rank",),
    "data": ("data", "transfer"),
    "the loop's own code": ("other",),
}
"""Families of parts for a summary sentence; every part is in one of them."""
ORDER = tuple(part for family in FAMILIES.values() for part in family)
"""Stack order from bottom to top: compute first, waiting on top of it."""


def words(part: str) -> str:
    """Return a part's title; an unknown part keeps its name."""
    return NAMES.get(part, part)


def colour(part: str) -> str:
    """Return the style sheet variable of a part's colour."""
    return f"p-{part}" if part in PHASES or part in BETWEEN else "p-other"


def ordered(parts: Mapping[str, object]) -> list[str]:
    """Order the present parts as in the stack; unknown ones last."""
    return [part for part in ORDER if part in parts] + [part for part in parts if part not in ORDER]


def families(timing: Timing) -> list[tuple[str, float]]:
    """Sum seconds of a step by family, largest first; empty families are left out."""
    sums = {name: sum(timing.seconds(part) for part in parts) for name, parts in FAMILIES.items()}
    return sorted(((name, value) for name, value in sums.items() if value > 0), key=lambda item: -item[1])


def all_figures(record: RunRecord) -> dict[str, Figure]:
    """Build the charts that the record has numbers for, by name."""
    series, timing = record.series, record.timing
    found = {
        "loss": loss_figure(series),
        "heldout": heldout_figure(record.evaluations),
        "throughput": throughput_figure(record),
        "parts": parts_figure(series),
        "ranks": None if timing is None else ranks_figure(timing),
        "memory": memory_figure(record.memory),
        "scaling": curves_figure(record.scaling, x="devices", y="tokens a second", text=lambda count: f"{count:,.0f}"),
        "links": curves_figure(
            record.links,
            x="size of a message",
            y="GB/s on the bus",
            text=lambda size: bytes_text(size).replace(".00", ""),
        ),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def figure(data: Sequence[Figure], *, x: str, y: str, height: int = 300, **layout: Any) -> Figure:
    """Build a figure in the page's style; ``x`` and ``y`` are axis titles with units."""
    base: Figure = {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": "var:soft"},
        "hoverlabel": {"bgcolor": "var:card", "bordercolor": "var:line", "font": {"color": "var:ink"}},
        "showlegend": False,
        "xaxis": {**_AXIS, "title": {"text": x, "standoff": 10}, "showgrid": False},
        "yaxis": {**_AXIS, "title": {"text": y, "standoff": 10}},
    }
    for key, value in layout.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return {"data": list(data), "layout": base}


def running_median(values: Column, width: int) -> list[float | None]:
    """Return the running median of ``width`` values around each value; fewer at the ends."""
    half = width // 2
    found: list[float | None] = []
    for place in range(len(values)):
        known = [v for v in values[max(0, place - half) : place + half + 1] if v is not None]
        found.append(statistics.median(known) if known else None)
    return found


def _line(x: Sequence[Any], y: Sequence[Any], name: str, tone: str, **more: Any) -> Figure:
    line = {"color": tone, "width": 2.5, **more.pop("line", {})}
    mode = "lines" if len(x) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name, "line": line, **more}


def _bar(x: Iterable[Any], y: Iterable[str], name: str, tone: str, text: Sequence[str], **more: Any) -> Figure:
    bar = {"type": "bar", "orientation": "h", "x": list(x), "y": list(y), "name": html.escape(name), "text": text}
    return {**bar, "marker": {"color": f"var:{tone}"}, **more}


def _label(y: float, text: str, size: int) -> Figure:
    """Label a line behind its end, at the right of the chart."""
    place = {"xref": "paper", "x": 1, "y": y, "xanchor": "left", "xshift": 6, "align": "left", "showarrow": False}
    return {**place, "text": text, "font": {"color": "var:ink", "size": size}}


def _measured(series: Series, values: Column, name: str, digits: str) -> list[Figure]:
    """Plot points, or if there are many, pale ones and their running median."""
    hover = f"step %{{x:,}}: %{{y:{digits}}}<extra></extra>"
    if len(values) < SMOOTHED:
        return [_line(series.step, values, name, "var:accent", hovertemplate=hover, marker={"color": "var:accent"})]
    pale = _line(series.step, values, name, "var:pale", line={"width": 1}, hovertemplate=hover)
    middle = running_median(values, max(5, len(values) // 40))
    return [pale, _line(series.step, middle, f"{name}, running median", "var:accent", hoverinfo="skip")]


def loss_figure(series: Series) -> Figure | None:
    """Plot training loss over steps; ``None`` without losses."""
    known = [value for value in series.loss if value is not None]
    if not known:
        return None
    data = _measured(series, series.loss, "loss", ".4f")
    labels = [_label(known[-1], f"<b>{known[-1]:.3f}</b>", 13)]
    unit = " (nats a token)" if any(value is not None for value in series.tokens) else ""
    return figure(data, x="step", y=f"training loss{unit}", annotations=labels, margin={"r": LABELS})


def heldout_figure(evaluations: Sequence[LoggedEvaluation]) -> Figure | None:
    """Plot held-out bits per byte over steps; ``None`` for fewer than two evaluations."""
    if len(evaluations) < 2:
        return None
    x, y = [e.step for e in evaluations], [e.heldout_bits_per_byte for e in evaluations]
    hover = "step %{x:,}: %{y:.4f}<extra></extra>"
    line = _line(x, y, "held out", "var:accent", marker={"color": "var:accent", "size": 8}, hovertemplate=hover)
    mode = "lines+markers+text" if len(evaluations) <= 8 else "lines+markers"
    line |= {"mode": mode, "text": [f"{value:.2f}" for value in y], "textposition": "top right", "cliponaxis": False}
    pad = (max(y) - min(y)) * 0.25 or 0.1
    span = {"range": [min(y) - pad, max(y) + pad]}
    return figure([line], x="step", y="bits per byte", height=240, yaxis=span, margin={"r": LABELS})


def throughput_figure(record: RunRecord) -> Figure | None:
    """Plot tokens or samples per second over steps, with the run's figure and its checkpoints."""
    series, values, noun = record.series, record.logged_per_s, record.noun
    median, saves = record.per_s, record.saves
    if not any(value is not None for value in values):
        return None
    shapes, notes = [], []
    if median is not None:
        dash = {"color": "var:soft", "width": 1.5, "dash": "dash"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": median, "y1": median, "line": dash})
        notes.append(_label(median, f"{number_text(median)}<br>{noun}/s", 12))
    data = _measured(series, values, f"{noun}/s", ",.0f")
    if saves:
        edge = {"color": "var:ink", "width": 1}
        tick = {"symbol": "triangle-up", "size": 14, "color": "var:p-checkpoint", "line": edge}
        hover = "checkpoint after step %{x:,}<extra></extra>"
        marks = {"type": "scatter", "mode": "markers", "marker": tick, "name": "checkpoint", "hovertemplate": hover}
        data.append({**marks, "x": [s.step for s in saves], "y": [0] * len(saves), "cliponaxis": False})
    top = max(value for value in values if value is not None)
    axis = {"range": [0, top * 1.2]}
    more: Figure = {"shapes": shapes, "annotations": notes, "margin": {"r": LABELS}}
    return figure(data, x="step", y=f"{noun} a second", yaxis=axis, **more)


def parts_figure(series: Series) -> Figure | None:
    """Plot stacked seconds of a step by part; ``None`` if the run logged none.

    Lines without parts (of the first steps) are left out: they would be drawn as zero. The figure also has ``keys``,
    the meaning of its colours, and ``off_scale``, the steps beyond its axis.
    """
    sums = {part: sum(v or 0.0 for v in column) for part, column in series.parts_s.items()}
    full = sum(sums.values())
    if not full:
        return None
    known = [i for i in range(len(series.step)) if any(column[i] is not None for column in series.parts_s.values())]
    steps = [series.step[i] for i in known]
    columns = {part: [column[i] for i in known] for part, column in series.parts_s.items()}
    heights = [sum(column[i] or 0.0 for column in columns.values()) for i in range(len(known))]
    top = _scale(heights)
    unit, name = _unit(top)
    large = [part for part in ordered(sums) if sums[part] / full >= SMALL]
    small = [part for part in sums if part not in large and sums[part] > 0]
    stacks: list[tuple[str, str, Sequence[float | None]]] = [(words(p), colour(p), columns[p]) for p in large]
    if small:
        rest = [sum(columns[part][i] or 0.0 for part in small) for i in range(len(known))]
        label = words(small[0]) if len(small) == 1 else f"{len(small)} parts below {SMALL:.1%} each"
        stacks.append((label, "p-between", rest))
    data = []
    for label, tone, column in stacks:
        y = [None if value is None else value * unit for value in column]
        area = {"mode": "lines", "stackgroup": "one", "fillcolor": f"var:{tone}", "line": {"width": 0.5}}
        data.append(_line(steps, y, html.escape(label), "var:card", hovertemplate=f"%{{y:.3~g}} {name}", **area))
    axis = {"range": [0, top * unit * 1.08]}
    drawn = figure(data, x="step", y=f"{name} a step", height=320, yaxis=axis, hovermode="x unified")
    beyond = [f"step {s:,} ({h * unit:,.0f} {name})" for s, h in zip(steps, heights, strict=True) if h > top * 1.08]
    more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
    return {**drawn, "keys": [(tone, label) for label, tone, _ in stacks], "off_scale": ", ".join(beyond[:3]) + more}


def _scale(heights: Sequence[float]) -> float:
    """Return the top of an axis: the highest value, or lower for a single extreme peak."""
    ordinary = statistics.quantiles(heights, n=50)[-1] if len(heights) > 20 else max(heights)
    return max(heights) if max(heights) < 1.5 * ordinary else max(h for h in heights if h <= 1.5 * ordinary)


def _unit(seconds: float) -> tuple[float, str]:
    return (1e3, "ms") if seconds < 1 else (1.0, "s")


def shown_ranks(timing: Timing) -> list[int]:
    """Select ranks to draw: all, or of many those that work longest and shortest, in order."""

    def own(rank: int) -> float:
        return sum(
            v
            for part, v in timing.ranks[rank].items()
            if part not in (*WAIT_PHASES, *BETWEEN, "slowest_rank", "pipeline")
        )

    everyone = list(range(len(timing.ranks)))
    if len(everyone) <= RANKS:
        return everyone
    by_work = sorted(everyone, key=own)
    return sorted({*by_work[: RANKS // 4], *by_work[-(RANKS - RANKS // 4) :]})


def ranks_figure(timing: Timing) -> Figure | None:
    """Plot one bar per rank, split into parts; ``None`` for a single rank (see the table).

    The figure also has ``keys``, ``unit`` and ``whose``, the ranks in words.
    """
    ranks = shown_ranks(timing)
    if len(ranks) < 2:
        return None
    unit, name = _unit(timing.step_s)
    seconds = [{p: v for p, v in one.items() if v > 0 and p not in BETWEEN} for one in timing.ranks]
    seen = dict.fromkeys(part for rank in ranks for part in seconds[rank])
    data = []
    for part in ordered(seen):
        values = [seconds[rank].get(part, 0.0) for rank in ranks]
        text = [f"{value * unit:.3g}" if value > 0.08 * timing.step_s else "" for value in values]
        place: Figure = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        hover = f"%{{fullData.name}}: %{{x:.3~g}} {name}<extra>%{{y}}</extra>"
        x, y = [value * unit for value in values], [f"rank {rank}" for rank in ranks]
        data.append(_bar(x, y, words(part), colour(part), text, hovertemplate=hover, **place))
    layout: Figure = {**_BARS, "barmode": "stack", "height": 76 + 36 * len(ranks)}
    drawn = figure(data, x=f"{name} a step", y="", xaxis={"showgrid": True}, **layout)
    few = "each rank" if len(ranks) == len(timing.ranks) else f"{len(ranks)} of {len(timing.ranks)} ranks"
    whose = few if few == "each rank" else f"{few}, those that work longest and those that work shortest themselves"
    return {**drawn, "keys": [(colour(p), words(p)) for p in ordered(seen)], "unit": name, "whose": whose}


def memory_figure(memory: Memory) -> Figure | None:
    """Plot predicted and measured peaks by phase; ``None`` without measurements."""
    if not memory.peaks:
        return None
    predicted_peaks = {} if memory.predicted is None else {str(p.name): p.allocated for p in memory.predicted.phases}
    phases: list[str] = [phase for phase in ("forward", "backward", "optimizer") if phase in memory.peaks]
    phases += [phase for phase in memory.peaks if phase not in phases]
    most = max([*memory.peaks.values(), *(predicted_peaks.get(phase, 0) for phase in phases)])
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    rows = (
        ("measured", "accent", [memory.peaks.get(phase) for phase in phases]),
        ("predicted", "pale", [predicted_peaks.get(phase) for phase in phases]),
    )
    data = []
    for label, tone, column in rows:
        values = [None if value is None else value / unit for value in column]
        text = ["" if value is None else f"{label} {value:,.1f} {name}" for value in values]
        place: Figure = {"textposition": "auto", "constraintext": "none", "cliponaxis": False}
        hover = f"{label}: %{{x:,.2f}} {name}<extra>%{{y}}</extra>"
        data.append(_bar(values, map(html.escape, phases), label, tone, text, hovertemplate=hover, **place))
    layout: Figure = {**_BARS, "barmode": "group", "height": 110 + 70 * len(phases)}
    x_axis = {"range": [0, most / unit * 1.05], "showgrid": True}
    return figure(data, x=f"{name} on the fullest rank", y="", xaxis=x_axis, **layout)


def curves_figure(samples: BenchSamples | None, *, x: str, y: str, text: Callable[[float], str]) -> Figure | None:
    """Plot measured curves and dashed predictions with intervals, on log-log axes.

    ``text`` formats a value of ``x``. The figure also has ``keys``, a colour for each group of curves.
    """
    if samples is None or not samples.curves:
        return None
    groups = list(dict.fromkeys(curve.group for curve in samples.curves if not curve.ideal))
    tones = {group: f"c{place % CURVES + 1}" for place, group in enumerate(groups)}
    tones |= {curve.group: "soft" for curve in samples.curves if curve.ideal}
    data = [trace for curve in samples.curves for trace in _curve(curve, f"var:{tones[curve.group]}", text)]
    across = [value for curve in samples.curves for value in curve.x]
    up = [value for curve in samples.curves for value in (*curve.y, *curve.low, *curve.high)]
    powers = [2.0**power for power in range(math.floor(math.log2(min(across))), math.ceil(math.log2(max(across))) + 1)]
    x_axis = {**_log_axis(powers[:: -(-len(powers) // 5)], text), "showgrid": True}
    steps = [digit * 10.0**power for power in range(-9, 16) for digit in (1, 2, 5)]
    shown = [value for value in steps if min(up) <= value <= max(up)] or [min(up), max(up)]
    y_axis = _log_axis(shown[:: -(-len(shown) // 7)], lambda value: f"{value:,.10g}")
    drawn = figure(data, x=x, y=y, height=360, xaxis=x_axis, yaxis=y_axis)
    return {**drawn, "keys": [(tone, group) for group, tone in tones.items()]}


def _log_axis(values: Sequence[float], text: Callable[[float], str]) -> Figure:
    ticks = {"tickmode": "array", "tickvals": list(values), "ticktext": [text(value) for value in values]}
    return {"type": "log", "tickangle": 0, **ticks}


def _curve(curve: Curve, tone: str, text: Callable[[float], str]) -> list[Figure]:
    line = _line(curve.x, curve.y, html.escape(curve.name), tone, marker={"color": tone, "size": 7})
    line["mode"] = "lines" if (curve.predicted or curve.ideal) and len(curve.x) > 1 else "lines+markers"
    if curve.predicted or curve.ideal:
        line["line"] = {**line["line"], "dash": "dot" if curve.ideal else "dash", "width": 1.5 if curve.ideal else 2.5}
    line["text"] = [text(value) for value in curve.x]
    line["hovertemplate"] = "%{text}: %{y:,.4~g}<extra>%{fullData.name}</extra>"
    if not curve.low:
        return [line]
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    low = {**edge, "x": list(curve.x), "y": list(curve.low)}
    high = {**edge, "x": list(curve.x), "y": list(curve.high), "fill": "tonexty", "fillcolor": "var:band"}
    return [low, high, line]
