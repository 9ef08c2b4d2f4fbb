"""Step time of Shardwise against a plain loop: same model, same data, same process, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn

from shardwise.measure.plain import Batch, plain_ddp, plain_fsdp, plain_step
from shardwise.parallel.group import Ranks
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.spec.read import find_blocks
from shardwise.train.config import Config
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer
from shardwise.train.session import Session

WARM_UP = 5


class StepSamples(BaseModel):
    """Raw step times in seconds of both contenders, turn by turn, on rank 0."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    shardwise_s: tuple[float, ...]
    plain_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Plain over Shardwise, sorted; 1.00 is no overhead, more is faster than plain."""
        return sorted(plain / ours for plain, ours in zip(self.plain_s, self.shardwise_s, strict=True))

    def quantile(self, share: float) -> float:
        """A quantile of the ratios."""
        return self.ratios[min(len(self.ratios) - 1, int(share * len(self.ratios)))]


def bench_step(
    config: Config,
    plan: Plan,
    factory: Callable[[], nn.Module],
    batches: Iterator[Batch],
    ranks: Ranks,
    strategy: str,
    steps: int,
) -> StepSamples:
    """Time ``steps`` optimizer steps of each contender on this rank, one turn each, the order swapped every turn.

    All ranks meet before each step, so that none is charged for another's wait.
    """
    ours = _shardwise(config, plan, factory, ranks, strategy)
    theirs = _plain(config, factory, ranks, strategy)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + steps):
        batch = next(batches)
        order = (0, 1) if turn % 2 else (1, 0)
        for contender in order:
            dist.barrier()
            begin = time.perf_counter()
            (ours, theirs)[contender](batch)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[contender].append(time.perf_counter() - begin)
    return StepSamples(strategy=strategy, shardwise_s=tuple(times[0]), plain_s=tuple(times[1]))


def _build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def _shardwise(
    config: Config, plan: Plan, factory: Callable[[], nn.Module], ranks: Ranks, strategy: str
) -> Callable[[Batch], float]:
    dims = dims_for(parse_strategy(strategy), ranks.world_size)
    chosen = plan.model_copy(update={"strategy": strategy, "dims": dims, "grad_accum": 1})
    session = Session(ranks=ranks, planner=lambda model, optimizer: chosen)
    model = _build(factory, config.train.seed)
    model, optimizer = session.prepare(model, build_optimizer(model.parameters(), config.optimizer))
    waiting: list[Any] = []

    def feed() -> Iterator[list[Any]]:
        while True:
            yield [waiting.pop()]

    steps = session.run_windows(feed())

    def step(batch: Batch) -> float:
        waiting.append(batch)
        current = next(steps)
        for micro in current:
            current.backward(token_loss_sum(model(micro.inputs), micro.labels), count=micro.num_tokens)
        return current.update(optimizer, clip_norm=config.optimizer.clip_norm).loss

    return step


def _plain(config: Config, factory: Callable[[], nn.Module], ranks: Ranks, strategy: str) -> Callable[[Batch], float]:
    model = _build(factory, config.train.seed)
    if strategy == "ddp":
        model = plain_ddp(model, ranks.device)
    else:
        blocks = [model.get_submodule(name) for name in find_blocks(model)]
        model = plain_fsdp(model, ranks.device, blocks, ranks.world_size)
    optimizer = build_optimizer(model.parameters(), config.optimizer)
    return plain_step(model, optimizer, config.optimizer.clip_norm)
