"""Severity of a time loss: share of a step, price, and reporting thresholds. No torch here.

All thresholds of diagnosis are defined here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.diagnosis.finding import Finding, Kind, Level
from shardwise.diagnosis.observed import Observed
from shardwise.measure.step_time.timing import Timing
from shardwise.units import money_text, number_text

ALARM = 0.10
"""A cause with at least this share of a step is an alarm."""
HINT = 0.05
"""A cause with at least this share is a hint."""
HEAVY = 0.30
"""Exposed collectives and pipeline bubbles below this share are normal: a hint at most."""
CROWD = 0.20
"""With one core per rank, waits for a core up to this share are normal: the sending threads need cores, too."""
FLOOR_S = 1e-3
"""Less than this in a step is never reported, whatever its share: it is clock noise in short steps."""
SLOW_LINK = 0.5
"""A link below this share of its expected rate is slow; 70 to 95 % of data sheets are reached."""
SLOW_GLOO = 0.25
"""The same for gloo, whose sends and copies share the cores with the computation."""
GLOO_BYTES_PER_S = 1e9
"""Gloo's rate on an idle unlimited link between two network namespaces (measured: 7.8 Gbit/s on two cores). No more is
expected of a faster interface."""
STEADY = 0.6
"""A rank that is last in this share of the steps is persistently late."""
MIN_STEPS = 5
"""Minimum number of steps after the warm-up."""
CHANCE_STEPS = 200
"""A loss that stands at chance for so many steps is reported; warm-ups of the learning rate are as long."""
AT_CHANCE = 0.02
"""A loss this close to ln(vocabulary), as a share of it, is at chance."""
RISE = 1.05
"""A loss that ends above its beginning by this factor rises; less is noise."""
RISE_LINES = 20
"""Minimum number of logged losses to judge whether the loss rises."""

SPIKES = 3
"""Loss spikes that a finding lists; ``metrics.jsonl`` has all."""
SAMPLES = 8
"""Samples of a replica that it lists."""
LOST = 3
"""Steps that a finding of lost gradients lists; ``metrics.jsonl`` has all."""
NAMES = 6
"""Parameters that it lists of each."""


@dataclass(frozen=True)
class Case:
    """Run under diagnosis. Seconds are always per step."""

    observed: Observed

    @property
    def timing(self) -> Timing:
        """Time breakdown of the run."""
        return self.observed.timing

    @property
    def whole_s(self) -> float:
        """Seconds of a step, including its share of the time between steps."""
        return self.timing.whole_s

    def share(self, seconds: float) -> float:
        """Share of the step."""
        return seconds / self.whole_s if self.whole_s else 0.0

    def level(self, seconds: float, alarm: float = ALARM) -> Level | None:
        """Return the level at which a loss is reported; ``None``: not at all."""
        share = self.share(seconds)
        if seconds < FLOOR_S or share < HINT:
            return None
        return "alarm" if share >= alarm else "hint"

    def money(self, seconds: float) -> float | None:
        """US dollars an hour of all devices spent on these seconds."""
        price = self.observed.price
        return None if price is None else price * self.timing.world_size * self.share(seconds)

    def finding(
        self,
        kind: Kind,
        level: Level,
        text: str,
        *,
        seconds: float | None,
        evidence: Iterable[str] = (),
        fix: str = "",
        rank: int | None = None,
    ) -> Finding:
        """Build a finding with its cost."""
        money = None if seconds is None else self.money(seconds)
        source = self.observed.price_from
        each = f"{money_text(self.observed.price)} an hour of a device: {source}"
        price = [] if money is None or not source else [each]
        return Finding(
            kind=kind,
            level=level,
            text=text,
            evidence=(*evidence, *price),
            fix=fix,
            seconds=seconds,
            share=None if seconds is None else self.share(seconds),
            money=money,
            rank=rank,
        )

    def of_step(self, seconds: float) -> str:
        """Format ``30.2 ms of a step of 82.1 ms (37 %)``."""
        return f"{span(seconds)} of a step of {span(self.whole_s)} ({percent(self.share(seconds))})"


def span(seconds: float) -> str:
    """Format ``30.2 ms``, ``1.20 s``: three digits, for comparison."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"


def percent(share: float) -> str:
    """Format ``37 %``, and ``0.4 %`` where it is small."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.02 else f"{share * 100:.1f} %"


def rate(bytes_per_s: float) -> str:
    """Format ``1.25 GB/s (10 Gbit/s)``; bits are the usual unit of links."""
    bits = bytes_per_s * 8
    sold = f"{number_text(bits / 1e9)} Gbit/s" if bits >= 1e9 else f"{number_text(bits / 1e6)} Mbit/s"
    size, name = (1e9, "GB/s") if bytes_per_s >= 1e9 else (1e6, "MB/s")
    return f"{number_text(bytes_per_s / size)} {name} ({sold})"


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ``rank 3`` or ``ranks 0, 2``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
