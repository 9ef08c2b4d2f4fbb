"""How often the interval of a step time holds for a source that it was made without.

    .venv/bin/python benchmarks/accuracy/coverage.py

The interval of a generation is the middle 80 % of measured over predicted, each source counting the same, `WIDER` on
both sides; where fewer than two other sources have the generation, that of all generations. Each source and generation
in turn is left out and asked. `Generation.spread` is this interval with every source in, and where a comment beside it
says so, another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from rows import load_rows
from speed import Timed, predict

from shardwise.hardware.gpus import generation_of

WIDER = 1.05
LEAST_SOURCES = 2
Key = tuple[str, str]  # source, generation


def ratios(timed: Iterable[Timed]) -> dict[Key, list[float]]:
    """Measured over predicted, by source (of two versions of a page as one) and generation."""
    found: dict[Key, list[float]] = defaultdict(list)
    for one in timed:
        generation = "" if one.row.cluster.gpu is None else generation_of(one.row.cluster.gpu) or ""
        found[one.row.source.removesuffix("_history"), generation].append(one.measured_s / one.predicted.step_s)
    return found


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """10th and 90th percentile, every group with the same weight, and wider."""
    points = sorted((value, 1.0 / len(group)) for group in groups for value in group)

    def at(share: float) -> float:
        seen = 0.0
        for value, weight in points:
            seen += weight
            if seen >= share * len(groups):
                return value
        return points[-1][0]

    return at(0.1) / WIDER, at(0.9) * WIDER


def left_out(found: dict[Key, list[float]]) -> dict[Key, tuple[float, float, float]]:
    """Of each source and generation: the interval made without the source, and the share of rows that it covers."""
    out = {}
    for key, own in found.items():
        others = {other: values for other, values in found.items() if other[0] != key[0]}
        same = [values for other, values in others.items() if other[1] == key[1]]
        low, high = interval(same if len(same) >= LEAST_SOURCES else list(others.values()))
        out[key] = low, high, fmean(low <= value <= high for value in own)
    return out


def main() -> None:
    """Print each source, the mean, and the intervals with every source in."""
    found = ratios(predict(load_rows())[0])
    shares = left_out(found)
    for (source, generation), (low, high, share) in sorted(shares.items()):
        print(f"{source:22s} {generation:16s} {len(found[source, generation]):4d} ({low:.2f}, {high:.2f}) {share:5.0%}")
    print(f"mean of {len(shares)}: {fmean(share for *_, share in shares.values()):.1%}")
    for generation in sorted({key[1] for key in found}):
        low, high = interval([values for key, values in found.items() if key[1] == generation])
        print(f"{generation:16s} ({low:.2f}, {high:.2f})")


if __name__ == "__main__":
    main()
