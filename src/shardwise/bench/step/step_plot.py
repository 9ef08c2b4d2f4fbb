"""The plot of ``bench step``: the ratio of each strategy, and a pipeline's bubble against its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DPI = 110
SETTINGS = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True}
COLOURS = {"gpipe": "tab:orange", "1f1b": "tab:blue", "interleaved-1f1b": "tab:green"}
AIM = 0.98


def draw(document: dict[str, Any], file: Path) -> bool:
    """Draw what the bench found into a PNG file; False where there is no matplotlib."""
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
        _ratios(ratios, [item for item in document["samples"] if item["plain_s"]])
        for axis, strategy in zip(rest, strategies, strict=True):
            _bubbles(axis, strategy, [item for item in document["bubble"] if item["strategy"] == strategy])
        ranks = f"{document['ranks']} ranks of {document['threads_per_rank']} thread(s)"
        facts = (document["model"], document["precision"], ranks, document["device"], document["date"])
        figure.suptitle(", ".join(facts), fontsize=9)
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
    return True


def _ratios(axis: Any, samples: list[dict[str, Any]]) -> None:
    """Every turn's ratio as a dot, the quartiles as a bar, the median in words."""
    names = [item["strategy"] for item in samples][::-1]
    for place, item in enumerate(samples[::-1]):
        ratios = [plain / ours for plain, ours in zip(item["plain_s"], item["shardwise_s"], strict=True)]
        low, median, high = _quartiles(ratios)
        axis.plot(ratios, [place] * len(ratios), ".", color="0.7", ms=3)
        axis.plot([low, high], [place, place], color="tab:blue", lw=5, alpha=0.6, solid_capstyle="butt")
        axis.plot([median], [place], "|", color="black", ms=12)
        axis.annotate(f"{median:.3f}", (median, place), (0, 9), textcoords="offset points", ha="center")
    axis.axvline(1.0, color="0.3", lw=1)
    axis.axvline(AIM, color="0.3", lw=1, ls=":")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.6, len(names) - 0.3)
    axis.set_title(f"plain step time ÷ Shardwise's; dotted: the aim, {AIM}", fontsize=9)


def _bubbles(axis: Any, strategy: str, items: list[dict[str, Any]]) -> None:
    """Measured points with quartiles, and the formula as a line, over the number of micro batches."""
    for schedule in dict.fromkeys(item["schedule"] for item in items):
        rows = sorted((i for i in items if i["schedule"] == schedule), key=lambda i: int(i["micro_batches"]))
        micros = [row["micro_batches"] for row in rows]
        quartiles = [_quartiles(row["shares"]) for row in rows]
        formula = [(row["stages"] - 1) / (row["virtual"] * row["micro_batches"] + row["stages"] - 1) for row in rows]
        colour = COLOURS.get(schedule, "0.4")
        medians = [median for _, median, _ in quartiles]
        spread = [[m - low for low, m, _ in quartiles], [high - m for _, m, high in quartiles]]
        axis.errorbar(micros, medians, yerr=spread, fmt="o", ms=4, color=colour, label=schedule, capsize=2)
        axis.plot(micros, formula, color=colour, lw=1, ls="--")
    axis.set_xscale("log", base=2)
    ticks = sorted({item["micro_batches"] for item in items})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("micro batches")
    axis.legend()
    axis.set_title(f"{strategy}: idle share of a step; dashed: (p - 1) / (v·m + p - 1)", fontsize=9)


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Of the values that there are, as the table has them."""
    ordered = sorted(values)
    low, median, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.25, 0.5, 0.75))
    return low, median, high
