"""``shardwise bench scaling``: read the question, and measure each size of it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwise.cli.arguments import ConfigPath, Json, Overrides, SamplesFolder
from shardwise.environment import rendezvous
from shardwise.errors import UserError


def run_bench_scaling(
    config_file: ConfigPath,
    overrides: Overrides = None,
    sizes: Annotated[
        list[int] | None, typer.Option("--size", help="Devices to run on; several times; else 1, 2, 4 ... all.", min=1)
    ] = None,
    mode: Annotated[
        str, typer.Option(help="weak (a batch for each device), strong (one global batch) or both.")
    ] = "both",
    steps: Annotated[int, typer.Option(help="Timed steps at each size.", min=4)] = 40,
    beyond: Annotated[int, typer.Option(help="Predict up to so many devices.", min=1)] = 1024,
    calibration: Annotated[Path | None, typer.Option(help="Links measured by bench comm.", show_default=False)] = None,
    price: Annotated[float | None, typer.Option(help="US dollars for an hour of one device.")] = None,
    output: SamplesFolder = Path("benchmarks"),
    as_json: Json = False,
) -> None:
    """The verb. Under torchrun this process is a rank, and its world is the size that is measured.

    Raises:
        UserError: whatever of the config and the options cannot be.
    """
    from shardwise.bench.scaling.scaling_sizes import ScalingRequest, measure_here, measure_under_launcher
    from shardwise.cost.link_calibration import read_calibration
    from shardwise.measure.scaling_facts import MODES
    from shardwise.run.checks import check_output
    from shardwise.train.config import read_config

    launched = rendezvous() is not None
    problems = _problems(mode, MODES, sizes or (), price, launched=launched)
    if problems:
        raise UserError(*problems)
    modes = MODES if mode == "both" else tuple(one for one in MODES if one == mode)
    request = ScalingRequest(
        modes=modes,
        sizes=tuple(sorted(set(sizes or ()))),
        steps=steps,
        beyond=beyond,
        calibration=calibration,
        price=price,
        output=output,
    )
    if calibration is not None:
        read_calibration(calibration)  # said before anything is measured
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    check_output(output)
    if launched:
        words = [*(overrides or ()), "train.epochs=none", "train.steps=1", f"train.output={output / 'work'}"]
        measure_under_launcher(read_config(config_file, words), request, console, as_json=as_json)
    with tempfile.TemporaryDirectory() as folder:
        words = [*(overrides or ()), "train.epochs=none", "train.steps=1", f"train.output={folder}"]
        document = measure_here(read_config(config_file, words), request, console)
    if as_json:
        print(json.dumps(document))


def _problems(
    mode: str, modes: Sequence[str], sizes: Sequence[int], price: float | None, *, launched: bool
) -> list[str]:
    found = []
    if mode not in (*modes, "both"):
        found.append(f"--mode '{mode}' is none of weak, strong and both")
    if price is not None and not 0 <= price < math.inf:
        wrong = "below 0" if price < 0 else "no amount"
        found.append(f"--price {price} is {wrong}; it must be US dollars for an hour of one device")
    if launched and sizes:
        found.append("--size: under torchrun the size is that of its world; leave it out, and run once for each size")
    return found
