"""Predicted against measured step time over a link of known speed: two network namespaces, `tc tbf`, one rank each.

    python -m benchmarks.scaling.shaped --output benchmarks/scaling/results

For each rate the link is measured by ``bench comm``. For each strategy one rank runs by itself, two ranks run over the
link, and one rank runs by itself again; the prediction for two ranks is made from the runs of one rank and the
calibration, and has not seen two ranks. The two hosts share one machine's caches and memory, which hosts of their own
would not: so two worlds of one rank run at the same time, one for each host, and know nothing of each other. Needs
root, and a machine with nothing else to do: the load average is kept beside each row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardwise.bench.scaling.predict import curve_of
from shardwise.bench.scaling.scaling_sizes import FILE, read_links, stored
from shardwise.measure.scaling_facts import MODES, Sample
from tests.netns import Hosts, two_hosts, why_not

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("config.toml")
SHARDWISE = ["-m", "shardwise"]
TIMEOUT_S = 900.0
HOSTS = 2


def main() -> None:
    """Measure every rate and strategy, print a line each, write all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each collective of bench comm")
    parser.add_argument("--max-size", default="16MiB", help="largest message of bench comm")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--output", type=Path, required=True)
    words = parser.parse_args()
    problem = why_not()
    if problem:
        raise SystemExit(f"no shaped link here: {problem}")
    words.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for rate in words.rates:
        with two_hosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
            links = calibrate(hosts, Path(folder) / "links", words.seconds, words.max_size)
            mine: list[dict[str, Any]] = []
            for strategy in words.strategies:
                found = one_case(hosts, links, strategy, words.steps, words.config, Path(folder) / strategy)
                mine += [{"rate": rate, "strategy": strategy, **row} for row in found]
                print(*(line(row) for row in mine[-len(found) :]), sep="\n", flush=True)
                document = {"rows": mine, "calibration": links.read_text()}
                (words.output / f"shaped-{rate}.json").write_text(json.dumps(document, indent=1) + "\n")
            rows += mine
    worst = max(abs(row["measured_over_predicted"] - 1) for row in rows)
    print(f"worst: {worst:.1%} off")


def calibrate(hosts: Hosts, folder: Path, seconds: float, largest: str) -> Path:
    """The link, measured; returns the calibration file."""
    argv = [*SHARDWISE, "bench", "comm", "--device", "cpu", "--seconds", str(seconds), "--max-size", largest]
    checked(hosts.torchrun([*argv, "--output", str(folder)], timeout_s=TIMEOUT_S, cwd=ROOT))
    files = sorted(folder.glob("*.toml"))
    if len(files) != 1:
        raise SystemExit(f"bench comm left {[file.name for file in folder.iterdir()]}, not one calibration file")
    return files[0]


def one_case(hosts: Hosts, links: Path, strategy: str, steps: int, config: Path, folder: Path) -> list[dict[str, Any]]:
    """One rank, two ranks, one rank; a row for weak and for strong scaling."""
    before = alone(strategy, steps, config, folder / "before")
    pair = folder / "pair"
    argv = [*SHARDWISE, "bench", "scaling", str(config), f"parallel.strategy={strategy}", "--steps", str(steps)]
    argv += ["--calibration", str(links), "--output", str(pair)]
    checked(hosts.torchrun(argv, timeout_s=TIMEOUT_S, cwd=ROOT))
    after = alone(strategy, steps, config, folder / "after")
    scaling = stored(pair / FILE)
    assert scaling is not None
    calibration = read_links(links, scaling.cluster)
    rows = []
    for mode in MODES:
        measured = next(one for one in scaling.of(mode) if one.devices == 2)
        points = []
        for base in (*before, *after):
            curve = curve_of(scaling.merged([one for one in base if one.mode == mode]), mode, 2, calibration)
            points.append(next(point for point in curve.points if point.devices == 2))
        mean = statistics.mean(point.model_s or 0.0 for point in points)
        rows.append(
            {
                "mode": mode,
                "measured_s": measured.step_s,
                "predicted_s": mean,
                "predictions": [point.model_dump(mode="json") for point in points],
                "alone_s": [one.step_s for base in (*before, *after) for one in base if one.mode == mode],
                "measured_over_predicted": measured.step_s / mean,
                "steps": measured.steps,
                "deviation": measured.deviation,
                "load": os.getloadavg()[0],
                "timing": None if measured.timing is None else measured.timing.model_dump(mode="json"),
            }
        )
    return rows


def alone(strategy: str, steps: int, config: Path, folder: Path) -> list[list[Sample]]:
    """One rank by itself on each host at the same time, weak and strong: the batches of the pair."""
    argv = [sys.executable, *SHARDWISE, "bench", "scaling", str(config), f"parallel.strategy={strategy}", "--size", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SHARDWISE_HISTORY": "off"}
    folders = [folder / str(host) for host in range(HOSTS)]
    processes = [
        subprocess.Popen(
            [*argv, "--steps", str(steps), "--output", str(one)],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for one in folders
    ]
    for process in processes:
        said, _ = process.communicate(timeout=TIMEOUT_S)
        checked([subprocess.CompletedProcess(process.args, process.returncode, said, "")])
    found = [stored(one / FILE) for one in folders]
    return [[one for one in scaling.samples if one.devices == 1] for scaling in found if scaling is not None]


def checked(done: list[subprocess.CompletedProcess[str]]) -> None:
    """Stop where a command has failed, with what it said."""
    for one in done:
        if one.returncode:
            raise SystemExit(f"{one.args} ended with {one.returncode}\n{one.stdout}\n{one.stderr}")


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    return (
        f"{row['rate']:>8} {row['strategy']:>5} {row['mode']:>6}: measured {row['measured_s'] * 1e3:.1f} ms, predicted "
        f"{row['predicted_s'] * 1e3:.1f} ms, {row['measured_over_predicted']:.3f} x (load {row['load']:.1f})"
    )


if __name__ == "__main__":
    main()
