"""Verbs ``shardwise bench step``, ``scaling``, ``choice``: measure, print, save samples."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shardwise.cli.arguments import Against, Bubble, ConfigPath, Fp8Probe, Json, Nproc, Overrides, SamplesFolder
from shardwise.cli.train import chosen, threads
from shardwise.environment import rendezvous
from shardwise.errors import UserError
from shardwise.import_object import load_object, optional_object
from shardwise.launch.on_ranks import on_ranks

if TYPE_CHECKING:
    from shardwise.bench.step.bubble import BubbleSamples
    from shardwise.bench.step.step_bench import StepSamples
    from shardwise.train.config import Config


def run_bench_step(
    config_file: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Timed steps per contender.", min=4)] = 60,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="Compare only this strategy, such as fsdp+tp2; repeatable.",
            show_default=False,
        ),
    ] = None,
    nproc: Nproc = None,
    bubble: Bubble = None,
    against: Against = None,
    fp8: Fp8Probe = False,
    output: SamplesFolder = Path("benchmarks"),
    as_json: Json = False,
) -> None:
    """Run ``shardwise bench step``.

    Raises:
        UserError: the config or a strategy is not one that has a hand-written loop, or a peer is unknown.
    """
    if fp8 and (against is not None or bubble or strategies):
        raise UserError("--fp8 compares the config's own plan with bf16; leave --against, --bubble, --strategy out")
    if against is not None and bubble:
        raise UserError("--bubble: peers of --against run no pipelines; leave one of both out")
    from shardwise.train.config import read_config
    from shardwise.train.config_tasks import refuse_other_tasks

    with tempfile.TemporaryDirectory() as folder:
        words = [*chosen(overrides, nproc=nproc), f"train.output={folder}", f"train.steps={steps}"]
        config = read_config(config_file, words)
        refuse_other_tasks(config, "bench step")
        if fp8:
            from shardwise.cli.bench_fp8 import bench_fp8

            return bench_fp8(config, steps, output, as_json=as_json)
        if against is not None:
            from shardwise.cli.bench_against import bench_against

            return bench_against(config, against, strategies, steps, output, as_json=as_json)
        return _bench_by_hand(config, strategies, steps, output, bubble=bubble is not False, as_json=as_json)


def _bench_by_hand(
    config: Config, strategies: list[str] | None, steps: int, output: Path, *, bubble: bool, as_json: bool
) -> None:
    """Measure beside hand-written loops, where they are here."""
    from shardwise.bench.step.bubble import BubbleSamples
    from shardwise.bench.step.step_bench import PEER_LOOP, StepSamples, check_comparable
    from shardwise.bench.step.step_ranks import StepBenchTask, plans_of
    from shardwise.run.job import prepare_job

    console = Console(stderr=as_json, highlight=False)
    if optional_object(PEER_LOOP) is None:
        console.print("no hand-written loops here (they are in benchmarks/ of the repository): Shardwise alone")
    else:
        check_comparable(config)
        fp32 = config.parallel.model_copy(update={"precision": "fp32"})
        config = config.model_copy(update={"parallel": fp32})
    prepared = prepare_job(config, lambda text: console.print(f"data: {text}"), as_json=as_json)
    job, plans = prepared.job, plans_of(prepared.job, strategies, prepared.corpus.vocab_size)
    console.print(f"timing {steps} steps of each loop under {', '.join(p.strategy for p in plans)}, turn by turn")
    task = StepBenchTask(job=job, plans=tuple(plans), bubble=bubble)
    work = "shardwise.bench.step.step_ranks:time_steps"
    raw = on_ranks(work, task, job.plan.dims.world_size, device=job.plan.device, threads=threads(job))[0]
    samples = [StepSamples(**item) for item in raw["samples"]]
    bubbles = [BubbleSamples(**item) for item in raw["bubble"]]
    console.print(ratio_table(samples))
    if bubbles:
        console.print(bubble_table(bubbles))
    keep(raw, samples, bubbles, output, console)
    if as_json:
        print(json.dumps({"schema": 1, **raw}))


def run_bench_choice(
    configs: Annotated[list[Path], typer.Argument(help="TOML config files.", show_default=False)],
    worlds: Annotated[
        list[int] | None, typer.Option("--nproc", help="Ranks on this machine; repeatable.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps per strategy.", min=4)] = 20,
    output: Annotated[Path, typer.Option(help="Folder for raw samples.")] = Path("benchmarks/choice"),
    as_json: Json = False,
) -> None:
    """Run ``shardwise bench choice``, whose code is in the benchmarks of this repository.

    Raises:
        UserError: the benchmarks are missing, or a configuration or the folder for the samples is invalid.
    """
    measure = load_object("benchmarks.choice.run:run_bench_choice", "bench choice")
    measure(configs, [], worlds=worlds or [2], steps=steps, output=output, as_json=as_json)


def ratio_table(samples: list[StepSamples]) -> Table:
    """Build the table of plain over Shardwise, for each strategy."""
    table = Table(title="plain step time ÷ Shardwise step time (1.00 = no overhead)", title_justify="left")
    for column in ("strategy", "median", "quartiles", "plain median", "Shardwise median", "steps"):
        table.add_column(column, justify="right")
    for item in samples:
        ours, plain = item.shardwise_s, item.plain_s
        table.add_row(
            item.strategy,
            f"{item.quartiles.median:.3f}" if plain else "",
            str(item.quartiles) if plain else "",
            f"{statistics.median(plain) * 1e3:.1f} ms" if plain else "",
            f"{statistics.median(ours) * 1e3:.1f} ms",
            str(len(ours)),
        )
    return table


def bubble_table(bubbles: list[BubbleSamples]) -> Table:
    """Build the table of measured and expected idle shares, by schedule and micro-batch count."""
    table = Table(title="pipeline bubble: share of a step in which a stage computes nothing", title_justify="left")
    for column in ("strategy", "schedule", "micro batches", "measured", "quartiles", "(p-1)/(v·m+p-1)"):
        table.add_column(column, justify="right", no_wrap=column != "micro batches")
    for item in bubbles:
        table.add_row(
            item.strategy,
            item.schedule,
            str(item.micro_batches),
            f"{item.quartiles.median:.3f}",
            str(item.quartiles),
            f"{item.formula:.3f}",
        )
    return table


def keep(
    raw: dict[str, Any], samples: list[StepSamples], bubbles: list[BubbleSamples], output: Path, console: Console
) -> None:
    """Write the raw samples and the plot; ``raw`` gets the medians."""
    from shardwise.bench.plots import draw_steps

    output.mkdir(parents=True, exist_ok=True)
    raw["median_ratio"] = {item.strategy: item.quartiles.median for item in samples if item.plain_s}
    raw["median_bubble"] = [
        {**item.model_dump(exclude={"shares"}), "measured": item.quartiles.median, "formula": item.formula}
        for item in bubbles
    ]
    ranks = "" if raw["ranks"] == 2 else f"_{raw['ranks']}-ranks"
    file = output / f"step_{raw['device'].replace(' ', '-').lower()}{ranks}_{raw['date']}.json"
    file.write_text(json.dumps(raw, indent=1) + "\n")
    console.print(f"raw samples: {file}")
    plot = file.with_suffix(".png")
    if draw_steps(raw, plot):
        console.print(f"plot: {plot}")
    else:
        console.print("no plot: matplotlib is not installed")


def run_bench_scaling(
    config_file: ConfigPath,
    overrides: Overrides = None,
    sizes: Annotated[
        list[int] | None, typer.Option("--size", help="Number of devices; repeatable; default: 1, 2, 4 ... all.", min=1)
    ] = None,
    mode: Annotated[
        str, typer.Option(help="weak (fixed batch per device), strong (fixed global batch) or both.")
    ] = "both",
    steps: Annotated[int, typer.Option(help="Timed steps per size.", min=4)] = 40,
    beyond: Annotated[int, typer.Option(help="Predict up to this number of devices.", min=1)] = 1024,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file of bench comm.", show_default=False)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one device in US dollars an hour.")] = None,
    output: SamplesFolder = Path("benchmarks"),
    as_json: Json = False,
) -> None:
    """Run ``shardwise bench scaling``.

    Under torchrun this process is a rank, and its world is the measured size.

    Raises:
        UserError: the config or an option is invalid.
    """
    from shardwise.measure.scaling_facts import MODES

    launched = rendezvous() is not None
    problems = _problems(mode, MODES, sizes or (), price, launched=launched)
    if problems:
        raise UserError(*problems)
    if calibration is not None:
        from shardwise.cost.link_calibration import read_calibration

        read_calibration(calibration)  # errors are raised before the measurement
    config = _measurable(config_file, [*(overrides or ()), "train.epochs=none", "train.steps=1"])
    from shardwise.bench.scaling.scaling_sizes import ScalingRequest, measure_here, measure_under_launcher
    from shardwise.run.checks import check_output

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
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    check_output(output)
    if launched:
        measure_under_launcher(_written_to(output / "work", config), request, console, as_json=as_json)
    with tempfile.TemporaryDirectory() as folder:
        document = measure_here(_written_to(Path(folder), config), request, console)
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


def _measurable(config_file: Path, words: Sequence[str]) -> Config:
    from shardwise.train.config import read_config
    from shardwise.train.config_tasks import refuse_other_tasks

    config = read_config(config_file, words)
    refuse_other_tasks(config, "bench scaling")
    return config


def _written_to(folder: Path, config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"output": str(folder)})})
