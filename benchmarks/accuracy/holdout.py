"""How far the step time of a source is off when the constants are fitted without it.

    .venv/bin/python benchmarks/accuracy/speed.py --holdout

Of each GPU generation the four factors inside a step (`Generation.in_step`) are fitted on all published rows but one
source's, each source weighted by the root of its rows, and that source is predicted. Where the others have fewer than
`LEAST_ROWS` rows, it is predicted with the factors that hold for generations without any source. Constants of kernels,
collectives and the host stay as they are: those of the host were fitted on vTrain's rows. The spread at the end is the
interval that `Generation.spread` publishes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from rows import Row, load_rows
from speed import quantile, seconds_of

from shardwise.cost.time import estimate_time as time
from shardwise.cost.time import layer_time as layers
from shardwise.cost.time import machine as rates
from shardwise.hardware.gpus import generation_of, generations

Factors = tuple[float, float, float, float]
STEPS = (0.1, 0.05, 0.025)
LEAST_ROWS = 16
MOST_ROWS = 64  # of a source in a fit, evenly taken
CAP = 0.5  # an error counts for no more than this (natural logarithm)
PULL = 0.02  # weight of the squared logarithm of a factor over that of `rates.IN_STEP_OTHERS`


def errors(rows: Sequence[Row]) -> dict[str, list[float]]:
    """By source, the logarithms of predicted over measured."""
    for cache in (layers._ops_s, time._unit_times, time._stages, time._traffics):
        cache.cache_clear()
    out: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        assert row.step_time_s is not None
        seconds = seconds_of(row).step_s
        out[row.source].append(math.log(seconds / row.step_time_s))
    return out


@contextmanager
def factors(generation: str, value: Factors | None) -> Iterator[None]:
    """``generation`` with other factors for a while, None for none of its own."""
    kept = generations()[generation]
    if value is None:
        generations()[generation] = dataclasses.replace(kept, in_step=None)
    else:
        generations()[generation] = dataclasses.replace(kept, in_step=value)
    try:
        yield
    finally:
        generations()[generation] = kept


def loss(generation: str, rows: Sequence[Row], value: Factors) -> float:
    """Mean absolute error, sources by the root of their rows, and the pull."""
    with factors(generation, value):
        found = errors(rows)
    weights = {source: math.sqrt(len(values)) for source, values in found.items()}
    means = {source: sum(min(CAP, abs(v)) for v in values) / len(values) for source, values in found.items()}
    pull = sum(math.log(a / b) ** 2 for a, b in zip(value, rates.IN_STEP_OTHERS, strict=True))
    return sum(weights[s] * means[s] for s in found) / sum(weights.values()) + PULL * pull


def fit(generation: str, rows: Sequence[Row]) -> Factors:
    """The factors of least loss, one after the other in smaller and smaller steps."""
    taken: list[Row] = []
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source]
        taken += own[:: -(-len(own) // MOST_ROWS)]
    best: Factors = rates.IN_STEP_OTHERS
    least = loss(generation, taken, best)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for place in range(4):
                for change in (-step, step):
                    changed = [v + change if i == place else v for i, v in enumerate(best)]
                    one: Factors = (changed[0], changed[1], changed[2], changed[3])
                    if min(one) < 0.5:
                        continue
                    found = loss(generation, taken, one)
                    if found < least - 1e-6:
                        least, best, moved = found, one, True
    return best


@dataclasses.dataclass(frozen=True)
class Held:
    """A source of a generation: errors, predicted over measured minus 1, and the factors fitted without it, if any."""

    generation: str
    source: str
    errors: list[float]
    factors: Factors | None


def held_back() -> Iterator[Held]:
    """Predict each source of each generation with factors that were fitted without it."""
    rows = [row for row in load_rows() if row.step_time_s is not None and not row.oom and row.cluster.gpu is not None]
    by_generation: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        assert row.cluster.gpu is not None
        by_generation[generation_of(row.cluster.gpu) or ""].append(row)
    for generation, members in by_generation.items():
        for source in sorted({row.source for row in members}):
            others = [row for row in members if row.source != source]
            value = fit(generation, others) if len(others) >= LEAST_ROWS else None
            with factors(generation, value):
                own = [math.exp(v) - 1 for v in errors([r for r in members if r.source == source])[source]]
            yield Held(generation, source, own, value)


def main() -> None:
    """Refit and print."""
    print(f"{'generation':16s} {'held back':24s} {'rows':>5s} {'median':>7s} {'p90':>7s} {'bias':>7s}  factors")
    found: dict[str, list[float]] = defaultdict(list)
    for held in held_back():
        sizes = [abs(v) for v in held.errors]
        said = "those of no source" if held.factors is None else " ".join(f"{v:.3f}" for v in held.factors)
        print(
            f"{held.generation:16s} {held.source:24s} {len(sizes):5d} {median(sizes):7.1%} {quantile(sizes, 0.9):7.1%} "
            f"{median(held.errors):+7.1%}  {said}"
        )
        found[held.generation] += held.errors
    for generation, own in found.items():
        inverse = [1 / (1 + v) for v in own]
        spread = ", ".join(f"{quantile(inverse, share):.2f}" for share in (0.1, 0.9))
        print(f"{generation:16s} measured over predicted, held back, middle 80 %: ({spread})")
    sizes = [abs(v) for own in found.values() for v in own]
    print(f"all held back: {len(sizes)} rows, median {median(sizes):.1%}, p90 {quantile(sizes, 0.9):.1%}")


if __name__ == "__main__":
    main()
