"""`Check`: one thing that was looked at, what was found, and the fix. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Level = Literal["ok", "warning", "error", "unknown"]


class Check(BaseModel):
    """``name`` is stable and for programs. ``text`` is what was found, with the reason why it matters where it does.

    ``warning``: it costs speed or will fail under some conditions. ``error``: a run as asked for cannot work, or would
    be wrong. ``unknown``: it could not be looked at, and ``text`` says why; nothing is claimed. ``evidence`` has the
    numbers behind it, ``host`` is set where several machines were looked at.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    level: Level
    text: str
    fix: str = ""
    evidence: tuple[str, ...] = ()
    host: str | None = None


def ok(name: str, text: str, *evidence: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name=name, level="ok", text=text, evidence=evidence)


def warning(name: str, text: str, fix: str, *evidence: str) -> Check:
    """A check that found what costs speed, or may fail."""
    return Check(name=name, level="warning", text=text, fix=fix, evidence=evidence)


def error(name: str, text: str, fix: str, *evidence: str) -> Check:
    """A check that found what cannot work."""
    return Check(name=name, level="error", text=text, fix=fix, evidence=evidence)


def unknown(name: str, text: str, fix: str = "") -> Check:
    """A check that could not be made."""
    return Check(name=name, level="unknown", text=text, fix=fix)


def worst(checks: list[Check], fine: Check) -> list[Check]:
    """What was found wrong, or ``fine`` where that is nothing."""
    return checks or [fine]
