"""Measured pipeline bubble: the share of a step in which a stage computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import nn

from shardwise.bench.quartiles import Quartiles
from shardwise.bench.step.step_bench import Batch, session_loop
from shardwise.cost.time.pipeline_time import bubble_fraction
from shardwise.distributed.process_group import Ranks, gather_ints
from shardwise.errors import PlanError
from shardwise.model.read import find_blocks
from shardwise.parallel.pipeline_parallel.schedule import check_pipeline
from shardwise.parallel.pipeline_parallel.stage_runtime import StageSpan
from shardwise.plan.parallel_options import PipelineSchedule
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from shardwise.train.optimizer import build_optimizer

MICRO_BATCHES = (1, 2, 4, 8, 16)
STEPS, WARM_UP = 12, 2
SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved-1f1b")


class BubbleSamples(BaseModel):
    """Idle shares of the measured steps, over all stages, by schedule and micro-batch count."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    schedule: str
    stages: int
    virtual: int
    micro_batches: int
    shares: tuple[float, ...]

    @property
    def formula(self) -> float:
        """Idle share of equal stages without transfers: (p - 1) / (v · m + p - 1)."""
        return bubble_fraction(self.stages, self.micro_batches, self.virtual)

    @property
    def quartiles(self) -> Quartiles:
        """Quartiles of the shares."""
        return Quartiles.of(self.shares)


def bench_bubble(
    config: Config,
    plan: Plan,
    factory: Callable[[], nn.Module],
    windows: Callable[[Plan], Iterator[list[Batch]]],
    ranks: Ranks,
    steps: int,
) -> list[BubbleSamples]:
    """Measure some steps of ``plan`` under each schedule, with each number of micro batches.

    Micro batches have one size. ``windows(plan)`` are this rank's micro batches of each step. Schedules that need more
    blocks than the model has are left out.
    """
    found = []
    for schedule in SCHEDULES:
        virtual = 2 if schedule == "interleaved-1f1b" else 1
        for micros in MICRO_BATCHES:
            changes = {"pipeline_schedule": schedule, "virtual_stages": virtual, "grad_accum": micros}
            changed = plan.model_copy(update=changes)
            torch.manual_seed(config.train.seed)
            model = factory()
            try:
                check_pipeline(changed, len(find_blocks(model)))
            except PlanError:
                continue
            shares = _watch(config, changed, model, windows(changed), ranks, min(steps, STEPS))
            found.append(
                BubbleSamples(
                    strategy=plan.strategy,
                    schedule=schedule,
                    stages=plan.dims.pp,
                    virtual=virtual,
                    micro_batches=micros,
                    shares=tuple(shares),
                )
            )
    return found


def _watch(
    config: Config, plan: Plan, model: nn.Module, windows: Iterator[list[Batch]], ranks: Ranks, steps: int
) -> list[float]:
    """Measure the idle share of each of ``steps`` steps, the mean over ranks."""
    session, run = session_loop(plan, ranks, config.optimizer.clip_norm)
    made = build_optimizer(list(model.parameters()), config.optimizer, model)
    prepared, optimizer = session.prepare(model, made, next(windows)[0][0])
    pipeline, shares = session.applied.pipeline, []
    assert pipeline is not None
    for turn in range(WARM_UP + steps):
        micros = next(windows)
        spans: list[StageSpan] = []
        pipeline.spans = spans
        dist.barrier()
        begin = time.perf_counter()
        run(prepared, optimizer, micros)
        pipeline.spans = None
        if turn >= WARM_UP:
            shares.append(idle_share(spans, begin, ranks))
    return shares


def idle_share(spans: Sequence[StageSpan], begin_s: float, ranks: Ranks) -> float:
    """Mean idle share of all ranks, from the first to the last work of any stage. Collective.

    Clocks of different ranks are aligned by ``begin_s``, when all have left one barrier.
    """
    busy = sum(span.end_s - span.start_s for span in spans)
    first = min(span.start_s for span in spans) - begin_s
    last = max(span.end_s for span in spans) - begin_s
    rows = gather_ints([int(value * 1e9) for value in (busy, first, last)], ranks)
    full = max(row[2] for row in rows) - min(row[1] for row in rows)
    return 1.0 - sum(row[0] for row in rows) / (len(rows) * full)
