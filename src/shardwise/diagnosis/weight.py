"""What a loss of time weighs: its share of a step, its price, and from when on it is said. No torch here.

The thresholds of diagnosis stand here, all of them, so that there are few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.diagnosis.finding import Finding, Kind, Level
from shardwise.diagnosis.observed import Observed
from shardwise.measure.step_time.timing import Timing

ALARM = 0.10
"""From this share of a step on, time that a cause takes is an alarm."""
HINT = 0.05
"""From this share on it is worth a word."""
HEAVY = 0.30
"""Waiting for collectives, or for a pipeline's ends, is normal up to here: below it is a hint at most."""
CROWD = 0.20
"""Ranks that are as many as the cores all wait for one up to here: the threads that send need some, too."""
FLOOR_S = 1e-3
"""Less than this in a step is never said, whatever its share: a clock's noise in small steps."""
SLOW_LINK = 0.5
"""A link that carries less than this part of what it should is slow; data sheets are reached to 70 to 95 %."""
SLOW_GLOO = 0.25
"""The same for gloo, whose sends and copies take turns with the computation on the cores."""
GLOO_BYTES_PER_S = 1e9
"""What gloo gets out of an unhindered link between two network namespaces with nothing else to do (measured: 7.8 Gbit/s
on two cores): of a faster interface no more is expected."""
STEADY = 0.6
"""A rank that came last in this share of the steps is late by habit, not by chance."""
MIN_STEPS = 5
"""Fewer steps than this after the warm-up are not judged."""


@dataclass(frozen=True)
class Case:
    """One run that is judged. Seconds are always a step's."""

    observed: Observed

    @property
    def timing(self) -> Timing:
        """Where its time went."""
        return self.observed.timing

    @property
    def whole_s(self) -> float:
        """Seconds of a step with its part of what lies between steps."""
        return self.timing.step_s + sum(self.timing.between_s.values())

    def share(self, seconds: float) -> float:
        """A part of the whole."""
        return seconds / self.whole_s if self.whole_s else 0.0

    def level(self, seconds: float, alarm: float = ALARM) -> Level | None:
        """How loud a loss is said; ``None``: not at all."""
        share = self.share(seconds)
        if seconds < FLOOR_S or share < HINT:
            return None
        return "alarm" if share >= alarm else "hint"

    def money(self, seconds: float) -> float | None:
        """US dollars an hour of all devices that go into these seconds."""
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
        """A finding with its cost worked out."""
        money = None if seconds is None else self.money(seconds)
        source = self.observed.price_from
        price = [] if money is None or not source else [f"${self.observed.price:.2f} an hour of a device: {source}"]
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
        """``30.2 ms of a step of 82.1 ms (37 %)``."""
        return f"{span(seconds)} of a step of {span(self.whole_s)} ({percent(self.share(seconds))})"


def span(seconds: float) -> str:
    """``30.2 ms``, ``1.20 s``: three digits, as causes are compared with each other."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"


def percent(share: float) -> str:
    """``37 %``, and ``0.4 %`` where it is small."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.02 else f"{share * 100:.1f} %"


def rate(bytes_per_s: float) -> str:
    """``1.25 GB/s (10 Gbit/s)``; the bits for links, which are sold by them."""
    bits = bytes_per_s * 8
    sold = f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
    size, name = (1e9, "GB/s") if bytes_per_s >= 1e9 else (1e6, "MB/s")
    return f"{bytes_per_s / size:.3g} {name} ({sold})"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 2``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
