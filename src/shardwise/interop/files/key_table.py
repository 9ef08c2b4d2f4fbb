"""Tables of another tool's keys, and what becomes of each key of a file: taken, not taken, without effect, or refused.

A table maps a key to a rule, which puts the key into one list of a `Reading`. A key without a rule is refused, so none
is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import did_you_mean
from shardwise.interop.deepspeed.optimizer_section import FileKey

EMPTY = "is empty, as if it were left out"


@dataclass
class Reading:
    """What became of the keys of a file of ``tool``.

    ``keys`` are those of a config (``table.key``), ``plan`` fields of a plan; ``ranks`` is what the file says of them.
    ``means`` are lines where the file does something else than it seems to say.
    """

    tool: str
    taken: list[FileKey] = field(default_factory=list)
    not_taken: list[FileKey] = field(default_factory=list)
    no_effect: list[FileKey] = field(default_factory=list)
    open: list[FileKey] = field(default_factory=list)
    means: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    ranks: int | None = None

    def put(self, target: str, value: Any) -> None:
        """Set a key of the config, or ``plan.FIELD``."""
        table, _, name = target.partition(".")
        if table == "plan":
            self.plan[name] = value
        else:
            self.keys[target] = value

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Refuse a value."""
        self.problems.append(f"{key} is {value!r:.60}: {why}")


Rule = Callable[[Reading, str, Any], None]
Rules = Mapping[str, Rule]


def takes(target: str, convert: Callable[[Any], Any] | None = None) -> Rule:
    """Take a value as a key of the config, or as ``plan.FIELD``; ``convert`` raises `ValueError` with the reason."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        try:
            reading.put(target, value if convert is None else convert(value))
        except (ValueError, TypeError) as error:
            reading.refuse(key, value, str(error))
            return
        reading.taken.append(FileKey(key, value, target.removeprefix("plan.")))

    return rule


def part_of(what: str) -> Rule:
    """Take a value that the tool's `finish` turns into ``what``, together with others."""
    return lambda reading, key, value: reading.taken.append(FileKey(key, value, what))


def idle(why: str) -> Rule:
    """Leave out a value without effect on what is computed."""
    return lambda reading, key, value: reading.no_effect.append(FileKey(key, value, why))


def left_out(why: str) -> Rule:
    """Leave out a value that has an effect there and none here; falsy ones have none there either."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        rows = reading.not_taken if value else reading.no_effect
        rows.append(FileKey(key, value, why if value else "off"))

    return rule


def to_set(why: str) -> Rule:
    """Leave a value to the user."""
    return lambda reading, key, value: reading.open.append(FileKey(key, value, why))


def refused(why: str, *off: Any) -> Rule:
    """Refuse a value, unless it is one of ``off`` (by default a falsy one)."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        if value in off if off else not value:
            reading.no_effect.append(FileKey(key, value, "off"))
        else:
            reading.refuse(key, value, why)

    return rule


def inner(rules: Rules, *, refuse_unknown: bool = True) -> Rule:
    """Read a table in a table."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        if value == {}:
            reading.no_effect.append(FileKey(key, value, EMPTY))
        elif isinstance(value, Mapping):
            read_keys(reading, value, rules, f"{key}.", refuse_unknown=refuse_unknown)
        else:
            reading.refuse(key, value, "must be a table")

    return rule


def group(make: Callable[[str], Rule], reasons: Mapping[str, str]) -> dict[str, Rule]:
    """Return rules for many keys: ``reasons`` are whys → keys, separated by spaces."""
    return {key: make(why) for why, keys in reasons.items() for key in keys.split()}


def read_keys(
    reading: Reading, values: Mapping[str, Any], rules: Rules, prefix: str = "", *, refuse_unknown: bool = True
) -> None:
    """Put each key of ``values`` into one list of ``reading``."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in rules:
            if refuse_unknown:
                hint = did_you_mean(str(name), rules)
                reading.problems.append(f"{key}: {reading.tool} has no such key{hint}; correct it or remove it")
            continue
        if value is None:
            reading.no_effect.append(FileKey(key, "", EMPTY))
        else:
            try:
                rules[name](reading, key, value)
            except (ValueError, TypeError, AttributeError) as error:
                reading.refuse(key, value, str(error))


def number(value: Any) -> float:
    """Return a number, also from text such as ``1e-4``, which YAML 1.1 reads as text.

    Raises:
        ValueError: it is not one.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("must be a number") from None


def whole(value: Any) -> int:
    """Return a whole number of 1 or more.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(value, bool) or number(value) != int(number(value)) or number(value) < 1:
        raise ValueError("must be a whole number of 1 or more")
    return int(number(value))


def count(value: Any) -> int:
    """Return a whole number of 0 or more.

    Raises:
        ValueError: it is not one.
    """
    return 0 if value == 0 and not isinstance(value, bool) else whole(value)
