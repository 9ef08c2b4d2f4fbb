"""The plots of the accuracy report, from results/*.json: PNG files of less than 150 KB each.

    python benchmarks/accuracy/plots.py

The plots of kernels and collectives are drawn by ``fit_kernels.py`` and ``fit_collectives.py``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import targets

Document = dict[str, Any]
BAND = 0.1
DPI = 100
SETTINGS = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "legend.frameon": False}
WAYS = {
    "model": "predicted time, told",
    "untold": "predicted time, untold",
    "rule": "rule of thumb",
    "random": "any plan",
}


def draw(documents: Mapping[str, Document], folder: Path) -> bool:
    """Draw all into ``folder``; False, with a word, where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'shardwise[plots]')")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    memory, speed = documents["published_memory"], documents["published_speed"]
    with plt.rc_context(SETTINGS):
        figures = {
            "published_memory": scatter(
                plt, [r for r in memory["rows"] if r["error"] is not None], "bytes", targets.GIB, "GiB"
            ),
            "published_speed": scatter(plt, speed["rows"], "s", 1.0, "seconds a step"),
            "errors": histograms(plt, memory["rows"], speed["rows"]),
            "regret": regrets(plt, speed["groups"]),
            "cpu_peak": peaks(plt, documents),
        }
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=DPI, metadata={"Software": None})
            plt.close(figure)
    return True


def scatter(plt: Any, rows: Sequence[Document], unit: str, scale: float, title: str) -> Any:
    """Predicted over measured, both logarithmic, coloured by source, with a band of 10 %."""
    groups: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        groups[row["source"]].append(row)
    figure, axis = plt.subplots(figsize=(8.5, 6.5), layout="constrained")
    values = [row[f"{kind}_{unit}"] / scale for row in rows for kind in ("measured", "predicted")]
    ends = [min(values) * 0.8, max(values) * 1.25]
    axis.fill_between(ends, [e * (1 - BAND) for e in ends], [e * (1 + BAND) for e in ends], color="0.85", lw=0)
    axis.plot(ends, ends, color="0.4", lw=1)
    colours = plt.get_cmap("tab20")
    largest_first = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    for place, (source, members) in enumerate(largest_first):
        median = statistics.median(abs(row["error"]) for row in members)
        axis.scatter(
            [row[f"measured_{unit}"] / scale for row in members],
            [row[f"predicted_{unit}"] / scale for row in members],
            s=12,
            color=colours((2 * place) % 20 + (place >= 10)),
            alpha=0.8,
            lw=0,
            label=f"{source} ({len(members)}, median {median:.1%})",
        )
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axis.set(xlabel=f"measured, {title}", ylabel=f"predicted, {title}", title="band: 10 % to either side")
    axis.legend(fontsize=7, loc="upper left")
    return figure


def histograms(plt: Any, memory: Sequence[Document], speed: Sequence[Document]) -> Any:
    """Errors of memory and of time, against being told less and against the null model."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    shown = {
        "memory, rows of the allocator": (
            ("told", targets.alike(memory)),
            ("untold", targets.alike(memory, "untold_error")),
        ),
        "step time": (
            ("told", [row["error"] for row in speed]),
            ("null model", [row["null_error"] for row in speed]),
        ),
    }
    edges = [n / 20 for n in range(-20, 21)]
    for axis, (title, series) in zip(axes, shown.items(), strict=True):
        for (name, errors), colour in zip(series, ("tab:blue", "tab:orange"), strict=True):
            inside = [max(-0.999, min(0.999, error)) for error in errors]
            median = statistics.median(abs(error) for error in errors)
            axis.hist(inside, edges, color=colour, alpha=0.5, label=f"{name}, median {median:.1%}")
        axis.axvline(0, color="0.3", lw=1)
        axis.set(title=title, xlabel="predicted / measured − 1 (ends hold what lies beyond)", ylabel="rows")
        axis.legend()
    return figure


def regrets(plt: Any, groups: Sequence[Document]) -> Any:
    """Share of groups whose regret is at most so much, for each way to choose."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    share = [(n + 1) / len(groups) for n in range(len(groups))]
    for key, name in WAYS.items():
        found = sorted(group[key] for group in groups)
        axis.step([0.0, *found], [0.0, *share], where="post", label=f"{name}, mean {statistics.fmean(found):.1%}")
    axis.axvline(0.15, color="0.6", lw=1, ls=":")
    axis.set(
        xlim=(-0.005, 0.6), ylim=(0, 1.02), xlabel="regret: time of the chosen plan / best − 1 (dotted: worst aimed at)"
    )
    axis.set(ylabel=f"share of {len(groups)} groups")
    axis.legend(loc="lower right")
    return figure


def peaks(plt: Any, documents: Mapping[str, Document]) -> Any:
    """Predicted over measured peaks on real CPU ranks, in order, coloured by strategy."""
    names = [name for name in targets.PEAKS if name in documents]
    figure, axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 4), layout="constrained", squeeze=False)
    strategies = sorted({row["strategy"] for name in names for row in documents[name]["rows"]})
    for axis, name in zip(axes[0], names, strict=True):
        rows = sorted(documents[name]["rows"], key=lambda row: row["error"])
        axis.axhspan(0.92, 1.08, color="0.9", lw=0)
        axis.axhline(1, color="0.4", lw=1)
        for place, strategy in enumerate(strategies):
            own = [(n, 1 + row["error"]) for n, row in enumerate(rows) if row["strategy"] == strategy]
            if own:
                axis.scatter(*zip(*own, strict=True), s=16, color=f"C{place}", label=strategy)
        axis.set(title=targets.PEAKS[name].replace("`", ""), xlabel="configuration, in order (band: 8 %)")
        axis.set(ylabel="predicted peak / measured peak")
        axis.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    draw(targets.read_results(), targets.RESULTS)
