"""Step time of several plans for the same model and batches, on the same ranks, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.bench.step.plain import Batch
from shardwise.distributed.process_group import Ranks
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer
from shardwise.train.session import Session

WARM_UP = 4


def time_plans(
    config: Config,
    plans: Sequence[Plan],
    factory: Callable[[], nn.Module],
    batches: Iterator[Batch],
    ranks: Ranks,
    steps: int,
) -> list[list[float]]:
    """Seconds of ``steps`` optimizer steps of each plan on this rank, in an order that rotates every turn.

    ``batches`` gives a rank's whole share of a global batch; each plan cuts it into its own micro batches. All ranks
    meet before each step, so that none is charged for another's wait.
    """
    contenders = [_stepper(config, plan, factory, ranks) for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for turn in range(WARM_UP + steps):
        inputs, labels = next(batches)
        for place in range(len(plans)):
            index = (place + turn) % len(plans)
            pieces = plans[index].grad_accum
            window = list(zip(inputs.chunk(pieces), labels.chunk(pieces), strict=True))
            dist.barrier()
            begin = time.perf_counter()
            contenders[index](window)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[index].append(time.perf_counter() - begin)
    return times


def _stepper(
    config: Config, plan: Plan, factory: Callable[[], nn.Module], ranks: Ranks
) -> Callable[[list[Batch]], float]:
    """A session of its own under ``plan``; calling it does one optimizer step."""
    session = Session(ranks=ranks, planner=lambda model, optimizer: plan)
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
        for micro in current:
            current.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
        return current.update(optimizer, clip_norm=config.optimizer.clip_norm).loss

    return step
