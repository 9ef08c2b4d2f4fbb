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
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.launch.local import run_local
from shardwise.launch.rank import guarded

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
        argv = [sys.executable, "-m", "benchmarks.scaling.stopwatch", "rank", str(config), strategy, str(steps), folder]
        run_local(argv, size, threads=1, logs=Path(folder) / "logs")
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows


def rank_main() -> int:
    """One rank. The last one holds the stopwatch; rank 0 has the bench's figures."""
    from shardwise.bench.scaling.run_scaling import WARM_UP, measure_size
    from shardwise.bench.scaling.scaling_plans import plan_at
    from shardwise.cli.bench_scaling import windows
    from shardwise.distributed.process_group import broadcast_text, gather_text, join, leave
    from shardwise.measure.scaling_facts import MODES
    from shardwise.plan.plan import Plan
    from shardwise.run.job import prepare_job
    from shardwise.train.config import read_config
    from shardwise.train.data.corpus import open_corpus
    from shardwise.train.model import model_factory

    _, _, file, strategy, number, folder = sys.argv
    steps = int(number)
    words = [f"parallel.strategy={strategy}", "parallel.nproc=2", f"train.output={folder}"]
    config, ranks = read_config(Path(file), words), join("cpu")
    text = ""
    if ranks.is_main:
        job = prepare_job(config, lambda said: None).job
        text = json.dumps([job.plan.model_dump(mode="json", by_alias=True), str(job.corpus)])
    told, place = json.loads(broadcast_text(text, ranks))
    reference, corpus = Plan.model_validate(told), open_corpus(Path(place))
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        plan = plan_at(reference, ranks.world_size, mode)
        ticks: list[float] = []
        feed = clocked(windows(config, corpus, plan, ranks), ticks)
        sample = measure_size(config, plan, mode, model_factory(config, corpus.vocab_size), feed, ranks, steps)
        stopwatch_s = json.loads(gather_text(json.dumps(ticks[-1] - ticks[WARM_UP]), ranks)[-1])
        if sample is not None:
            bench_s = sum(sample.steps_s[:-1])
            rows.append(
                {
                    "strategy": strategy,
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
    if ranks.is_main:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    leave(ranks)
    return 0


def clocked(feed: Iterator[list[Any]], ticks: list[float]) -> Iterator[list[Any]]:
    """``feed``, with the time of each request."""
    while True:
        ticks.append(time.time())
        yield next(feed)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "rank":
        guarded(rank_main)
    main()
