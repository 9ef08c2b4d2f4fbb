"""The pipeline bubble as it is: the share of a step in which a stage computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import BaseModel, ConfigDict
from torch import nn

from shardwise.cost.pipeline import bubble_fraction
from shardwise.measure.plain import Batch
from shardwise.parallel.group import Ranks
from shardwise.plan.plan import PipelineSchedule, Plan
from shardwise.train.config import Config

MICRO_BATCHES = (1, 2, 4, 8, 16)
SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved-1f1b")


class BubbleSamples(BaseModel):
    """Idle shares of the steps that were watched, over all stages, for one schedule and number of micro batches."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    schedule: str
    stages: int
    virtual: int
    micro_batches: int
    shares: tuple[float, ...]

    @property
    def formula(self) -> float:
        """What equal stages without transfers idle: (p - 1) / (v · m + p - 1)."""
        return bubble_fraction(self.stages, self.micro_batches, self.virtual)

    def quantile(self, share: float) -> float:
        """A quantile of the shares."""
        ordered = sorted(self.shares)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bench_bubble(
    config: Config,
    plan: Plan,
    factory: Callable[[], nn.Module],
    windows: Callable[[Plan], Iterator[list[Batch]]],
    ranks: Ranks,
    steps: int,
) -> list[BubbleSamples]:
    """Later."""
    return []
