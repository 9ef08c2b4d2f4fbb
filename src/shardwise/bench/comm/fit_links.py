"""Fit of latency and bandwidth to a ladder of sizes: seconds = latency + bytes / bandwidth.

The model is that of Hockney 1994, with bus bytes. Real ladders bend in between, where a protocol or a cache changes,
and a single least-squares line would be pulled by the bend. So each end is fitted separately: the bandwidth is the
median slope over the largest sizes (Theil and Sen), the latency is the smallest sizes' time beyond their bytes. The
error of the line in between is reported as ``misfit``; predictions use the measured curve and not the line. Intervals
are a bootstrap over the rounds: they do not include changes between times of day.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from shardwise.measure.comm_facts import CommFit, CommSamples

TOP = 8.0  # sizes that take at least an eighth of the largest one's time determine the bandwidth
ABOVE = 2.0  # and at least twice the smallest one's time, else they are dominated by latency
SMALL = 0.2  # sizes whose bytes take at most a fifth of their time determine the latency
MOST_SMALL = 5
RESAMPLES = 400
SEED = 20
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
"""Half a 95 % interval in standard errors, by degrees of freedom (Student; 1.96 for many)."""

Floats = npt.NDArray[np.float64]


def fit(samples: CommSamples) -> CommFit:
    """Fit the medians; None for a value that too few sizes determine."""
    wire = np.array(samples.sizes_bytes, dtype=np.float64) * samples.factor
    rounds = np.array(samples.samples_s, dtype=np.float64)
    medians = np.median(rounds, axis=1)
    latency, rate = _line(wire, medians)
    found, turns = _bootstrap(wire, rounds), rounds.shape[1]
    misfit = None
    if latency is not None and rate is not None:
        misfit = float(np.max(np.abs((latency + wire / rate) / medians - 1.0)))
    return CommFit(
        latency_s=latency,
        latency_interval_s=None if latency is None else _interval(latency, [one for one, _ in found], turns),
        bus_bytes_per_s=rate,
        bus_interval_bytes_per_s=None if rate is None else _interval(rate, [one for _, one in found], turns),
        misfit=misfit,
    )


def _line(wire: Floats, seconds: Floats) -> tuple[float | None, float | None]:
    """Latency and bus bytes/s of one set of medians."""
    top = (seconds >= seconds[-1] / TOP) & (seconds >= ABOVE * seconds.min()) & (wire > wire[-1] / (4 * TOP))
    rate = _slope(wire[top], seconds[top])
    if rate is None:
        flat = seconds[:MOST_SMALL]
        near = flat[flat <= flat.min() * (1 + SMALL)]
        return (float(np.median(near)) if len(near) > 1 else None), None
    rest = seconds - wire / rate
    small = np.flatnonzero(wire / rate <= SMALL * seconds)[:MOST_SMALL]
    return (max(0.0, float(np.median(rest[small]))) if len(small) else None), rate


def _slope(wire: Floats, seconds: Floats) -> float | None:
    """Median of bytes/s between any two points, weighted by their distance; None for too few."""
    if len(wire) < 2:
        return None
    first, second = _pairs(len(wire))
    longer, more = seconds[second] - seconds[first], wire[second] - wire[first]
    order = np.argsort(longer / more)
    heavy = np.cumsum(more[order])
    middle = order[int(np.searchsorted(heavy, heavy[-1] / 2))]
    return float(more[middle] / longer[middle]) if longer[middle] > 0 else None


@cache
def _pairs(points: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices of any two points, asked for by each resample."""
    first, second = np.triu_indices(points, k=1)
    return first, second


def _bootstrap(wire: Floats, rounds: Floats) -> list[tuple[float | None, float | None]]:
    """Fit medians of resampled rounds; empty if there are too few rounds."""
    if rounds.shape[1] < 3:
        return []
    random = np.random.default_rng(SEED)
    picks = random.integers(0, rounds.shape[1], size=(RESAMPLES, *rounds.shape))
    drawn = np.median(np.take_along_axis(np.broadcast_to(rounds, picks.shape), picks, axis=2), axis=2)
    return [_line(wire, medians) for medians in drawn]


def _interval(middle: float, values: Sequence[float | None], rounds: int) -> tuple[float, float] | None:
    """Middle 95 % of fits around ``middle``, widened where they are drawn from few rounds.

    A bootstrap of n values is as narrow as if their scatter were known: of 3 rounds it contains the true value in 8
    cases of 10. So its ends are moved outwards by Student's factor, in logarithms, as neither latency nor bandwidth can
    be below 0.
    """
    known = [value for value in values if value is not None]
    if len(known) < RESAMPLES // 2:
        return None
    low, high = np.percentile(known, [2.5, 97.5])
    if min(low, middle) <= 0:
        return float(low), float(high)
    wider = STUDENT.get(rounds - 1, 2.0 + 2.3 / rounds) / 1.96
    ends = (middle * (end / middle) ** wider for end in (min(low, middle), max(high, middle)))
    return float(next(ends)), float(next(ends))
