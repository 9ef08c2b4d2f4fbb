"""Assign contiguous blocks to pipeline stages with the least maximum cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from shardwise.plan.plan import Plan


def balanced_stages(blocks: Sequence[float], before: float, after: float, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, at least one.

    ``blocks`` are costs in any one unit (floating-point operations of a forward), ``before`` the extra cost of the
    first stage (the embedding) and ``after`` that of the last one (the head). Among the splits with the least maximum
    cost, it takes the one with the smallest sum of squares; among equal ones that with more blocks in the first stages.

    Raises:
        ValueError: fewer blocks than stages.
    """
    number = len(blocks)
    if not 1 <= stages <= number:
        raise ValueError(f"{number} blocks cannot be {stages} stages")
    sums = [0.0]
    for cost in blocks:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    least, extra = divmod(number, stages)
    even = [0]
    for stage in range(stages):
        even.append(even[-1] + least + (stage < extra))
    dearest_even = max(cost_of(stage, even[stage], even[stage + 1]) for stage in range(stages))
    limit = dearest_even * (1 + 1e-6)  # of a stage: a split with a dearer one is worse than the even one
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(stages):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        ends = range(stage + 1, number - (stages - stage - 1) + 1) if stage < stages - 1 else (number,)
        for end in ends:
            for start, (dearest, squares, counts) in best[stage].items():
                if start >= end:
                    continue
                cost = cost_of(stage, start, end)
                if cost > limit:
                    continue
                found = (max(dearest, cost), squares + cost * cost, (*counts, end - start))
                known = row.get(end)
                if known is None or _better(found, known):
                    row[end] = found
        best.append(row)
    return best[stages][number][2]


def _better(one: tuple[float, float, tuple[int, ...]], other: tuple[float, float, tuple[int, ...]]) -> bool:
    """Return whether ``one`` is the better split, up to rounding."""
    for a, b in zip(one[:2], other[:2], strict=True):
        if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
            return a < b
    return one[2] > other[2]


def even_stages(number: int, block: float, before: float, after: float, stages: int) -> tuple[int, ...]:
    """Return `balanced_stages` of ``number`` blocks of equal cost ``block``, in microseconds.

    Each block is assigned to the least expensive stage so far, the first of equal ones: this gives the least maximum
    and the smallest sum of squares.

    Raises:
        ValueError: fewer blocks than stages.
    """
    if not 1 <= stages <= number:
        raise ValueError(f"{number} blocks cannot be {stages} stages")
    counts = [1] * stages
    if block <= 0:
        return balanced_stages([block] * number, before, after, stages)
    extra = {0: before / block}
    extra[stages - 1] = extra.get(stages - 1, 0.0) + after / block
    loads = [(round(1 + extra.get(stage, 0.0), 9), stage) for stage in range(stages)]
    heapq.heapify(loads)
    for _ in range(number - stages):
        load, stage = loads[0]
        counts[stage] += 1
        heapq.heapreplace(loads, (round(load + 1, 9), stage))
    return tuple(counts)


def longest_stage(plan: Plan, num_blocks: int) -> int:
    """Return the number of blocks of the longest stage; where the plan has none yet, of an even split."""
    return max(plan.stage_blocks or (math.ceil(num_blocks / (plan.dims.pp * plan.virtual_stages)),))
