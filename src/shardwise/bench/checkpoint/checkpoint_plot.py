"""The plot of ``bench checkpoint``: seconds until durable, the loop's stall, and the dip of the steps after a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DPI = 110
SETTINGS = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True}
OURS, OTHERS = "tab:blue", "0.65"


def draw(document: dict[str, Any], file: Path) -> bool:
    """Draw what the bench found into a PNG file; False where there is no matplotlib."""
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
    """A bar for each contender's median, with its quartiles."""
    medians = [row[key]["median"] for row in rows]
    below = [row[key]["median"] - row[key]["low"] for row in rows]
    above = [row[key]["high"] - row[key]["median"] for row in rows]
    names = [row["contender"] for row in rows]
    colours = [OURS if name.startswith("ours") else OTHERS for name in names]
    axis.barh(names, medians, color=colours, xerr=[below, above], error_kw={"lw": 1, "ecolor": "0.2"})
    for place, (median, up) in enumerate(zip(medians, above, strict=True)):
        axis.annotate(form.format(median), (median + up, place), (3, 0), textcoords="offset points", va="center")
    axis.set_title(title, fontsize=9)
    axis.margins(x=0.18)
