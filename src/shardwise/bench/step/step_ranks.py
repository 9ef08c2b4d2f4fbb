"""Time the steps of ``bench step`` on the ranks: the compared plans, and the work of a rank."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from shardwise.bench.step.bubble import BubbleSamples, bench_bubble
from shardwise.bench.step.step_bench import CHECK_PEER, bench_step, plan_for, strategies_for
from shardwise.distributed.process_group import Ranks
from shardwise.errors import UserError
from shardwise.hardware.cpu import cores_here
from shardwise.import_object import optional_object
from shardwise.model.read import read_model
from shardwise.parallel.decide import decide_split
from shardwise.parallel.materialize import build
from shardwise.plan.plan import Plan
from shardwise.run.job import Job
from shardwise.train.config import optimizer_problems
from shardwise.train.data.corpus import open_corpus
from shardwise.train.data.samples import on_device, order_for, samples_for, step_batches
from shardwise.train.model import model_factory


class StepBenchTask(BaseModel):
    """Task of the ranks: every plan on the data of ``job``, and the bubble of pipelined ones."""

    model_config = ConfigDict(frozen=True)

    job: Job
    plans: tuple[Plan, ...]
    bubble: bool


def plans_of(job: Job, strategies: list[str] | None, vocab_size: int) -> list[Plan]:
    """Build the plan of each compared strategy; errors are raised before ranks start.

    Raises:
        UserError: every problem.
    """
    world, parallel = job.plan.dims.world_size, job.config.parallel
    if world < 2:
        raise UserError("bench step compares distributed loops and needs 2 ranks or more; use --nproc 2")
    module = build(model_factory(job.config, vocab_size), job.config.train.seed, real=False)
    spec, found, check_peer = read_model(module), [], optional_object(CHECK_PEER)
    problems: list[str] = []
    options = {"sequence_parallel": parallel.sequence_parallel, "loss_parallel": parallel.loss_parallel}
    for strategy in strategies or strategies_for(world):
        try:
            plan = plan_for(job.plan.model_copy(update=options), strategy, world)
            if check_peer is not None:
                check_peer(plan, module)
            problems += optimizer_problems(job.config.optimizer, plan.parsed)
            if plan.dims.tp * plan.dims.pp > 1:
                decide_split(module, spec, plan)
            found.append(plan)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return found


def time_steps(task: StepBenchTask, ranks: Ranks) -> dict[str, Any] | None:
    """Measure and return the samples on rank 0. Collective."""
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
    """Yield this rank's micro batches of each step on its device: plain loops do not move them."""
    data = samples_for(corpus, job.config)
    order = order_for(data, job.config, endless=True)
    for batches in step_batches(data, order, plan, ranks.rank):
        yield [on_device(batch, ranks.device) for batch in batches]


def facts(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Facts of the measurement: subject, place and date."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "ranks": ranks.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "cores": cores_here(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "batch": job.plan.batch_equation(),
        "model": job.config.model.config or job.config.model.factory,
        "precision": job.plan.precision,
    }
