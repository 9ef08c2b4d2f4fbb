"""``make soak``: the kills of `test_kill_and_resume` for as long as one likes, in settings and at moments of the clock.

``SOAK_KILLS`` (500) or ``SOAK_MINUTES`` says how long, ``SOAK_SEED`` repeats a soak's settings and aims. Ends with 1 at
the first run that differs from one that was never interrupted.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.units import seconds_text
from tests.faults.kills import AIMS, Setting, Trial, draw, run_whole, said, write_texts

KILLS_OF_A_RUN = 12
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "zero2+offload", "fsdp+offload", "hsdp+offload")


@dataclass
class Progress:
    """How far the soak is: by kills or, where ``minutes`` are given, by the clock."""

    kills: int
    minutes: float | None
    started: float = field(default_factory=time.monotonic)
    done: Counter[str] = field(default_factory=Counter)

    @property
    def number(self) -> int:
        """Kills so far."""
        return self.done.total()

    @property
    def over(self) -> bool:
        """Whether it is enough."""
        if self.minutes is None:
            return self.number >= self.kills
        return time.monotonic() - self.started >= 60 * self.minutes

    def line(self) -> str:
        """Kills, rate and what is left."""
        spent = time.monotonic() - self.started
        rate = self.number / spent
        if self.minutes is None:
            left, of = (self.kills - self.number) / rate if rate else float("inf"), f" of {self.kills}"
        else:
            left, of = max(0.0, 60 * self.minutes - spent), ""
        return f"{self.number}{of} kills, {60 * rate:.0f} a minute, {seconds_text(left)} left"


def any_setting(rng_state: random.Random) -> Setting:
    """Something that a user might run."""
    strategy = rng_state.choice(STRATEGIES)
    world = rng_state.choice((2, 4)) if strategy.startswith("hsdp") else rng_state.randint(1, 4)
    return Setting(
        strategy,
        world,
        async_save=rng_state.random() < 0.5,
        every=rng_state.randint(1, 4),
        keep=rng_state.randint(1, 3),
        micro_batch=rng_state.choice((1, 2, 4)),
        pack=rng_state.random() < 0.5,
    )


def soak(seed: int, progress: Progress, folder: Path) -> None:
    """Kill runs in ever new settings until ``progress`` is over.

    Raises:
        AssertionError: a run differs from its like that was not interrupted; says the seed, the setting and the kill.
    """
    rng_state = random.Random(seed)
    texts = write_texts(folder / "texts")
    deck = [call for call, number in AIMS.items() for _ in range(number)]
    while not progress.over:
        setting = any_setting(rng_state)
        here = Path(tempfile.mkdtemp(dir=folder))
        with said(f"seed {seed}, {setting}"):
            full = run_whole(here / "whole", texts, replace(setting, async_save=False))
            trial = Trial(here / "killed", texts, setting, full)
            for _ in range(KILLS_OF_A_RUN):
                kill = draw(rng_state, full, rng_state.choice(deck))
                with said(f"{kill}"):
                    before = trial.done.copy()
                    trial.kill(kill)
                    progress.done += trial.done - before
                if progress.over:
                    break
            trial.end()
        print(f"{progress.line()}: {setting}: {trial.ended} runs ended, all as the whole one", flush=True)


def main() -> int:
    """The command; returns the exit code."""
    minutes = os.environ.get("SOAK_MINUTES")
    progress = Progress(int(os.environ.get("SOAK_KILLS", "500")), None if minutes is None else float(minutes))
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() // 1_000_000))
    print(f"seed {seed}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            soak(seed, progress, Path(folder))
    except AssertionError as error:
        print(f"FAILED after {progress.number} kills: {error}", file=sys.stderr)
        return 1
    width = max(map(len, progress.done), default=0)
    for what, number in sorted(progress.done.items()):
        print(f"  {what.ljust(width)}  {number:4}")
    print(f"{progress.number} kills, every resume bit-identical (seed {seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
