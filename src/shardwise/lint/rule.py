"""What a rule is, and the list of all rules."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, Protocol

Kind = Literal["script", "launch file", "config"]
Severity = Literal["error", "warning"]


class Edit(Protocol):
    """A change of a script that keeps its meaning but for the fault."""

    @property
    def place(self) -> tuple[int, int]:
        """Line, and column in bytes of UTF-8, of what is changed."""


@dataclass(frozen=True)
class Fault:
    """One place where a rule speaks; ``text`` is the rule's own where it is empty."""

    line: int
    column: int = 1
    text: str = ""
    edits: tuple[Edit, ...] = ()


Check = Callable[[Any], Iterator[Fault]]
"""Of a `Script`, a `LaunchFile` or a `ConfigDocument`, as the rule's kinds say."""


@dataclass(frozen=True)
class LintRule:
    """One rule: what it is called, what goes wrong, why, and what to do."""

    id: str
    name: str
    kinds: tuple[Kind, ...]
    severity: Severity
    message: str
    why: str
    fix: str
    check: Check


_RULES: dict[str, LintRule] = {}


def rule(
    id: str,
    name: str,
    *,
    message: str,
    why: str,
    fix: str,
    kinds: tuple[Kind, ...] = ("script",),
    severity: Severity = "error",
) -> Callable[[Check], Check]:
    """Register a check: it takes the file that was read, and yields its faults.

    ``error`` is a wrong result, a hang or a crash; ``warning`` is lost time, or a run that is hard to stop or
    to resume.
    """

    def register(check: Check) -> Check:
        if id in _RULES:
            raise ValueError(f"two rules are called {id}")
        _RULES[id] = LintRule(id, name, kinds, severity, _line(message), _line(why), _line(fix), check)
        return check

    return register


def _line(text: str) -> str:
    return " ".join(text.split())


@cache
def all_rules() -> tuple[LintRule, ...]:
    """Return every rule, by id."""
    from shardwise.lint import rules

    for module in pkgutil.iter_modules(rules.__path__):
        import_module(f"{rules.__name__}.{module.name}")
    return tuple(_RULES[id] for id in sorted(_RULES))
