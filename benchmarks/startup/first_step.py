"""From the command to the first step of `shardwise train`: ranks that are forked, and ranks that start anew, in turn.

    python benchmarks/startup/first_step.py --rounds 7
    python benchmarks/startup/first_step.py --rounds 7 --before OTHER_TREE

Writes ``first_step_cpu_DATE.json`` here with every raw sample: seconds until the first line, until the plan is printed,
until the first step is done, and until the command has ended. With ``--before`` the command of another checkout takes
turns, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANEW = "from shardwise.launch import fork_server; fork_server.start = lambda *_: None; "
MAIN = "from shardwise.cli.main import main; main()"
MARKS = {"plan": "plan: ", "first_step": "step 1/"}


def timed(config: str, code: str, tree: Path) -> dict[str, float]:
    """One run of four steps of ``tree``'s command in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", config, "train.steps=4", "train.eval_samples=8", f"train.output={folder}/run"]
        command, env = [sys.executable, "-c", code, *words], {**os.environ, "PYTHONPATH": str(tree / "src")}
        found: dict[str, float] = {}
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic() - start
            found.setdefault("first_line", now)
            for name, mark in MARKS.items():
                if line.startswith(mark):
                    found.setdefault(name, now)
        if process.wait() != 0:
            raise SystemExit("the run failed")
        return {**found, "end": time.monotonic() - start}


def main() -> None:
    """Measure in turn, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--config", default="examples/stdlib.toml")
    parser.add_argument("--before", type=Path, help="checkout of another commit, whose command takes turns")
    given = parser.parse_args()
    ways = {"forked": (MAIN, ROOT), "anew": (ANEW + MAIN, ROOT)}
    if given.before is not None:
        ways["before"] = (MAIN, given.before.resolve())
    samples: dict[str, list[dict[str, float]]] = {how: [] for how in ways}
    for way in ways.values():
        timed(given.config, *way)  # files are read and compiled once before
    for turn in range(given.rounds):
        for how in list(ways)[:: 1 if turn % 2 else -1]:
            samples[how].append(timed(given.config, *ways[how]))
            print(turn + 1, how, {name: round(s, 2) for name, s in samples[how][-1].items()}, flush=True)
    medians = {
        how: {name: round(statistics.median(one[name] for one in rows), 3) for name in rows[0]}
        for how, rows in samples.items()
    }
    ratios = {
        how: round(
            statistics.median(a["first_step"] / b["first_step"] for a, b in zip(samples["forked"], rows, strict=True)),
            3,
        )
        for how, rows in samples.items()
        if how != "forked"
    }
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = {
        "schema": 1,
        "date": date,
        "machine": f"{os.cpu_count()} × {platform.machine()}",
        "config": given.config,
        "medians_s": medians,
        "median_ratio_to_first_step": ratios,
        "samples_s": samples,
    }
    file = Path(__file__).with_name(f"first_step_cpu_{date}.json")
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"medians_s": medians, "ratios": ratios, "file": str(file)}))


if __name__ == "__main__":
    main()
