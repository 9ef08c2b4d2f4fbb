"""``report.html``: a self-contained page about a run, made from its `RunRecord` alone.

Its content security policy forbids network access. Charts are drawn by plotly.js, which is embedded
if the package plotly is installed; without it the tables under the charts are open instead.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from shardwise.errors import MachineError, ShardwiseError, UserError
from shardwise.report.html import figures, page_facts
from shardwise.report.html.observed_folder import read_folder
from shardwise.report.html.run_record import BenchSamples, RunRecord
from shardwise.report.html.text import rendered
from shardwise.train.run_files import RunFile, replace_file

ASSETS = Path(__file__).parent / "assets"


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
    record = read_folder(folder, scaling=scaling, links=links, ended=ended)
    page = output or folder / RunFile.PAGE
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page.with_suffix(".json"), f"{record.to_json()}\n")
        replace_file(page, render(record))
    except OSError as error:
        raise MachineError(f"'{page}' cannot be written: {error.strerror}; choose another --output") from None
    return page


def plotly_js() -> str | None:
    """Return plotly.js from the installed package, without loading it; ``None`` if missing."""
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    return file.read_text() if file.exists() else None


def render(record: RunRecord) -> str:
    """Render the page of a record."""
    library = plotly_js()
    charts = {} if library is None else figures.all_figures(record)
    return rendered(
        "report.html.j2",
        record=record,
        charts=charts,
        drawings={name: {key: figure[key] for key in ("data", "layout")} for name, figure in charts.items()},
        library=library,
        css=(ASSETS / "report.css").read_text(),
        js=(ASSETS / "report.js").read_text(),
        **page_facts.of_record(record, charts.keys()),
    )
