"""Injects faults into real runs on gloo ranks, and holds the watchdog's verdict and its time against what was injected.

``python benchmarks/watch/run.py --output benchmarks/watch --faults 200 --clean-steps 2000``; raw results are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

from shardwise.watch import monitor
from tests.cli.configs import write_config
from tests.commands import shardwise

APART = ("different collectives", "different shapes", "wait for each other")
EXPECTED: dict[str, tuple[str, ...]] = {
    "sleep": ("is in other code",),
    "stop": ("is stopped (SIGSTOP)",),
    "native": ("native code holds the interpreter",),
    "loader": ("waits for its data loader",),
    "order": ("wait for each other",),
    "collective": APART,
    "skip": APART,  # which of them depends on the groups of the strategy
    "extra": APART,
    "shape": APART,
    "exit": ("ended with exit code 0",),
    "kill": ("SIGKILL",),
    "segfault": ("SIGSEGV",),
    "exception": ("came to harm",),
}
"""Words of the message, one of which must be there, of each fault."""
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
NEEDS_FOUR = ("hsdp",)


@dataclass(frozen=True)
class Trial:
    kind: str
    strategy: str
    world: int
    rank: int
    step: int


def trials(number: int, seed: int) -> list[Trial]:
    """Faults in turn, each on a random rank and step of a random strategy."""
    draw = random.Random(seed)
    found = []
    for kind in itertools.islice(itertools.cycle(EXPECTED), number):
        strategy = draw.choice(STRATEGIES)
        world = 4 if strategy in NEEDS_FOUR else draw.choice((2, 3, 4))
        found.append(Trial(kind, strategy, world, draw.randrange(world), draw.randrange(4, 10)))
    return found


def run(trial: Trial) -> dict[str, object]:
    """One run with a fault: what was said, and how long after the fault."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "fault"
        kwargs = {"kind": trial.kind, "rank": trial.rank, "step": trial.step, "mark": str(mark)}
        config = write_config(
            Path(folder),
            model={"factory": "tests.faulty:model", "kwargs": kwargs},
            parallel={"nproc": trial.world, "strategy": trial.strategy},
            train={"steps": 16, "global_batch": 8 if trial.world != 3 else 6, "output": f"{folder}/run"},
        )
        done = shardwise("train", str(config), exit_code=None)
        ended = time.time()
        report = Path(folder) / "run" / "watch.json"
        events = json.loads(report.read_text())["events"] if report.exists() else []
        at = float(mark.read_text()) if mark.exists() else None
    first = events[0] if events else None
    named = [trial.rank] if first is None else first["ranks"]
    said = done.stderr
    right_rank = trial.rank in named and f"rank {trial.rank}" in said
    right_reason = any(words in said for words in EXPECTED[trial.kind])
    return {
        **asdict(trial),
        "exit_code": done.returncode,
        "right_rank": right_rank,
        "right_reason": right_reason,
        "ranks_named": named,
        "reason_named": None if first is None else first["reason"],
        "seconds_to_verdict": None if at is None else round((ended if first is None else first["time"]) - at, 2),
        "said": said[-1500:] if not (right_rank and right_reason) else "",
    }


def clean(steps: int) -> list[dict[str, object]]:
    """Runs without a fault, with evaluations, checkpoints and a first step that is far longer than the others."""
    found = []
    each = -(-steps // len(STRATEGIES))
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            kwargs = {"kind": "slow_first", "rank": 1, "step": 1}
            config = write_config(
                Path(folder),
                model={"factory": "tests.faulty:model", "kwargs": kwargs},
                parallel={"nproc": 4 if strategy in NEEDS_FOUR else 2, "strategy": strategy},
                train={"steps": each, "eval_every": 50, "output": f"{folder}/run"},
                checkpoint={"every": 50},
            )
            done = shardwise("train", str(config), exit_code=None)
            alarms = (Path(folder) / "run" / "watch.json").exists()
        found.append({"strategy": strategy, "steps": each, "exit_code": done.returncode, "alarm": alarms})
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("benchmarks/watch"))
    options.add_argument("--faults", type=int, default=200)
    options.add_argument("--clean-steps", type=int, default=2000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    results = []
    with mock.patch.object(monitor, "RECOVER_S", 1.0):  # after the verdict, which is what is timed
        for number, trial in enumerate(trials(given.faults, given.seed)):
            results.append(run(trial))
            one = results[-1]
            print(number, trial, one["right_rank"], one["right_reason"], one["seconds_to_verdict"], flush=True)
    times = [float(str(one["seconds_to_verdict"])) for one in results if one["seconds_to_verdict"] is not None]
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {torch.__version__}, gloo",
        "faults": len(results),
        "right_rank": sum(bool(one["right_rank"]) for one in results),
        "right_reason": sum(bool(one["right_reason"]) for one in results),
        "seconds_to_verdict": {"median": statistics.median(times), "worst": max(times)},
        "clean": clean(given.clean_steps),
        "results": results,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    print({key: value for key, value in document.items() if key != "results"})


if __name__ == "__main__":
    main()
