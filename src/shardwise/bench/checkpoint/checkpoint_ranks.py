"""Time the saves of ``bench checkpoint`` on the ranks: each strategy in turn."""

from __future__ import annotations

import gc
import importlib.metadata
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from rich.console import Console

from shardwise.bench.checkpoint import checkpoint_bench as bench
from shardwise.bench.step.step_bench import Batch
from shardwise.distributed.process_group import Ranks
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.job import Job
from shardwise.train.config import OptimizerTable
from shardwise.train.data.corpus import open_corpus
from shardwise.train.data.order import rank_ids
from shardwise.train.data.samples import order_for, samples_for
from shardwise.train.model import model_factory

STRATEGIES = ("ddp", "fsdp")


class CheckpointBenchRequest(BaseModel):
    """Task of the ranks; ``job`` for a config's model, else ``state_bytes``."""

    model_config = ConfigDict(frozen=True)

    state_bytes: int
    job: Job | None
    rounds: int
    step_s: float
    seed: int
    folder: Path
    as_json: bool


def time_checkpoints(request: CheckpointBenchRequest, ranks: Ranks) -> dict[str, Any] | None:
    """Measure each strategy in turn; the results are returned on rank 0. Collective."""
    warnings.filterwarnings("ignore", module=r"torch\.")  # a peer's warnings are not relevant here
    cases = []
    for strategy in STRATEGIES:
        cases.append(_case(request, strategy, ranks))
        gc.collect()
    if not ranks.is_main:
        return None
    return {
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "ranks": ranks.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "shardwise": importlib.metadata.version("shardwise"),
        "cases": cases,
    }


def _case(request: CheckpointBenchRequest, strategy: str, ranks: Ranks) -> dict[str, Any]:
    """Measure one strategy."""
    console = Console(stderr=request.as_json, highlight=False, soft_wrap=True, quiet=not ranks.is_main)
    dims = dims_for(parse_strategy(strategy), ranks.world_size)
    job = request.job
    samples: int | None = None
    if job is not None:
        plan = job.plan.model_copy(update={"strategy": strategy, "dims": dims, "grad_accum": 1})
        corpus, batches = _corpus_batches(job, ranks)
        factory = model_factory(job.config, corpus)
        training = bench.OngoingTraining(factory, job.config.optimizer, plan, ranks, request.seed)
    else:
        plan = Plan(strategy=strategy, dims=dims, device=ranks.device.type)
        factory = bench.decoder_of(request.state_bytes)
        training = bench.OngoingTraining(factory, OptimizerTable(), plan, ranks, request.seed)
        samples = bench.samples_for_step(training, request.step_s)
        batches = bench.random_batches(samples, ranks)

    def tick(done: int) -> None:
        console.print(f"{strategy}: round {done} of {request.rounds}")

    folder = request.folder / strategy
    folder.mkdir(exist_ok=True)
    found = bench.bench_checkpoints(
        training, batches, folder, rounds=request.rounds, seed=request.seed, samples_of_a_step=samples, tick=tick
    )
    plain = found.of(bench.NO_SAVE)
    return {
        "strategy": strategy,
        "state_bytes": found.state_bytes,
        "rounds": request.rounds,
        "samples_of_a_step": found.samples_of_a_step,
        "step_s": statistics.median(step for turn in plain for step in turn.steps_s),
        "load": statistics.median(turn.load for turn in found.turns),
        "summary": [row.model_dump() for row in found.summary()],
        "turns": [turn.model_dump() for turn in found.turns],
    }


def _corpus_batches(job: Job, ranks: Ranks) -> tuple[int, Any]:
    """Return the size of the vocabulary, and this rank's micro batches of the config's data."""
    corpus = open_corpus(job.corpus)
    data = samples_for(corpus, job.config)
    order = order_for(data, job.config, endless=True)
    micro = job.plan.micro_batch or 1

    def batches() -> Iterator[Batch]:
        position = 0
        while True:
            inputs, labels = data.batch(rank_ids(order, position, ranks.world_size, ranks.rank, micro, 1)[0])
            yield inputs.to(ranks.device), labels.to(ranks.device)
            position += micro * ranks.world_size

    return corpus.vocab_size, batches()
