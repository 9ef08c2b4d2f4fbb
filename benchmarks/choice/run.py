"""``shardwise bench choice``: is the plan that ``--strategy auto`` takes the fastest of those that fit?"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from torch import nn

from shardwise.bench.step.step_bench import Batch
from shardwise.cli.train import threads
from shardwise.distributed.process_group import Ranks, gather_ints
from shardwise.errors import DoesNotFit, PlanError, UserError
from shardwise.launch.on_ranks import on_ranks
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import BASES
from shardwise.run.job import Job, prepare_job
from shardwise.train.config import Config, read_config
from shardwise.train.data.corpus import open_corpus
from shardwise.train.data.order import rank_ids
from shardwise.train.data.samples import order_for, samples_for
from shardwise.train.loss import token_loss_sum
from shardwise.train.model import model_factory
from shardwise.train.optimizer import build_optimizer
from shardwise.train.session import Session
from shardwise.units import seconds_text

NEAR = 1.10  # the chosen plan's time over the best one's that is aimed at


class ChoiceTask(BaseModel):
    """What the ranks of one case time: each plan on the data of ``job``."""

    model_config = ConfigDict(frozen=True)

    job: Job
    plans: tuple[Plan, ...]
    turns: tuple[int, int]
    budget_s: float = float("inf")


def run_bench_choice(
    configs: list[Path], overrides: list[str], *, worlds: list[int], steps: int, output: Path, as_json: bool
) -> None:
    """The verb: every configuration at every number of ranks.

    Raises:
        UserError: a configuration or the folder for the samples cannot be; said before anything is measured.
    """
    _check(configs, overrides, output)
    console = Console(stderr=as_json, highlight=False)
    cases = []
    for file in configs:
        for world in worlds:
            console.print(f"{file.stem} on {world} ranks: {steps} steps of each strategy, turn by turn", markup=False)
            cases.append(_case(file, overrides, world, steps))
    table = Table(title="chosen plan against the fastest, medians of a step", title_justify="left")
    for name in ("case", "ranks", "chosen", "its step", "fastest", "its step", "chosen / fastest"):
        table.add_column(name, justify="left" if name in ("case", "chosen", "fastest") else "right")
    for case in cases:
        table.add_row(
            case["model"],
            str(case["ranks"]),
            case["chosen"],
            seconds_text(case["median_s"][case["chosen"]]),
            case["fastest"],
            seconds_text(case["median_s"][case["fastest"]]),
            f"{case['ratio']:.3f}",
        )
    console.print(table)
    near = sum(case["ratio"] <= NEAR for case in cases)
    console.print(f"{near} of {len(cases)} within 10 % of the fastest")
    output.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "steps": steps,
        "cases": cases,
    }
    device = str(cases[0]["device"]).replace(" ", "-").lower()
    raw = output / f"choice_{device}_{document['date']}.json"
    raw.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"raw samples: {raw}")
    if as_json:
        print(json.dumps(document))


def _check(configs: list[Path], overrides: list[str], output: Path) -> None:
    problems: list[str] = []
    for file in configs:
        try:
            read_config(file, overrides)
        except UserError as error:
            problems += error.problems
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not existing.is_dir():
        problems.append(f"--output '{output}': '{existing}' is a file; give a folder")
    elif not os.access(existing, os.W_OK):
        problems.append(f"--output '{output}': '{existing}' cannot be written; give another folder")
    if problems:
        raise UserError(*problems)


def _case(file: Path, overrides: list[str], world: int, steps: int) -> dict[str, Any]:
    """Choose, lay out every other strategy that fits, and time all of them on the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*overrides, f"train.output={folder}", f"train.steps={steps}", f"parallel.nproc={world}"]
        config = read_config(file, [*words, "parallel.strategy=auto"])
        job = prepare_job(config, lambda text: None).job
        plans = {job.plan.strategy: job.plan}
        for base in BASES:
            if (base != job.plan.strategy) and (plan := _pinned(file, [*words, f"parallel.strategy={base}"])):
                plans[base] = plan
        chosen = job.plan.strategy
        task = ChoiceTask(job=job, plans=tuple(plans.values()), turns=(steps, steps))
        found = on_ranks(f"{__name__}:time_choices", task, world, device=job.plan.device, threads=threads(job))[0]
    samples = dict(zip(plans, found["seconds"], strict=True))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    fastest = min(medians, key=lambda name: medians[name])
    return {
        "model": file.stem,
        "ranks": world,
        "device": found["device"],
        "threads_per_rank": found["threads"],
        "chosen": chosen,
        "reason": job.plan.reason,
        "fastest": fastest,
        "ratio": medians[chosen] / medians[fastest],
        "median_s": medians,
        "seconds": samples,
    }


