"""Parts of a step on the page: colours, order, and families."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.measure.step_time.timing import BETWEEN, NAMES, PHASES, Timing

FAMILIES = {
    "computing": ("forward", "backward", "recompute", "clip", "optimizer"),
    "exposed communication": ("exposed_dp", "exposed_tp", "exposed_cp", "pipeline", "control"),
    "waiting for slowest rank": ("slowest_rank",),
    "data": ("data", "transfer"),
    "the loop's own code": ("other",),
}
"""Families of parts for a summary sentence; every part is in one of them."""
ORDER = tuple(part for family in FAMILIES.values() for part in family)
"""Stack order from bottom to top: compute first, waiting on top of it."""


def words(part: str) -> str:
    """Return a part's title; an unknown part keeps its name."""
    return NAMES.get(part, part)


def colour(part: str) -> str:
    """Return the style sheet variable of a part's colour."""
    return f"p-{part}" if part in PHASES or part in BETWEEN else "p-other"


def ordered(parts: Mapping[str, object]) -> list[str]:
    """Order the present parts as in the stack; unknown ones last."""
    return [part for part in ORDER if part in parts] + [part for part in parts if part not in ORDER]


def families(timing: Timing) -> list[tuple[str, float]]:
    """Sum seconds of a step by family, largest first; empty families are left out."""
    sums = {name: sum(timing.seconds(part) for part in parts) for name, parts in FAMILIES.items()}
    return sorted(((name, value) for name, value in sums.items() if value > 0), key=lambda item: -item[1])
