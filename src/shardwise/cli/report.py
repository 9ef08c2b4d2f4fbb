"""Verb ``shardwise report``: one HTML file about a run, and the same numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwise.cli.arguments import Json


def run_report(
    run: Annotated[Path, typer.Argument(help="Run folder (train.output).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: report.html in the run folder.")
    ] = None,
    scaling: Annotated[Path | None, typer.Option(help="Also show this scaling.json of bench scaling.")] = None,
    links: Annotated[Path | None, typer.Option(help="Also show this calibration file of bench comm.")] = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise report``. With ``--json`` the last line of stdout is ``report.json``.

    Raises:
        UserError: the folder has no run, or invalid samples; every problem.
        MachineError: the files cannot be written.
    """
    from shardwise.report.html.page import make_report
    from shardwise.report.html.sample_files import read_links, read_scaling, together

    given = together(
        lambda: None if scaling is None else read_scaling(scaling),
        lambda: None if links is None else read_links(links),
    )
    page = make_report(run, output=output, scaling=given[0], links=given[1])
    record = page.with_suffix(".json")
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    console.print(f"report: '{page}' (numbers: '{record}')", markup=False)
    if as_json:
        print(json.dumps(json.loads(record.read_text())), flush=True)
