"""The plot of ``bench comm``: bus bandwidth and seconds over message size, for each axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DPI = 110
SETTINGS = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True}
COLOURS = {
    "all_reduce": "tab:blue",
    "all_gather": "tab:green",
    "reduce_scatter": "tab:orange",
    "all_to_all": "tab:purple",
    "send": "0.25",
}


def draw(document: dict[str, Any], file: Path) -> bool:
    """Draw the document of ``bench comm`` into a PNG file; False where there is no matplotlib."""
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
            place = f"{items[0]['ranks']} ranks, " + ("one node" if items[0]["where"] == "node" else "across nodes")
            rates.set_title(f"{axis} ({place}): bus bandwidth", fontsize=9)
            times.set_title(f"{axis}: seconds of a call; dashed: latency + bus bytes / bandwidth", fontsize=9)
        facts = (document["device_name"], document["backend"], f"{document['ranks']} ranks", document["date"])
        figure.suptitle(", ".join(facts), fontsize=9)
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def _rates(axis: Any, items: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Bus bandwidth of the medians, and what the catalogue expects as a dotted line where it does."""
    fastest = max(max(item["bus_bytes_per_s_by_size"]) for item in items)
    unit, name = (1e9, "GB/s") if fastest >= 1e9 else (1e6, "MB/s")
    for item in items:
        colour = COLOURS[item["collective"]]
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
    """Medians with the fastest and slowest round, and the fit."""
    for item in items:
        colour, sizes = COLOURS[item["collective"]], item["sizes_bytes"]
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
    """A tick for every fourth power of two, in words."""
    from shardwise.units import bytes_text

    axis.set_xscale("log", base=2)
    sizes = sorted({size for item in items for size in item["sizes_bytes"]})
    ticks = sizes[::-3][::-1]
    axis.set_xticks(ticks, [bytes_text(size).replace(".00", "") for size in ticks], fontsize=8)
    axis.set_xlabel("message (as nccl-tests counts it)")
