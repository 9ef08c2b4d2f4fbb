"""Verb ``shardwise bench checkpoint``: start ranks, print the costs, save samples and plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from shardwise.cli.arguments import Json, Overrides, SamplesFolder
from shardwise.cli.train import chosen
from shardwise.errors import UserError
from shardwise.launch.on_ranks import on_ranks
from shardwise.units import GIB, bytes_text, seconds_text

if TYPE_CHECKING:
    from shardwise.run.job import Job

NOTES = (
    "Medians of the rounds, quartiles below; ratios are of turns in the same round. s: until durable. of raw, of "
    "direct: time of the raw write, through and past the page cache, ÷ its own. ÷ ours: its time ÷ that of our save of "
    "the same kind. stall: the loop stood still; of sync: in parts of our save in the foreground. dip: a step of the "
    "ten after ÷ one without a save. lost: how much longer the save and these ten steps took than ten without one."
)
DEFAULT_GIB = 1.0
WIDTH = 140  # of output that is not a terminal
_MEMORY = 4  # maximum full states on a rank: the live one, gradients, copies for the background, the one read back
_ROOM = 1.5  # of the state, free on the disk


def run_bench_checkpoint(
    config_file: Annotated[
        Path | None,
        typer.Argument(metavar="config", help="TOML config file; default: a synthetic model.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    size_gib: Annotated[
        float | None,
        typer.Option("--size", help="GiB of weights and optimizer state of the synthetic model; default: 1."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine; default: 2.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Saves per contender and strategy.", min=1)] = 5,
    step_s: Annotated[
        float, typer.Option("--step", help="Minimum step time of the synthetic model, in seconds.")
    ] = 0.3,
    output: SamplesFolder = Path("benchmarks/checkpoint"),
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to measure; default: --output.")] = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise bench checkpoint``.

    Raises:
        UserError: an argument is invalid; raised before the measurement.
    """
    if config_file is not None and size_gib is not None:
        raise UserError("--size is for a model that is made up, and a config has its own; leave one of them out")
    if size_gib is not None and size_gib <= 0:
        raise UserError(f"--size {size_gib:g}: it must be more than 0 GiB")
    state_bytes = int((size_gib or DEFAULT_GIB) * GIB)
    place = folder or output
    world = nproc or 2
    _check(place, output, world, state_bytes if config_file is None else 0)
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=as_json, highlight=False, width=WIDTH)
    with tempfile.TemporaryDirectory(prefix=".bench-checkpoint-", dir=place) as name:
        work = Path(name).absolute()
        job = None
        if config_file is not None:
            words = chosen([*(overrides or ()), f"train.output={work}"], nproc=nproc)
            job = _job_of(config_file, words, console)
            world = job.plan.dims.world_size
        from shardwise.bench.checkpoint.checkpoint_ranks import CheckpointBenchRequest

        request = CheckpointBenchRequest(
            state_bytes=state_bytes, job=job, rounds=rounds, step_s=step_s, seed=0, folder=work, as_json=as_json
        )
        device = job.plan.device if job else "auto"
        found = on_ranks("shardwise.bench.checkpoint.checkpoint_ranks:time_checkpoints", request, world, device=device)[
            0
        ]
        document = _document(found, place, config_file)
    _show(document, console)
    _keep(document, output, console)
    if as_json:
        print(json.dumps(document))


def _job_of(config_file: Path, words: list[str], console: Console) -> Job:
    from shardwise.train.config import read_config
    from shardwise.train.config_tasks import refuse_other_tasks

    config = read_config(config_file, words)
    refuse_other_tasks(config, "bench checkpoint")
    from shardwise.run.checks import adapter_of
    from shardwise.run.job import prepare_job

    if adapter_of(config) != "none":
        raise UserError(
            f"bench checkpoint times checkpoints of whole models; set parallel.strategy to one without +lora "
            f"and +qlora ({config.parallel.strategy} is given)"
        )
    return prepare_job(config, lambda text: console.print(f"data: {text}")).job


def _check(place: Path, output: Path, world: int, state_bytes: int) -> None:
    import psutil

    problems = []
    for option, path in {"--output": output, "--folder": place}.items():
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problems.append(f"{option} '{path}': {error.strerror or error}; give another folder")
            continue
        if not os.access(path, os.W_OK):
            problems.append(f"{option} '{path}' cannot be written to; give another folder")
    if not problems:
        free, room = shutil.disk_usage(place).free, int(_ROOM * state_bytes)
        if free < room:
            problems.append(
                f"'{place}' has {bytes_text(free)} free and {bytes_text(room)} are needed; use a smaller --size, or "
                "another --folder"
            )
    available, needed = psutil.virtual_memory().available, _MEMORY * world * state_bytes
    if available < needed:
        problems.append(
            f"{world} ranks with {bytes_text(state_bytes)} of state need up to {bytes_text(needed)} of memory, and "
            f"{bytes_text(available)} are there; use a smaller --size or fewer ranks"
        )
    if problems:
        raise UserError(*dict.fromkeys(problems))


def _document(found: dict[str, Any], place: Path, config_file: Path | None) -> dict[str, Any]:
    """Build the document: place and date of the measurement, the medians, and every sample."""
    import psutil

    mounts = [part for part in psutil.disk_partitions(all=True) if place.absolute().is_relative_to(part.mountpoint)]
    disk = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        **found,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "disk": f"{disk.device} ({disk.fstype}, {disk.opts})" if disk else "unknown",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "model": str(config_file) if config_file else "a decoder that was made up",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _show(document: dict[str, Any], console: Console) -> None:
    for case in document["cases"]:
        table = Table(title=_title(document, case), title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("", "s", "GiB/s", "of raw", "of direct", "÷ ours", "stall ms", "of sync", "dip", "lost s"):
            table.add_column(column, justify="right" if column else "left")
        for row in case["summary"]:
            table.add_row(*_cells(row))
        console.print(table)
    console.print(NOTES)


def _title(document: dict[str, Any], case: dict[str, Any]) -> str:
    return (
        f"{case['strategy']}: {bytes_text(case['state_bytes'])} of model and optimizer, {document['ranks']} ranks, "
        f"{case['rounds']} rounds, steps of {seconds_text(case['step_s'])}, load of the machine {case['load']:.1f}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    """Format medians, with the quartiles below them."""

    def text(key: str, form: str, scale: float = 1.0) -> str:
        item = row[key]
        if item is None:
            return ""
        low, median, high = (format(item[part] * scale, form) for part in ("low", "median", "high"))
        return f"{median}\n{low} to {high}"

    return [
        row["contender"],
        text("seconds", ".2f"),
        text("bytes_per_s", ".2f", 1 / GIB),
        text("of_raw", ".2f"),
        text("of_direct", ".2f"),
        text("over_ours", ".2f"),
        text("stall_s", ".0f", 1e3),
        text("stall_of_sync", ".0%"),
        text("dip", ".2f"),
        text("lost_s", ".2f"),
    ]


def _keep(document: dict[str, Any], output: Path, console: Console) -> None:
    from shardwise.bench.plots import draw_checkpoints

    output.mkdir(parents=True, exist_ok=True)
    device = str(document["device"]).replace(" ", "-").lower()
    raw = output / f"checkpoint_{device}_{document['date']}.json"
    raw.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"raw samples: {raw}")
    plot = raw.with_suffix(".png")
    if draw_checkpoints(document, plot):
        console.print(f"plot: {plot}")
    else:
        console.print("no plot: matplotlib is not installed (pip install 'shardwise[plots]')", markup=False)
