"""Predicted against published step times: per source, the worst rows, a null model, and the regret of the choice.

    .venv/bin/python benchmarks/accuracy/speed.py [--rows] [--plain] [--holdout] [SOURCE ...]

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
from shardwise.cost.time.estimate_time import step_time
from shardwise.cost.time.step_time import StepTime
from shardwise.errors import PlanError
from shardwise.search.enumerate import complexity
from shardwise.search.problem import PLAIN_TIE, TIE

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


def seconds_of(row: Row, *, plain: bool = False) -> StepTime:
    """Predict the step of a row with ``--program``, or, if ``plain``, without it."""
    one = row.default() if plain else row
    return step_time(one.profile, one.plan, one.workload, one.cluster)


def predict(rows: Iterable[Row], *, plain: bool = False) -> tuple[list[Timed], list[str]]:
    """All rows that have a time, with predictions, ``plain`` without ``--program``; and what could not be predicted."""
    found: list[tuple[Row, float, StepTime]] = []
    problems: list[str] = []
    for row in rows:
        if row.step_time_s is None or row.oom:
            continue
        try:
            time = seconds_of(row, plain=plain)
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


def regret(timed: Iterable[Timed], choose: Callable[[list[Timed]], Timed]) -> list[float]:
    """Of each group with two or more plans: time of the plan that is chosen over the best time, minus 1."""
    groups: dict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for one in timed:
        groups[one.row.group].append(one)
    out = []
    for members in groups.values():
        if len(members) > 1:
            out.append(choose(members).measured_s / min(m.measured_s for m in members) - 1)
    return out


def tied(members: list[Timed]) -> Timed:
    """What the search recommends of a group: the simplest within a tie of the fastest."""
    fastest = min(one.predicted.step_s for one in members)

    def is_close(one: Timed) -> bool:
        axes, swaps, *_ = complexity(one.row.plan.parsed)
        return one.predicted.step_s <= fastest * (1 + (TIE if axes or swaps else PLAIN_TIE))

    close = [one for one in members if is_close(one)]
    return min(close, key=lambda one: (*complexity(one.row.plan.parsed), one.row.plan.grad_accum))


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
    parts = (
        "compute",
        "recompute",
        "exposed_dp",
        "exposed_tp",
        "exposed_cp",
        "exposed_ep",
        "pipeline",
        "optimizer",
        "host",
    )
    shares = " ".join(f"{part[-4:]} {getattr(time, part + '_s') / time.step_s:.0%}" for part in parts)
    return f"{one.error:+7.1%} null {one.null_error:+6.1%} {one.measured_s:9.4f} s  {one.row.label}  [{shares}]"


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--rows", action="store_true", help="every row, worst first")
    parser.add_argument("--worst", type=int, default=15)
    parser.add_argument("--holdout", action="store_true", help="refit without each source, and predict that one")
    parser.add_argument("--plain", action="store_true", help="predict as the command line does, without --program")
    options = parser.parse_args()
    if options.holdout:
        from holdout import main as holdout

        holdout()
        return
    timed, problems = predict(load_rows(*options.sources), plain=options.plain)
    table(timed)
    ordered = sorted(timed, key=lambda one: -abs(math.log(1 + one.error)))
    print("\nworst rows")
    for one in ordered if options.rows else ordered[: options.worst]:
        print(show(one))
    for problem in problems:
        print("not predicted:", problem)
    choice = [one for one in timed if one.row.source == CHOICE]
    ways: dict[str, Callable[[list[Timed]], Timed]] = {
        "least predicted": lambda members: min(members, key=lambda one: one.predicted.step_s),
        "as the search ties": tied,
        "rule of thumb": lambda members: min(members, key=rule_of_thumb),
    }
    for name, choose in ways.items():
        found = regret(choice, choose)
        if found:
            print(
                f"regret, {name}: {len(found)} groups, mean {sum(found) / len(found):.1%}, "
                f"p90 {quantile(found, 0.9):.1%}, worst {max(found):.1%}"
            )


if __name__ == "__main__":
    main()
