"""Predicted against published step times: per source, the worst rows, a null model, and the regret of the choice.

    .venv/bin/python benchmarks/accuracy/speed.py [--rows] [SOURCE ...]

The null model is one constant MFU for each source, GPU and precision, its median: it has seen the answers. Regret is
time(chosen) / time(best) − 1 within rows that compute the same thing on the same GPUs.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from rows import Row, load_rows

from shardwise.cost.flops import palm_flops
from shardwise.cost.steptime import StepTime
from shardwise.cost.time import step_time
from shardwise.errors import PlanError

CHOICE = "vtrain_ground_truth"  # the source whose groups hold many plans each


@dataclass(frozen=True)
class Timed:
    """A row with its prediction and the null model's, in seconds."""

    row: Row
    measured_s: float
    predicted: StepTime
    null_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted.step_s / self.measured_s - 1

    @property
    def null_error(self) -> float:
        """The null model's error."""
        return self.null_s / self.measured_s - 1


def predict(rows: Iterable[Row]) -> tuple[list[Timed], list[str]]:
    """All rows that have a time, with predictions; and what could not be predicted."""
    found: list[tuple[Row, float, StepTime]] = []
    problems: list[str] = []
    for row in rows:
        if row.step_time_s is None or row.oom:
            continue
        try:
            time = step_time(
                row.profile, row.plan, row.workload, row.cluster, virtual_stages=row.virtual_stages, autocast=False
            )
        except PlanError as error:
            problems.append(f"{row.label}: {error}")
            continue
        found.append((row, row.step_time_s, time))
    rates: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, measured, _ in found:
        rates[row.source, row.gpu, row.plan.precision].append(_flops(row) / measured)
    constant = {key: median(values) for key, values in rates.items()}
    timed = [
        Timed(row, measured, time, _flops(row) / constant[row.source, row.gpu, row.plan.precision])
        for row, measured, time in found
    ]
    return timed, problems


def _flops(row: Row) -> float:
    return palm_flops(row.profile, (row.plan.global_batch or 1) / row.plan.dims.world_size)


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of them lie, between neighbours by straight line."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def regret(timed: Iterable[Timed], key: Callable[[Timed], float]) -> list[float]:
    """Of each group with two or more plans: time of the plan with the least ``key`` over the best time, minus 1."""
    groups: dict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for one in timed:
        groups[one.row.group].append(one)
    out = []
    for members in groups.values():
        if len(members) > 1:
            chosen = min(members, key=key)
            out.append(chosen.measured_s / min(m.measured_s for m in members) - 1)
    return out


def rule_of_thumb(one: Timed) -> float:
    """Least TP × PP, then least TP, then the largest micro batch, as one number."""
    dims = one.row.plan.dims
    return float(dims.tp * dims.pp * 1e6 + dims.tp * 1e3 - (one.row.plan.micro_batch or 1))


def table(timed: list[Timed]) -> None:
    """Print a line for each source and GPU, and one for all."""
    print(f"{'source':26s} {'gpu':18s} {'rows':>5s} {'median':>7s} {'p90':>7s} {'bias':>7s} {'null':>7s} {'p90':>7s}")
    groups: dict[tuple[str, str], list[Timed]] = defaultdict(list)
    for one in timed:
        groups[one.row.source, one.row.gpu].append(one)
    for (source, gpu), members in [*groups.items(), (("all", ""), timed)]:
        errors, null = [abs(m.error) for m in members], [abs(m.null_error) for m in members]
        print(
            f"{source:26s} {gpu:18s} {len(members):5d} {median(errors):7.1%} {quantile(errors, 0.9):7.1%} "
            f"{median(m.error for m in members):+7.1%} {median(null):7.1%} {quantile(null, 0.9):7.1%}"
        )


def show(one: Timed) -> str:
    """One row with where its predicted seconds go, in percent."""
    time = one.predicted
    parts = ("compute", "recompute", "exposed_dp", "exposed_tp", "exposed_cp", "pipeline", "optimizer", "host")
    shares = " ".join(f"{part[-4:]} {getattr(time, part + '_s') / time.step_s:.0%}" for part in parts)
    return f"{one.error:+7.1%} null {one.null_error:+6.1%} {one.measured_s:9.4f} s  {one.row.label}  [{shares}]"


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--rows", action="store_true", help="every row, worst first")
    parser.add_argument("--worst", type=int, default=15)
    options = parser.parse_args()
    timed, problems = predict(load_rows(*options.sources))
    table(timed)
    ordered = sorted(timed, key=lambda one: -abs(math.log(1 + one.error)))
    print("\nworst rows")
    for one in ordered if options.rows else ordered[: options.worst]:
        print(show(one))
    for problem in problems:
        print("not predicted:", problem)
    choice = [one for one in timed if one.row.source == CHOICE]
    for name, key in (("predicted", lambda one: one.predicted.step_s), ("rule of thumb", rule_of_thumb)):
        found = regret(choice, key)
        if found:
            print(
                f"regret, {name}: {len(found)} groups, mean {sum(found) / len(found):.1%}, "
                f"p90 {quantile(found, 0.9):.1%}, worst {max(found):.1%}"
            )


if __name__ == "__main__":
    main()
