"""Predict the steps that `on_links.py` measured, and judge the choice among them.

    python -m benchmarks.choice.judge benchmarks/choice/results/xeon

Each step is predicted from what the ranks measured of themselves and of the link just before the model's turns and just
after them, as ``plan --calibration`` would: the mean of the two, as the speed of a shared machine drifts. Errors are of
predicted over measured, the median of a configuration's steps. The chosen plan is the one with the shortest prediction
among those of a model on a link; its regret is its measured time over that of the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.cost.link_calibration import CalibrationFile
from shardwise.cost.time.estimate_time import step_time
from shardwise.cost.time.step_time import StepTime
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One configuration: what was predicted from the probe before it, and the median of its steps."""

    link: str
    ranks: int
    model: str
    plan: Plan
    predicted: StepTime
    measured_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted.step_s / self.measured_s

    @property
    def error(self) -> float:
        """Relative error, without its sign."""
        return abs(self.ratio - 1.0)


def main() -> None:
    """Print errors by strategy, link and model, the choices, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rows", action="store_true", help="also each configuration, with the parts of its prediction")
    words = parser.parse_args()
    rows = [row for file in sorted(words.results.glob("*-ranks.json")) for row in rows_of(json.loads(file.read_text()))]
    if words.rows:
        for row in sorted(rows, key=lambda one: one.ratio):
            print(line(row))
    for name in ("strategy", "link", "model", "ranks"):
        print(
            f"| {name} | configurations | predicted / measured, median | error, median | p90 |\n|---|---|---|---|---|"
        )
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            groups[str(row.plan.strategy if name == "strategy" else getattr(row, name))].append(row)
        for key, some in groups.items():
            print(f"| {key} | {len(some)} | {statistics.median(r.ratio for r in some):.2f} | {errors(some)} |")
        print()
    print(f"all {len(rows)}: error, median | p90: {errors(rows)}")
    cases: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        cases[row.link, row.ranks, row.model].append(row)
    regrets = {key: regret(some) for key, some in cases.items()}
    for key, (value, chosen, fastest) in sorted(regrets.items(), key=lambda item: -item[1][0])[:10]:
        print(f"{key}: chose {chosen}, fastest {fastest}: {value:.1%}")
    values = [value for value, _, _ in regrets.values()]
    print(f"regret over {len(values)} choices: mean {statistics.mean(values):.1%}, worst {max(values):.1%}")


def rows_of(document: dict[str, Any]) -> list[Row]:
    """Predict every configuration of one link's file."""
    cluster, rows = ClusterSpec.model_validate(document["cluster"]), []
    for index, case in enumerate(document["cases"]):
        around = [CalibrationFile.model_validate(one["calibration"]) for one in document["probes"][index : index + 2]]
        measured_by = [(one.compute.rates(), one.calibration()) for one in around if one.compute is not None]
        for text, seconds in zip(case["plans"], case["seconds"], strict=True):
            plan = Plan.model_validate(tomllib.loads(text))
            profile = profile_of(case["model"], plan.seq_len or 128)
            predicted = mean_of(
                [step_time(profile, plan, Workload(), cluster, rates=r, calibration=c) for r, c in measured_by]
            )
            measured = statistics.median(seconds)
            rows.append(Row(document["link"], document["ranks"], case["model"], plan, predicted, measured))
    return rows


def mean_of(times: list[StepTime]) -> StepTime:
    """The mean of each part."""
    names = [name for name in StepTime.model_fields if name.endswith("_s")]
    parts = {name: statistics.mean(getattr(time, name) for time in times) for name in names}
    return times[0].model_copy(update=parts)


@cache
def profile_of(model: str, seq_len: int) -> ModelProfile:
    """The profile that ``plan`` makes of the model."""
    return load_profile(str(HERE / f"{model}.json"), seq_len=seq_len)


def errors(rows: list[Row]) -> str:
    """Median and p90 of the errors."""
    found = sorted(row.error for row in rows)
    return f"{statistics.median(found):.1%} | {found[min(len(found) - 1, int(0.9 * len(found)))]:.1%}"


def regret(rows: list[Row]) -> tuple[float, str, str]:
    """Measured time of the plan that is predicted to be fastest over that of the fastest, minus 1; and both."""
    chosen = min(rows, key=lambda row: row.predicted.step_s)
    fastest = min(rows, key=lambda row: row.measured_s)
    return chosen.measured_s / fastest.measured_s - 1.0, chosen.plan.strategy, fastest.plan.strategy


def line(row: Row) -> str:
    """A configuration with its parts, in milliseconds."""
    parts = {name: getattr(row.predicted, name) for name in type(row.predicted).model_fields if name.endswith("_s")}
    shown = " ".join(f"{name[:-2]} {value * 1e3:.0f}" for name, value in parts.items() if value and name[0] not in "lh")
    key = f"{row.link} {row.ranks} {row.model} {row.plan.strategy} {row.plan.micro_batch}x{row.plan.grad_accum}"
    return f"{row.ratio:.2f} {key}: {row.measured_s * 1e3:.0f} ms; {shown} host {row.predicted.host_s * 1e3:.0f}"


if __name__ == "__main__":
    main()
