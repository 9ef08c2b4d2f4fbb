"""``report.html``: a self-contained page about a run, made from its `RunRecord` alone.

Its content security policy forbids network access. Charts are drawn by plotly.js, which is embedded
if the package plotly is installed; without it the tables under the charts are open instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from shardwise.errors import MachineError, ShardwiseError, UserError
from shardwise.report.html import details, figures, sections
from shardwise.report.html.run_folder import read_run
from shardwise.report.html.run_record import BenchSamples, RunRecord
from shardwise.report.html.text import Safe, el, joined
from shardwise.units import bytes_text

RECORD, PAGE = "report.json", "report.html"
ASSETS = Path(__file__).parent / "assets"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
WITHOUT_PLOTLY = (
    "Charts are not drawn, because plotly was not installed: pip install 'shardwise[ui]', and make the report again."
)
SCALING_TEXT = (
    "Throughput over devices: points are measured, dashed lines predicted, with their interval (8 cases in 10)."
)
LINKS_TEXT = "Bus bandwidth of each collective over the size of a message."


def write_report(folder: Path, log: Callable[[str], None]) -> Path | None:
    """Write ``report.json`` and ``report.html`` after a run's last step; ``None`` on failure.

    The report never fails a run: errors are reported through ``log``, and nothing is raised.
    """
    try:
        return make_report(folder, ended=True)
    except ShardwiseError as error:
        log(f"no report: {error}")
    except Exception as error:  # a defect of the report must not change the run's exit code
        log(f"no report: {type(error).__name__}: {error}; shardwise report '{folder}' makes it again")
    return None


def make_report(
    folder: Path,
    *,
    output: Path | None = None,
    scaling: BenchSamples | None = None,
    links: BenchSamples | None = None,
    ended: bool = False,
) -> Path:
    """Write both files and return the page's path; the record is beside it.

    ``ended``: see `read_run`.

    Raises:
        UserError: ``folder`` has no run, or ``output`` is not an HTML file.
        MachineError: the files cannot be written.
    """
    if output is not None and output.suffix != ".html":
        raise UserError(f"--output '{output}' must end in .html; the numbers are written beside it, as .json")
    record = read_run(folder, scaling=scaling, links=links, ended=ended)
    page = output or folder / PAGE
    document = record.to_json()
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        _replace(page.with_suffix(".json"), f"{document}\n")
        _replace(page, render(document))
    except OSError as error:
        raise MachineError(f"'{page}' cannot be written: {error.strerror}; choose another --output") from None
    return page


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically by ``text``: a page is never incomplete."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def plotly_js() -> str | None:
    """Return plotly.js from the installed package, without loading it; ``None`` if missing."""
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return file.read_text() if file.exists() else None


def all_figures(record: RunRecord) -> dict[str, figures.Figure]:
    """Build the charts that the record has numbers for, by name."""
    series, timing = record.series, record.timing
    found = {
        "loss": figures.loss_figure(series),
        "heldout": figures.heldout_figure(record.evaluations),
        "throughput": figures.throughput_figure(series, record.figures.tokens_per_s, record.saves),
        "parts": figures.parts_figure(series),
        "ranks": None if timing is None else figures.ranks_figure(timing),
        "memory": figures.memory_figure(record.memory),
        "scaling": figures.curves_figure(record.scaling, x="devices", y="tokens a second", text=_count),
        "links": figures.curves_figure(record.links, x="size of a message", y="GB/s on the bus", text=_size),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _size(value: float) -> str:
    """Format a message size, such as ``64 KiB``."""
    return bytes_text(value).replace(".00", "")


def render(document: str) -> str:
    """Render the page of a ``report.json``."""
    record = RunRecord.model_validate_json(document)
    library = plotly_js()
    charts = all_figures(record) if library is not None else {}
    drawn = set(charts)
    body = [
        sections.header(record),
        _navigation(record),
        el("p", WITHOUT_PLOTLY, class_="soft") if library is None else None,
        el("noscript", el("p", "Charts need JavaScript; their numbers are in the tables.", class_="soft")),
        sections.verdict(record),
        sections.missing(record),
        sections.key_figures(record),
        sections.loss(record, drawn),
        sections.throughput(record, drawn),
        details.time_section(record, charts),
        details.memory(record, charts),
        details.samples("scaling", "Scaling", record.scaling, SCALING_TEXT, charts),
        details.samples("links", "Links", record.links, LINKS_TEXT, charts),
        details.receipts(record),
        details.plan(record),
        details.environment(record),
        el("footer", "Made from report.json alone. Unknown values are marked, not guessed."),
        el("script", _json(charts), id="figures", type="application/json"),
        el("script", Safe(library)) if library is not None else None,
        el("script", Safe((ASSETS / "report.js").read_text())),
    ]
    head = [
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name_="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"{record.name} · Shardwise"),
        el("style", Safe((ASSETS / "report.css").read_text())),
    ]
    page = el("html", el("head", *head), el("body", joined(body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _json(charts: dict[str, figures.Figure]) -> Safe:
    """Serialize the figures as JSON that cannot close a script element."""
    kept = {name: {key: figure[key] for key in ("data", "layout")} for name, figure in charts.items()}
    return Safe(json.dumps(kept, allow_nan=False).replace("<", "\\u003c"))


def _navigation(record: RunRecord) -> Safe:
    places = [
        ("verdict", "Verdict"),
        ("key-figures", "Figures"),
        ("loss-section", "Loss"),
        ("throughput", "Throughput"),
        ("time", "Time"),
        ("memory-section", "Memory"),
        *([("scaling-section", "Scaling")] if record.scaling else []),
        *([("links-section", "Links")] if record.links else []),
        ("receipts", "Receipts"),
        ("plan", "Plan"),
        ("environment", "Environment"),
    ]
    links = [el("a", title, href=f"#{key}") for key, title in places]
    return el("nav", *links, aria_label="sections")
