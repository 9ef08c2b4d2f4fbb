"""Step time of Shardwise beside a plain loop, if there is one, turn by turn.

Both have the same model, data and process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn

from shardwise.bench.quartiles import Quartiles
from shardwise.distributed.process_group import Ranks
from shardwise.errors import UserError
from shardwise.import_object import optional_object
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import runnable_strategy
from shardwise.train.config import Config
from shardwise.train.loss import token_loss_sum
from shardwise.train.optimizer import build_optimizer
from shardwise.train.session import Session

Batch = tuple[torch.Tensor, torch.Tensor]
TrainStep = Callable[[Sequence[Batch]], float]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

CHECK_PEER, PEER_LOOP = "benchmarks.peers.plain:check_plain", "benchmarks.peers.plain_loop:plain_loop"
"""Hand-written loops for comparison with Shardwise, in the benchmarks of its repository."""
WARM_UP = 5
MICRO_BATCHES = 4  # of a pipeline, where the batch allows it


class StepSamples(BaseModel):
    """Step times of both contenders in seconds, by turn, on rank 0; ``plain_s`` may be empty."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    batch: str = ""
    shardwise_s: tuple[float, ...]
    plain_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ratios of plain to Shardwise, sorted; 1.00 is no overhead, more is faster than plain."""
        return sorted(plain / ours for plain, ours in zip(self.plain_s, self.shardwise_s, strict=True))

    @property
    def quartiles(self) -> Quartiles:
        """Quartiles of the ratios."""
        return Quartiles.of(self.ratios)


def strategies_for(world_size: int) -> tuple[str, ...]:
    """Default strategies: all that ``world_size`` allows."""
    even = ("ddp+tp2", "ddp+pp2") if world_size % 2 == 0 else ()
    both = ("fsdp+tp2",) if world_size % 4 == 0 else ()
    return ("ddp", "fsdp", *even, *both)


def plan_for(plan: Plan, strategy: str, world_size: int) -> Plan:
    """Change the strategy of ``plan`` and keep the global batch.

    It is one micro batch, of a pipeline several.

    Raises:
        PlanError: the strategy does not support that many ranks.
        UserError: its data-parallel ranks do not divide the global batch.
    """
    known = runnable_strategy(strategy)
    if known.adapter != "none":
        raise UserError(
            f"strategy '{strategy}': bench step has no hand-written loop with adapters; time "
            f"'{str(known).replace(f'+{known.adapter}', '')}'"
        )
    dims = dims_for(known, world_size)
    batch = plan.global_batch or plan.dims.dp
    if batch % dims.dp:
        raise UserError(
            f"strategy '{strategy}' has {dims.dp} data-parallel ranks, and the global batch {batch} is no multiple of "
            f"that; set train.global_batch={(batch // dims.dp + 1) * dims.dp}"
        )
    share = batch // dims.dp
    accum = next(m for m in range(min(MICRO_BATCHES, share), 0, -1) if share % m == 0) if dims.pp > 1 else 1
    changes = {"strategy": strategy, "dims": dims, "micro_batch": share // accum, "grad_accum": accum}
    return plan.model_copy(update={**changes, "recompute": "none", "pipeline_schedule": "1f1b", "virtual_stages": 1})


def check_comparable(config: Config) -> None:
    """Refuse what the loops of others are not written for.

    Raises:
        UserError: says what to leave out.
    """
    parallel = config.parallel
    if parallel.precision not in ("auto", "fp32") or parallel.recompute != "none" or parallel.compile:
        raise UserError("bench step compares fp32 loops without recompute and compile; leave them at their defaults")
    if "lora" in config.parallel.strategy:
        raise UserError(
            f"bench step has no hand-written loop with adapters; set parallel.strategy to one without "
            f"+lora and +qlora ({config.parallel.strategy} is given)"
        )
    if config.train.loss_chunks > 1 or config.optimizer.in_backward:
        raise UserError(
            "bench step has no hand-written loop with train.loss_chunks or optimizer.in_backward; leave them out"
        )


def bench_step(
    config: Config,
    plan: Plan,
    factory: Callable[[], nn.Module],
    windows: Iterator[list[Batch]],
    ranks: Ranks,
    steps: int,
) -> StepSamples:
    """Time ``steps`` optimizer steps of each contender on this rank, in alternating order.

    ``windows`` are the micro batches of each step on this rank. All ranks meet before each step, so that no rank is
    charged for another's wait.
    """

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(parameters, config.optimizer)

    sample = next(windows)[0][0]
    clip, seed = config.optimizer.clip_norm, config.train.seed
    contenders = [shardwise_loop(seeded_model(factory, seed), plan, ranks, make_optimizer, clip, sample)]
    if (peer := optional_object(PEER_LOOP)) is not None:
        contenders.append(peer(seeded_model(factory, seed), plan, ranks, make_optimizer, clip))
    ours, *others = in_turns(contenders, windows, ranks, steps)
    plain = others[0] if others else ()
    return StepSamples(strategy=plan.strategy, batch=plan.batch_equation(), shardwise_s=ours, plain_s=plain)


def in_turns(
    contenders: Sequence[TrainStep], windows: Iterator[list[Batch]], ranks: Ranks, steps: int
) -> list[tuple[float, ...]]:
    """Return the seconds of ``steps`` turns of each contender after a warm-up, in alternating order. Collective."""
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(WARM_UP + steps):
        micros = next(windows)
        for contender in range(len(contenders))[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            contenders[contender](micros)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[contender].append(time.perf_counter() - begin)
    return [tuple(found) for found in times]


def seeded_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model with the weights of a seed."""
    torch.manual_seed(seed)
    return factory()


def shardwise_loop(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    make_optimizer: MakeOptimizer,
    clip_norm: float | None,
    sample: Any = None,
) -> TrainStep:
    """Build the step of `plain_loop` with a `Session`, as in ``shardwise train``. Collective."""
    session, run = session_loop(plan, ranks, clip_norm)
    prepared, optimizer = session.prepare(model, make_optimizer(list(model.parameters())), sample)
    return lambda micros: run(prepared, optimizer, micros)


def session_loop(
    plan: Plan, ranks: Ranks, clip_norm: float | None
) -> tuple[Session, Callable[[nn.Module, torch.optim.Optimizer, Sequence[Batch]], float]]:
    """Build a session with external batches, and a function that runs a step for its loss."""
    session = Session(ranks=ranks, planner=lambda *_: plan)
    waiting: list[list[Any]] = []

    def feed() -> Iterator[list[Any]]:
        while True:
            yield waiting.pop()

    steps = session.run_windows(feed())

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, micros: Sequence[Batch]) -> float:
        waiting.append(list(micros))
        step = next(steps)
        step.run(model, token_loss_sum)
        return step.update(optimizer, clip_norm=clip_norm).loss

    return session, run
