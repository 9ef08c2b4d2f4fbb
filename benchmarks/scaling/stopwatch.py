"""What ``bench scaling`` says of a step against a stopwatch: another clock, on another rank, at another place.

    python -m benchmarks.scaling.stopwatch --output benchmarks/scaling/results

The bench reads ``time.perf_counter`` on rank 0 after each step. The stopwatch reads the wall clock (``time.time``) on
the last rank, each time the loop asks for the next batch, and knows nothing of the bench's own readings. Compared is
the time from the beginning of the first timed step to that of the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.bench.scaling.scaling_plans import plan_at
from shardwise.bench.scaling.scaling_sizes import SizeTask
from shardwise.launch.on_ranks import on_ranks
from shardwise.measure.scaling_facts import MODES
from shardwise.run.job import prepare_job
from shardwise.train.config import read_config

if TYPE_CHECKING:
    from shardwise.distributed.process_group import Ranks

SIZES = (1, 2, 4)
STRATEGIES = ("ddp", "fsdp")
CONFIG = Path(__file__).with_name("config.toml")


def main() -> None:
    """Every size, mode and strategy; a line each, and all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--output", type=Path, required=True)
    words = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for strategy in words.strategies:
        for size in words.sizes:
            rows += one_size(words.config, strategy, size, words.steps)
            for row in rows[-2:]:
                print(line(row), flush=True)
    words.output.mkdir(parents=True, exist_ok=True)
    (words.output / "stopwatch.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(f"worst: {max(abs(row['bench_over_stopwatch'] - 1) for row in rows):.2%} off")


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['strategy']:>5} {row['mode']:>6} {row['devices']} rank(s): bench {row['bench_s']:.3f} s, stopwatch "
        f"{row['stopwatch_s']:.3f} s for {row['steps']} steps: {row['bench_over_stopwatch']:.4f} x"
    )


def one_size(config: Path, strategy: str, size: int, steps: int) -> list[dict[str, Any]]:
    """Start the ranks, and read what both clocks say."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"parallel.strategy={strategy}", "parallel.nproc=2", f"train.output={folder}"]
        job = prepare_job(read_config(config, words), lambda said: None).job
        plans = {mode: plan_at(job.plan, size, mode) for mode in MODES}
        task = SizeTask(config=job.config, corpus=job.corpus, plans=plans, steps=steps)
        work = "benchmarks.scaling.stopwatch:time_size"
        rows: list[dict[str, Any]] = on_ranks(work, task, size, device="cpu", threads=1)[0]
    return rows


def time_size(task: SizeTask, ranks: Ranks) -> list[dict[str, Any]]:
    """One size. The last rank holds the stopwatch; rank 0 has the bench's figures."""
    from shardwise.bench.scaling.scaling_sizes import WARM_UP, measure_size
    from shardwise.distributed.process_group import gather_text
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.data.samples import order_for, samples_for, step_batches
    from shardwise.train.model import model_factory

    config, steps, corpus = task.config, task.steps, open_corpus(task.corpus)
    data = samples_for(corpus, config)
    order = order_for(data, config, endless=True)
    rows: list[dict[str, Any]] = []
    for mode, plan in task.plans.items():
        ticks: list[float] = []
        feed = clocked(step_batches(data, order, plan, ranks.rank), ticks)
        sample = measure_size(config, plan, mode, model_factory(config, corpus.vocab_size), feed, ranks, steps)
        stopwatch_s = json.loads(gather_text(json.dumps(ticks[-1] - ticks[WARM_UP]), ranks)[-1])
        if sample is not None:
            bench_s = sum(sample.steps_s[:-1])
            rows.append(
                {
                    "strategy": plan.strategy,
                    "mode": mode,
                    "devices": ranks.world_size,
                    "steps": steps - 1,
                    "bench_s": bench_s,
                    "stopwatch_s": stopwatch_s,
                    "bench_over_stopwatch": bench_s / stopwatch_s,
                    "timing_over_bench": None if sample.timing is None else sample.timing.step_s / sample.step_s,
                    "load": os.getloadavg()[0],
                }
            )
    return rows


def clocked(feed: Iterator[list[Any]], ticks: list[float]) -> Iterator[list[Any]]:
    """``feed``, with the time of each request."""
    while True:
        ticks.append(time.time())
        yield next(feed)


if __name__ == "__main__":
    main()
