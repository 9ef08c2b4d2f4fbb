"""Paths in a config: the folder or file that one means, and which files of a folder are meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from shardwise.errors import DataError

_SYSTEM = (Path("/proc"), Path("/sys"))


def place_of(text: str, where: str) -> Path:
    """The path that ``text`` means, ``~`` being a home; ``where`` begins the message.

    Raises:
        DataError: it can be none, or nobody may look at it.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError:  # ~ of a user that is not there
        raise DataError(f"{where}: there is no home folder of that user; give the whole path") from None
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}; give another path") from None
    return path


def documents_at(text: str, where: str) -> Path:
    """An existing file or folder of documents.

    Raises:
        DataError: there is none, or it is the whole system, or what the system makes up.
    """
    root = place_of(text, where)
    if not root.exists():
        raise DataError(f"{where} does not exist; give a file or a folder")
    real = root.resolve()
    if real in (Path("/"), Path("/dev")) or any(real.is_relative_to(folder) for folder in _SYSTEM):
        raise DataError(f"{where} is the system's own folder '{real}', not one of documents; give theirs")
    return root


def matches(path: Path, patterns: Iterable[str]) -> bool:
    """Whether a relative path fits a pattern: ``*`` stays in a folder, ``**`` is any number of folders."""

    def fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
        if not pattern or not parts:
            return not parts and all(p == "**" for p in pattern)
        if pattern[0] == "**":
            return fits(parts, pattern[1:]) or fits(parts[1:], pattern)
        return fnmatchcase(parts[0], pattern[0]) and fits(parts[1:], pattern[1:])

    return any(fits(path.parts, _parts(pattern)) for pattern in patterns)


def _parts(pattern: str) -> list[str]:
    """The parts of a pattern; ``**`` after ``**`` means no more, and takes exponential time."""
    return [part for part, same in groupby(pattern.split("/")) for _ in ([0] if part == "**" else same)]
