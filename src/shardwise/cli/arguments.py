"""Arguments and options shared by several verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="config", help="TOML config file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides, such as train.steps=20.")
]
CheckpointPath = Annotated[
    str, typer.Argument(metavar="PLACE", help="Path or URL of a run or of any tool's checkpoint.")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file of shardwise plan.", show_default=False)]
Calibration = Annotated[
    Path | None, typer.Option("--calibration", help="Link calibration file from bench comm.", show_default=False)
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Compare ddp, zero1 and fsdp with these: hand, accelerate, fabric, lightning, deepspeed; comma-separated.",
        show_default=False,
    ),
]
Bubble = Annotated[
    bool | None,
    typer.Option(
        "--bubble/--no-bubble",
        help="Also measure the pipeline bubble of each schedule; by default yes, but not with --against.",
        show_default=False,
    ),
]
Fp8Probe = Annotated[
    bool,
    typer.Option("--fp8", help="Time the config's parallel.fp8 beside bf16: is it faster here? 20 steps tell."),
]
SamplesFolder = Annotated[Path, typer.Option("--output", help="Folder for raw samples and the plot.")]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Ranks on this machine.", min=1)]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document as the last line of stdout; text on stderr.")
]