def _pinned(file: Path, words: list[str]) -> Plan | None:
    """The plan of one strategy; ``None`` where it cannot be laid out."""
    try:
        return prepare_job(read_config(file, words), lambda text: None).job.plan
    except (PlanError, DoesNotFit):
        return None


def time_choices(task: ChoiceTask, ranks: Ranks) -> dict[str, Any] | None:
    """The times of one case, on rank 0. Collective."""
    job, corpus = task.job, open_corpus(task.job.corpus)
    data = samples_for(corpus, job.config)
    order = order_for(data, job.config, endless=True)

    def batches(plan: Plan) -> Iterator[list[Batch]]:
        """Windows of micro batches of this rank, whose neighbours in a model-parallel group get the same."""
        dims, position = plan.dims, 0
        place = dims.place(ranks.rank).dp
        while True:
            ids = rank_ids(order, position, dims.dp, place, plan.micro_batch, plan.grad_accum)
            found = (data.batch(one) for one in ids)
            yield [(inputs.to(ranks.device), labels.to(ranks.device)) for inputs, labels in found]
            position += plan.micro_batch * plan.grad_accum * dims.dp

    factory = model_factory(job.config, corpus.vocab_size)
    each = [batches(plan) for plan in task.plans]
    seconds = time_plans(job.config, task.plans, factory, each, ranks, task.turns, task.budget_s)
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    return {"device": device, "threads": torch.get_num_threads(), "seconds": seconds} if ranks.is_main else None


def time_plans(
    config: Config,
    plans: Sequence[Plan],
    factory: Callable[[], nn.Module],
    batches: Sequence[Iterator[list[Batch]]],
    ranks: Ranks,
    turns: tuple[int, int],
    budget_s: float,
) -> list[list[float]]:
    """Seconds of optimizer steps of each plan on the slowest rank, in an order that rotates every turn.

    The first turn is not timed, and of each other one the first of two steps is not: the caches have another plan's
    tensors. All ranks meet before a step, so that none is charged for another's wait. After ``budget_s`` no turn begins
    beyond the first of ``turns``, the fewest and the most.
    """
    contenders = [stepper(config, plan, factory, ranks) for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    began = time.perf_counter()
    for turn in range(1 + turns[1]):
        for place in range(len(plans)):
            index = (place + turn) % len(plans)
            contenders[index](next(batches[index]))
            window = next(batches[index])
            gather_ints([0], ranks)
            begin = time.perf_counter()
            contenders[index](window)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            mine = time.perf_counter() - begin
            if turn:
                times[index].append(max(row[0] for row in gather_ints([int(mine * 1e9)], ranks)) / 1e9)
        over = gather_ints([int(time.perf_counter() - began > budget_s)], ranks)[0][0]
        if turn >= turns[0] and over:
            break
    return times


def stepper(
    config: Config, plan: Plan, factory: Callable[[], nn.Module], ranks: Ranks
) -> Callable[[list[Batch]], float]:
    """A session of its own under ``plan``; calling it does one optimizer step."""
    session = Session(ranks=ranks, planner=lambda *_: plan)
    torch.manual_seed(config.train.seed)
    model = factory()
    model, optimizer = session.prepare(model, build_optimizer(model.parameters(), config.optimizer))
    waiting: list[list[Any]] = []

    def feed() -> Iterator[list[Any]]:
        while True:
            yield waiting.pop()

    steps = session.run_windows(feed())

    def step(window: list[Batch]) -> float:
        waiting.append(list(window))
        current = next(steps)
        current.run(model, token_loss_sum)
        return current.update(optimizer, clip_norm=config.optimizer.clip_norm).loss

    return step
