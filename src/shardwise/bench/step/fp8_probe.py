"""Step time with products in fp8 beside bf16, turn by turn: says whether fp8 is faster on this machine."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from shardwise.bench.step.step_bench import in_turns, seeded_model, shardwise_loop
from shardwise.bench.step.step_ranks import facts, windows
from shardwise.distributed.process_group import Ranks
from shardwise.errors import UserError
from shardwise.plan.plan import Plan
from shardwise.run.job import Job
from shardwise.train.data.corpus import open_corpus
from shardwise.train.model import model_factory
from shardwise.train.optimizer import build_optimizer

NOT_HERE = (
    "fp8 against bf16: not measured: these ranks have no fp8 products, and emulated ones say nothing about its speed"
)
_LEAST = 0.02  # a smaller share is within what the same loop differs by from turn to turn


class Fp8Task(BaseModel):
    """Task of the ranks: the plan of ``job``, with its recipe and without."""

    model_config = ConfigDict(frozen=True)

    job: Job


class Fp8Samples(BaseModel):
    """Seconds of each turn on rank 0, with the recipe and in bf16."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    recipe: str
    fp8_s: tuple[float, ...]
    bf16_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over turns of bf16's seconds over fp8's; above 1 fp8 is faster."""
        return statistics.median(wide / narrow for wide, narrow in zip(self.bf16_s, self.fp8_s, strict=True))

    @property
    def verdict(self) -> str:
        """Say in a sentence which one is faster."""
        times = (
            f"{statistics.median(self.fp8_s) * 1e3:.1f} ms a step, bf16 {statistics.median(self.bf16_s) * 1e3:.1f} ms"
        )
        head = f"fp8 {self.recipe} under {self.strategy}: {times} (medians of {len(self.fp8_s)})"
        if abs(self.ratio - 1.0) < _LEAST:
            return f"{head}: as fast as bf16 here"
        word = "faster" if self.ratio > 1.0 else "slower; leave fp8 out"
        return f"{head}: {abs(self.ratio - 1.0):.0%} {word}"


def probed_plan(job: Job) -> Plan:
    """Return the plan of a job whose config names a recipe.

    Raises:
        UserError: it names none.
    """
    if job.plan.fp8 == "none":
        raise UserError("bench step --fp8 compares a recipe with bf16, and the config has none; set parallel.fp8")
    return job.plan


def time_fp8(task: Fp8Task, ranks: Ranks) -> dict[str, Any] | None:
    """Measure both and return the samples on rank 0. Collective."""
    job, corpus = task.job, open_corpus(task.job.corpus)
    config, plan = job.config, probed_plan(job)
    factory, batches = model_factory(config, corpus.vocab_size), windows(job, corpus, plan, ranks)
    sample, clip = next(batches)[0][0], config.optimizer.clip_norm

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(parameters, config.optimizer)

    plans = (plan, plan.model_copy(update={"fp8": "none", "fp8_emulate": False}))
    loops = [
        shardwise_loop(seeded_model(factory, config.train.seed), one, ranks, make_optimizer, clip, sample)
        for one in plans
    ]
    fp8_s, bf16_s = in_turns(loops, batches, ranks, config.train.steps or 1)
    found = Fp8Samples(strategy=plan.strategy, recipe=plan.fp8, fp8_s=fp8_s, bf16_s=bf16_s)
    return {**facts(job, ranks), "samples": found.model_dump()} if ranks.is_main else None
