"""Seconds of pipeline schedules, including the stages' waits for each other.

1F1B is simulated event by event where that is cheap, and otherwise estimated from its asymptote: exact for equal stages
without transfers, within some percent of the simulation for others. Interleaved 1F1B with ``v`` chunks a stage uses the
same asymptote with its fill and drain divided by ``v`` (Narayanan 2021, arXiv 2104.04473, section 2.2). Not modelled:
zero-bubble schedules, and sends that delay each other on one link.
"""

from __future__ import annotations

from collections.abc import Sequence

SIMULATED_EVENTS = 160  # stages × micro batches up to which 1F1B is simulated


def bubble_fraction(stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Bubble of equal stages under 1F1B without transfer time: (p − 1) / (v · m + p − 1)."""
    return (stages - 1) / (virtual * micro_batches + stages - 1)


def in_flight(stage: int, stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Peak number of micro batches in flight on stage ``stage`` (from 0), in full-stage units.

    1F1B has ``p − stage``. Interleaved has ``2 (p − stage − 1) + (v − 1) p + 1`` chunks of ``1 / v`` of the stage.
    """
    if virtual == 1:
        return float(min(micro_batches, stages - stage))
    chunks = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(micro_batches * virtual, chunks) / virtual


def blocks_per_stage(blocks: int, stages: int) -> tuple[int, ...]:
    """Distribute blocks evenly; missing ones are taken from the last stage, then from the first.

    The last stage also has the head and the first the embedding, so they get fewer blocks.
    """
    least, extra = divmod(blocks, stages)
    counts = [least] * stages
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for stage in order[:extra]:
        counts[stage] += 1
    return tuple(counts)


def simulate_1f1b(forward: Sequence[float], backward: Sequence[float], send_s: float, micro_batches: int) -> float:
    """Simulate the seconds from the first forward to the last backward, event by event.

    ``forward`` and ``backward`` are seconds of one micro batch on each stage; ``send_s`` is one transfer to a
    neighbour, which occupies no stage but delays its receiver.
    """
    stages = len(forward)
    ready_f = [[0.0] * micro_batches for _ in range(stages)]
    ready_b = [[0.0] * micro_batches for _ in range(stages)]
    known_f = [micro_batches if stage == 0 else 0 for stage in range(stages)]
    known_b = [0] * stages
    done_f, done_b, clock = [0] * stages, [0] * stages, [0.0] * stages
    warm = [min(micro_batches, stages - stage - 1) for stage in range(stages)]
    left, stage, step = 2 * stages * micro_batches, 0, 1
    while left:
        moved = True
        while moved:
            moved = False
            f, b = done_f[stage], done_b[stage]
            if f < micro_batches and f - b <= warm[stage]:
                if f < known_f[stage]:
                    clock[stage] = max(clock[stage], ready_f[stage][f]) + forward[stage]
                    done_f[stage] += 1
                    if stage + 1 < stages:
                        ready_f[stage + 1][f] = clock[stage] + send_s
                        known_f[stage + 1] += 1
                    else:
                        ready_b[stage][f] = clock[stage]
                        known_b[stage] += 1
                    left, moved = left - 1, True
            elif b < known_b[stage]:
                clock[stage] = max(clock[stage], ready_b[stage][b]) + backward[stage]
                done_b[stage] += 1
                if stage:
                    ready_b[stage - 1][b] = clock[stage] + send_s
                    known_b[stage - 1] += 1
                left, moved = left - 1, True
        if not 0 <= stage + step < stages:
            step = -step
        stage += step if stages > 1 else 0
    return max(clock)


def pipeline_s(
    forward: Sequence[float], backward: Sequence[float], send_s: float, micro_batches: int, virtual: int = 1
) -> float:
    """Seconds of all micro batches through all stages.

    With ``virtual`` chunks, times are still those of full stages. The asymptote is the slowest stage's work and its
    waits: for the first micro batch to reach it and for the last to leave, for its first backward (warm-up forwards
    fill some of that), between backwards of the drain that the stages behind deliver at their pace, and for transfers
    in the steady state (see `_period`).
    """
    stages = len(forward)
    if stages == 1:
        return micro_batches * (forward[0] + backward[0])
    if virtual == 1 and stages * micro_batches <= SIMULATED_EVENTS:
        return simulate_1f1b(forward, backward, send_s, micro_batches)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    slow = max(range(stages), key=both.__getitem__)
    behind = stages - 1 - slow
    warm = min(behind, micro_batches - 1)
    before = sum(both[:slow]) + 2 * slow * send_s * virtual
    after = sum(both[slow + 1 :]) + 2 * behind * send_s * virtual
    first = max(0.0, after - warm * forward[slow])
    drain = warm * max(0.0, max(both[slow + 1 :], default=0.0) - backward[slow])
    waits = (micro_batches - 1) * (_period(both, send_s * virtual) - both[slow])
    return micro_batches * both[slow] + waits + (before + first + drain) / virtual


def _period(both: Sequence[float], send_s: float) -> float:
    """Seconds between two micro batches in the steady state.

    A micro batch goes forward and comes back over any window of ``w`` stages, and 1F1B keeps ``w`` of them in transit
    there: the mean over the window bounds the rate. Windows from the slowest stage outwards decide.
    """
    slowest = max(range(len(both)), key=both.__getitem__)
    low = high = slowest
    total = best = both[slowest]
    while low > 0 or high < len(both) - 1:
        left = both[low - 1] if low > 0 else -1.0
        right = both[high + 1] if high < len(both) - 1 else -1.0
        if left > right:
            low, total = low - 1, total + left
        else:
            high, total = high + 1, total + right
        width = high - low + 1
        best = max(best, (total + 2 * send_s * (width - 1)) / width)
    return best
