"""`Check`: one checked item, the result, and the fix. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Level = Literal["ok", "warning", "error", "unknown"]


class Check(BaseModel):
    """Result of one check.

    ``name`` is stable and for programs. ``text`` is the result, with the reason why it matters. ``warning``: it costs
    speed or will fail under some conditions. ``error``: the requested run cannot work, or would be wrong. ``unknown``:
    it could not be checked, for the reason in ``text``. ``evidence`` has the numbers behind it, ``host`` is set where
    several machines were checked.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    level: Level
    text: str
    fix: str = ""
    evidence: tuple[str, ...] = ()
    host: str | None = None


def ok(name: str, text: str, *evidence: str) -> Check:
    """Build a passed check."""
    return Check(name=name, level="ok", text=text, evidence=evidence)


def warning(name: str, text: str, fix: str, *evidence: str) -> Check:
    """Build a check that costs speed, or may fail."""
    return Check(name=name, level="warning", text=text, fix=fix, evidence=evidence)


def error(name: str, text: str, fix: str, *evidence: str) -> Check:
    """Build a check that cannot work."""
    return Check(name=name, level="error", text=text, fix=fix, evidence=evidence)


def unknown(name: str, text: str, fix: str = "") -> Check:
    """Build a check that could not be made."""
    return Check(name=name, level="unknown", text=text, fix=fix)


def worst(checks: list[Check], fine: Check) -> list[Check]:
    """Return the problems, or ``fine`` where there are none."""
    return checks or [fine]
