"""Measurements of ``bench comm``: axes, samples, fits, and nccl-tests' bandwidths. No torch.

Sizes are those of nccl-tests (PERFORMANCE.md there): the full tensor of an all_reduce, the gathered total of an
all_gather, the unreduced total of a reduce_scatter, one rank's buffer of an all_to_all, the message of a send.
*Algorithm bandwidth* is size over seconds. *Bus bandwidth* is that times a factor which makes it comparable with the
link: 2 (n − 1) / n of all_reduce, (n − 1) / n of all_gather, reduce_scatter and all_to_all, 1 of send.
"""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import BaseModel, ConfigDict

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def bus_factor(collective: Collective, ranks: int) -> float:
    """Return bus over algorithm bandwidth of a group of ``ranks``."""
    if collective == "send":
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


class Axis(BaseModel):
    """Axis of the mesh: its groups of global ranks, which work concurrently, and their nodes."""

    model_config = ConfigDict(frozen=True)

    name: str
    groups: tuple[tuple[int, ...], ...]
    per_node: int
    where: Literal["node", "network"]

    @property
    def ranks(self) -> int:
        """Number of ranks in a group."""
        return len(self.groups[0])


class CommSamples(BaseModel):
    """Seconds of one ``collective`` on ``axis``: per size, each round's slowest rank.

    For a send, one sample is half a round trip between the first and the last rank of a group, and ``where`` is that
    pair's. ``group_s`` is the median of each of the axis's groups at the largest size. Sizes that would not have
    fitted into the time are in ``left_out_bytes``.
    """

    model_config = ConfigDict(frozen=True)

    collective: Collective
    axis: str
    where: Literal["node", "network"]
    ranks: int
    per_node: int
    groups: tuple[tuple[int, ...], ...]
    sizes_bytes: tuple[int, ...]
    samples_s: tuple[tuple[float, ...], ...]
    group_s: tuple[float, ...] = ()
    left_out_bytes: tuple[int, ...] = ()

    @property
    def median_s(self) -> tuple[float, ...]:
        """Median seconds of each size."""
        return tuple(statistics.median(row) for row in self.samples_s)

    @property
    def factor(self) -> float:
        """Bus over algorithm bandwidth."""
        return bus_factor(self.collective, self.ranks)

    @property
    def algorithm_bytes_per_s(self) -> tuple[float, ...]:
        """Algorithm bandwidth of each size, from the median."""
        return tuple(size / seconds for size, seconds in zip(self.sizes_bytes, self.median_s, strict=True))

    @property
    def bus_bytes_per_s(self) -> tuple[float, ...]:
        """Bus bandwidth of each size, from the median."""
        return tuple(rate * self.factor for rate in self.algorithm_bytes_per_s)


class CommFit(BaseModel):
    """Latency and bus bandwidth of one collective, with 95 % intervals; None if not identified.

    ``misfit`` is the largest relative error of ``latency + bus bytes / bandwidth`` against a measured median.
    """

    model_config = ConfigDict(frozen=True)

    latency_s: float | None = None
    latency_interval_s: tuple[float, float] | None = None
    bus_bytes_per_s: float | None = None
    bus_interval_bytes_per_s: tuple[float, float] | None = None
    misfit: float | None = None


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """Return powers of two times ``smallest``, ending with ``largest``."""
    sizes = [smallest]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    if sizes[-1] != largest:
        sizes.append(largest)
    return tuple(sizes)


def fitting_sizes(sizes: tuple[int, ...], ranks: int, width: int = 4) -> tuple[int, ...]:
    """Round sizes to full elements of ``width`` bytes for each of ``ranks``, at least one."""
    full = ranks * width
    return tuple(dict.fromkeys(max(full, size // full * full) for size in sizes))
