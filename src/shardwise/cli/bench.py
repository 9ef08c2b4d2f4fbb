"""``shardwise bench step``: prepare, start the ranks, show the ratios and the bubble, keep the raw samples."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table

from shardwise.bench.step.step_plot import draw
from shardwise.cli.train import threads
from shardwise.errors import UserError
from shardwise.launch.on_ranks import on_ranks
from shardwise.plan.plan import Plan
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import optimizer_problems, read_config

if TYPE_CHECKING:
    from shardwise.bench.step.bubble import BubbleSamples
    from shardwise.bench.step.step_bench import StepSamples
    from shardwise.distributed.process_group import Ranks


class StepBenchTask(BaseModel):
    """What the ranks time: every plan on the data of ``job``, and the bubble of those with a pipeline."""

    model_config = ConfigDict(frozen=True)

    job: Job
    plans: tuple[Plan, ...]
    bubble: bool


def run_bench_step(
    config_file: Path,
    overrides: list[str],
    *,
    steps: int,
    output: Path,
    as_json: bool,
    strategies: list[str] | None = None,
    bubble: bool = True,
) -> None:
    """The verb.

    Raises:
        UserError: the config or a strategy is none that there is a hand-written loop for.
    """
    from shardwise.bench.step.bubble import BubbleSamples
    from shardwise.bench.step.step_bench import StepSamples

    console = Console(stderr=as_json, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(config_file, [*overrides, f"train.output={folder}", f"train.steps={steps}"])
        if config.parallel.precision != "fp32" or config.parallel.recompute != "none" or config.parallel.compile:
            raise UserError(
                "bench step compares fp32 loops without recompute and compile; leave them at their defaults"
            )
        if "lora" in config.parallel.strategy:
            raise UserError(
                f"bench step has no hand-written loop with adapters; set parallel.strategy to one without "
                f"+lora and +qlora ({config.parallel.strategy} is given)"
            )
        if config.train.loss_chunks > 1 or config.optimizer.in_backward:
            raise UserError(
                "bench step has no hand-written loop with train.loss_chunks or optimizer.in_backward; leave them out"
            )
        prepared = prepare_job(config, lambda text: console.print(f"data: {text}"), as_json=as_json)
        plans = plans_of(prepared.job, strategies, prepared.corpus.vocab_size)
        console.print(f"timing {steps} steps of each loop under {', '.join(p.strategy for p in plans)}, turn by turn")
        job = prepared.job
        task = StepBenchTask(job=job, plans=tuple(plans), bubble=bubble)
        world = job.plan.dims.world_size
        raw = on_ranks(f"{__name__}:time_steps", task, world, device=job.plan.device, threads=threads(job))[0]
    samples = [StepSamples(**item) for item in raw["samples"]]
    bubbles = [BubbleSamples(**item) for item in raw["bubble"]]
    console.print(ratio_table(samples))
    if bubbles:
        console.print(bubble_table(bubbles))
    keep(raw, samples, bubbles, output, console)
    if as_json:
        print(json.dumps({"schema": 1, **raw}))


def plans_of(job: Job, strategies: list[str] | None, vocab_size: int) -> list[Plan]:
    """The plan of each strategy that is compared; all that cannot be is said before ranks start.

    Raises:
        UserError: every problem.
    """
    from shardwise.bench.step.plain import check_plain
    from shardwise.bench.step.step_bench import plan_for, strategies_for
    from shardwise.model.read import read_model
    from shardwise.parallel.materialize import build
    from shardwise.parallel.model_parallel import decide
    from shardwise.train.model import model_factory

    world, parallel = job.plan.dims.world_size, job.config.parallel
    if world < 2:
        raise UserError("bench step compares distributed loops and needs 2 ranks or more; use --nproc 2")
    module = build(model_factory(job.config, vocab_size), job.config.train.seed, real=False)
    spec, found = read_model(module), []
    problems: list[str] = []
    options = {"sequence_parallel": parallel.sequence_parallel, "loss_parallel": parallel.loss_parallel}
    for strategy in strategies or strategies_for(world):
        try:
            plan = plan_for(job.plan.model_copy(update=options), strategy, world)
            check_plain(plan, module)
            problems += optimizer_problems(job.config.optimizer, plan.parsed)
            if plan.dims.tp * plan.dims.pp > 1:
                decide(module, spec, plan)
            found.append(plan)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def ratio_table(samples: list[StepSamples]) -> Table:
    """Plain over Shardwise, for each strategy."""
    table = Table(title="plain step time ÷ Shardwise step time (1.00 = no overhead)", title_justify="left")
    for column in ("strategy", "median", "quartiles", "plain median", "Shardwise median", "steps"):
        table.add_column(column, justify="right")
    for item in samples:
        ours, plain = sorted(item.shardwise_s), sorted(item.plain_s)
        table.add_row(
            item.strategy,
            f"{item.quantile(0.5):.3f}",
            f"{item.quantile(0.25):.3f} to {item.quantile(0.75):.3f}",
            f"{plain[len(plain) // 2] * 1e3:.1f} ms",
            f"{ours[len(ours) // 2] * 1e3:.1f} ms",
            str(len(ours)),
        )
    return table


def bubble_table(bubbles: list[BubbleSamples]) -> Table:
    """The idle share of a step, measured and by the formula, for each schedule and number of micro batches."""
    table = Table(title="pipeline bubble: share of a step in which a stage computes nothing", title_justify="left")
    for column in ("strategy", "schedule", "micro batches", "measured", "quartiles", "(p-1)/(v·m+p-1)"):
        table.add_column(column, justify="right", no_wrap=column != "micro batches")
    for item in bubbles:
        table.add_row(
            item.strategy,
            item.schedule,
            str(item.micro_batches),
            f"{item.quantile(0.5):.3f}",
            f"{item.quantile(0.25):.3f} to {item.quantile(0.75):.3f}",
            f"{item.formula:.3f}",
        )
    return table


def keep(
    raw: dict[str, Any], samples: list[StepSamples], bubbles: list[BubbleSamples], output: Path, console: Console
) -> None:
    """Write the raw samples and the plot; ``raw`` gets the medians."""
    output.mkdir(parents=True, exist_ok=True)
    raw["median_ratio"] = {item.strategy: item.quantile(0.5) for item in samples}
    raw["median_bubble"] = [
        {**item.model_dump(exclude={"shares"}), "measured": item.quantile(0.5), "formula": item.formula}
        for item in bubbles
    ]
    ranks = "" if raw["ranks"] == 2 else f"_{raw['ranks']}-ranks"
    file = output / f"step_{raw['device'].replace(' ', '-').lower()}{ranks}_{raw['date']}.json"
    file.write_text(json.dumps(raw, indent=1) + "\n")
    console.print(f"raw samples: {file}")
    plot = file.with_suffix(".png")
    if draw(raw, plot):
        console.print(f"plot: {plot}")
    else:
        console.print("no plot: matplotlib is not installed")


def time_steps(task: StepBenchTask, ranks: Ranks) -> dict[str, Any] | None:
    """The samples, on rank 0. Collective."""
    from shardwise.bench.step.bubble import bench_bubble
    from shardwise.bench.step.step_bench import bench_step
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.model import model_factory

    job, plans, corpus = task.job, task.plans, open_corpus(task.job.corpus)
    factory, steps = model_factory(job.config, corpus.vocab_size), job.config.train.steps or 1
    found = [bench_step(job.config, plan, factory, windows(job, corpus, plan, ranks), ranks, steps) for plan in plans]
    bubbles: list[BubbleSamples] = []
    for plan in plans if task.bubble else ():
        if plan.dims.pp > 1:
            bubbles += bench_bubble(
                job.config, plan, factory, lambda changed: windows(job, corpus, changed, ranks), ranks, steps
            )
    return {**facts(job, ranks), "samples": found, "bubble": bubbles} if ranks.is_main else None


def windows(job: Job, corpus: Any, plan: Plan, ranks: Ranks) -> Any:
    """This rank's micro batches of each step on its device: hand-written loops move nothing."""
    from shardwise.train.data.order import Order
    from shardwise.train.data.samples import samples_for, step_batches

    data = samples_for(corpus.train, job.config.data, corpus.separator)
    order = Order(len(data), job.config.train.seed, job.config.data.shuffle)
    for batches in step_batches(data, order, plan, ranks.rank):
        yield [tuple(part.to(ranks.device) for part in batch) for batch in batches]


def facts(job: Job, ranks: Ranks) -> dict[str, Any]:
    """What was timed, where and when."""
    import datetime
    import os
    import platform

    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "ranks": ranks.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "batch": job.plan.batch_equation(),
        "model": job.config.model.config or job.config.model.factory,
        "precision": job.plan.precision,
    }
