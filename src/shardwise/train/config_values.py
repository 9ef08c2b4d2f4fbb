"""Values of a config file: their bounds, and forbidden contents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from shardwise.document import MOST_DEEP, parse_toml

MOST_LR = 1e4  # LSTMs were trained at 30; larger values are mistakes, and soon infinite in fp32
MOST_RANKS = 1024  # of one machine
FIRST_TRACED, MOST_TRACED = 4, 100  # receipts inspect the earlier steps; viewers cannot open a trace of many steps
_NOT_KEPT = {
    "memory": "is gone when a process ends, and ranks do not share it",
    "http": "cannot be written to",
    "https": "cannot be written to",
}

Positive = Annotated[int, Field(ge=1, le=10**12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
Length = Annotated[int, Field(ge=1, le=2**27)]
Few = Annotated[int, Field(ge=1, le=2**16)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0, le=MOST_LR)]


def _named(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; name one")
    return text


def _on_disk(text: str) -> str:
    if _scheme(text):
        raise ValueError(
            f"'{text}' is a URL, and the run folder is on a disk of this machine; give a path here, and "
            f'checkpoint.folder="{text}" to store checkpoints there'
        )
    return text


def _kept(text: str) -> str:
    why = _NOT_KEPT.get(_scheme(text))
    if why is not None:
        raise ValueError(f"'{text}' {why}; give a path, or a URL such as s3://bucket/run")
    return text


def _scheme(text: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    return found[1].lower() if found else ""


Named = Annotated[str, AfterValidator(_named)]
RunFolder = Annotated[Named, AfterValidator(_on_disk)]
CheckpointFolder = Annotated[Named, AfterValidator(_kept)]


def profile_steps(text: str) -> tuple[int, int]:
    """Parse ``STEP`` or ``STEP:COUNT`` into the first step and the number of steps.

    Raises:
        ValueError: malformed, or a number is out of range.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None:
        raise ValueError(f"'profile' is '{text}': it must be STEP or STEP:COUNT, such as '20' or '20:3'")
    first, count = int(found[1]), int(found[2] or 1)
    if first < FIRST_TRACED:
        raise ValueError(
            f"'profile' begins at step {first}: steps before {FIRST_TRACED} warm up and are checked by the "
            f"receipts; begin at {FIRST_TRACED} or later"
        )
    if not 1 <= count <= MOST_TRACED:
        raise ValueError(f"'profile' asks for {count} steps; a trace has 1 to {MOST_TRACED}")
    return first, count


def unfit_values(data: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each value that the file system or the ranks would not get as written.

    A factory's arguments have no types that would refuse a date or an infinity.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            yield from unfit_values(value, f"{where}.{key}" if where else str(key))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from unfit_values(value, f"{where}.{number}")
    elif isinstance(data, str) and "\0" in data:
        yield f"{where}: got {data!r:.80}; it must be text without a NUL, which no name of a file or a function has"
    elif isinstance(data, str) and not _utf8(data):
        yield f"{where}: got {data!r:.80}; it must be text in UTF-8"
    elif ".kwargs." in where:
        if isinstance(data, date | datetime | time):
            yield f"{where}: got the date {data}, which ranks would get as text; put it in quotes"
        elif isinstance(data, float) and not math.isfinite(data):
            yield f"{where}: got {data}; it must be a finite number"


def _utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def apply_override(data: dict[str, Any], item: str) -> str | None:
    """Apply one ``table.key=value`` to ``data``; return the problem, if any."""
    key, equals, value = item.partition("=")
    *tables, name = key.strip().split(".")
    if not equals or not tables or not all([*tables, name]):
        return f"override '{item}' is not table.key=value, such as train.steps=20"
    try:
        parsed, *more = parse_toml(f"value = {value}").values()
    except ValueError:
        more, parsed = [], value
    if more:  # a line break in the value started another key
        parsed = value
    if len(tables) > MOST_DEEP:
        return f"override '{item:.40}...' names a table in {len(tables) - 1} others; {MOST_DEEP} is the most"
    inner = data
    for depth, table in enumerate(tables, 1):
        inner = inner.setdefault(table, {})
        if not isinstance(inner, dict):
            return f"override '{item}': '{'.'.join(tables[:depth])}' is not a table in the config file"
    inner[name] = parsed
    return None
