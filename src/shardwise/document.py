"""Read TOML and JSON files of users within size limits, with clear errors."""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.units import bytes_text

MOST_BYTES = {"toml": 1 << 20, "json": 1 << 26}
"""A larger file was given by mistake: weights, a corpus, a log."""

MOST_DEEP = 64
"""Nesting depth of tables and lists; the JSON writer of configs for the ranks stops at 255."""

_NO_WAIT = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a pipe without a writer does not block


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Raises:
        OSError: it cannot be read; ``strerror`` says why. A pipe or a device does not block.
        UnicodeDecodeError: it is not UTF-8 text (a byte order mark is allowed).
        ValueError: it is not TOML, or nested deeper than `MOST_DEEP`.
    """
    return parse_toml(_read(path, "toml"))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text; raises ValueError as `read_toml` does."""
    found: dict[str, Any] = _parsed(tomllib.loads, text)
    return found


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Read a JSON file; raises as `read_toml` does."""
    return _parsed(parse, _read(path, "json"))


def _read(path: Path, kind: str) -> str:
    try:
        file = os.open(path, _NO_WAIT)
    except ValueError as error:  # a NUL
        raise OSError(errno.EINVAL, f"its name is none: {error}") from None
    status = os.fstat(file)
    if stat.S_ISDIR(status.st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with open(file, "rb") as opened:
        if not stat.S_ISREG(status.st_mode):
            what = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device"
            raise OSError(errno.EINVAL, f"it is {what}, not a file")
        data = opened.read(MOST_BYTES[kind] + 1)
    if len(data) > MOST_BYTES[kind]:
        size = max(status.st_size, len(data))
        most = bytes_text(MOST_BYTES[kind])
        raise OSError(errno.EFBIG, f"it has {bytes_text(size)}, and {most} is the most for such a file")
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    """Parse a text with ``parse``; checks the depth without recursion."""
    try:
        found = parse(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEEP} deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's own limit, whose message names a function to call
            raise ValueError("a number in it has thousands of digits") from None
        raise
    level, depth = [found], 0
    while level := [inner for item in level for inner in _inside(item)]:
        depth += 1
        if depth > MOST_DEEP:
            raise ValueError(f"it is nested more than {MOST_DEEP} deep")
    return found


def _inside(item: Any) -> list[Any]:
    inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [value for value in inner if isinstance(value, dict | list)]
