"""Arguments and options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="config", help="TOML config file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as train.steps=20.")
]
Place = Annotated[str, typer.Argument(metavar="PLACE", help="Path or URL: a checkpoint, its run, or another tool's.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A file of shardwise plan -o.", show_default=False)]
Calibration = Annotated[
    Path | None, typer.Option("--calibration", help="Links as bench comm has measured them.", show_default=False)
]
SamplesFolder = Annotated[Path, typer.Option("--output", help="Folder for the raw samples and the plot.")]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Ranks on this machine.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON document; the rest is on stderr.")]
