"""Plants NaN and inf in one place each, and holds what is said against it; times what a healthy step pays.

``python -m benchmarks.watch.bad_numbers --output benchmarks/watch``; raw results are kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from shardwise.train.nonfinite.replay_step import random_state
from tests.planted import WORLD_2, WORLD_4, expected, found_at
from tests.worlds import run_each


def healthy_us(repeats: int = 2000) -> float:
    """Microseconds of all that a healthy step does for a replay: the states of the generators."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        random_state(torch.device("cpu"))
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds) * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    folder = parser.parse_args().output
    rows = []
    for world, places in ((2, WORLD_2), (4, WORLD_4)):
        found = run_each(found_at, world, [(place,) for place in places], timeout_s=300.0)
        for place, by_rank in zip(places, found, strict=True):
            want, said = expected(place), by_rank[0]
            right = all(said.get(key) == value for key, value in want.items())
            alike = all(one["text"] == said["text"] for one in by_rank)
            more = {"strategy": place.strategy, "ranks": world, "options": place.options}
            rows.append({"place": place.name, **more, "expected": want, "found": said, "right": right and alike})
    summary = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.__version__}, gloo",
        "places": len(rows),
        "right": sum(row["right"] for row in rows),
        "healthy_step_us": healthy_us(),
        "results": rows,
    }
    (folder / "numbers.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['right']} of {summary['places']} right; {summary['healthy_step_us']} us a healthy step")


if __name__ == "__main__":
    main()
