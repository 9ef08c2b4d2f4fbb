"""One size of ``bench scaling``: the user's own step on the world that is there, timed and told apart.

The loop is that of ``shardwise train`` without checkpoints, evaluation and logging: its session, its data, its loss,
its optimizer.
"""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.process_group import Ranks
from shardwise.measure.scaling_facts import Mode, Sample
from shardwise.measure.step_time.attribution import WARM_UP, Attribution
from shardwise.parallel.materialize import build
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.train.loop import set_learning_rate
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer, learning_rate
from shardwise.train.session import Session

__all__ = ["WARM_UP", "forget", "measure_size"]


def measure_size(
    config: Config,
    plan: Plan,
    mode: Mode,
    factory: Callable[[], nn.Module],
    feed: Iterable[list[Any]],
    ranks: Ranks,
    steps: int,
) -> Sample | None:
    """Time ``steps`` optimizer steps after a warm-up, on rank 0; ``None`` on the others. Collective.

    ``feed`` yields this rank's micro batches of each step. All ranks meet, and all devices are waited for, before the
    first timed step and after the last one; in between nothing is waited for that training does not wait for.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    session = Session(ranks=ranks, planner=lambda model, optimizer: plan)
    attribution = Attribution.attach(session)
    try:
        model = build(factory, config.train.seed, real=ranks.is_main)
        sample = torch.zeros(plan.micro_batch or 1, config.data.seq_len, dtype=torch.int64)
        model, optimizer = session.prepare(model, build_optimizer(model.parameters(), config.optimizer), sample)
        rate = learning_rate(config.optimizer, WARM_UP + steps)
        ends: list[float] = []
        tokens = 0
        for step in session.run_windows(feed, limit=WARM_UP + steps):
            step.run(model, token_loss_sum)
            set_learning_rate(optimizer, rate(step.number), config.optimizer.lr)
            result = step.update(optimizer, clip_norm=config.optimizer.clip_norm)
            if step.number == WARM_UP:
                _meet(ranks)
            elif step.number == WARM_UP + steps:
                _wait_for_device(ranks)
            if step.number >= WARM_UP:
                ends.append(time.perf_counter())
            tokens += result.tokens if step.number > WARM_UP else 0
        attribution.finish()
        timing = attribution.timing()
    finally:
        attribution.detach()
    if not ranks.is_main:
        return None
    return Sample(
        mode=mode,
        devices=ranks.world_size,
        nodes=max(1, ranks.world_size // ranks.local_world_size),
        plan=plan,
        steps_s=tuple(after - before for before, after in pairwise(ends)),
        wall_s=ends[-1] - ends[0],
        tokens=tokens,
        threads=torch.get_num_threads(),
        cores=_cores() if ranks.device.type == "cpu" else None,
        load=load,
        date=datetime.date.today().isoformat(),
        timing=timing,
    )


def forget(ranks: Ranks) -> None:
    """Give back what the model measured last has held: hooks make circles that only the collector finds."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _wait_for_device(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _meet(ranks: Ranks) -> None:
    _wait_for_device(ranks)
    if ranks.world_size > 1:
        dist.barrier(group=ranks.control)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
