"""Resolve paths in a config: a folder or file, and the files selected in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from shardwise.errors import DataError

_SYSTEM = (Path("/proc"), Path("/sys"))


def place_of(text: str, where: str) -> Path:
    """Resolve ``text`` to a path, with ``~`` as the home folder; ``where`` begins the message.

    Raises:
        DataError: it is not a valid path, or permission is denied.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError:  # ~ of an unknown user
        raise DataError(f"{where}: that user has no home folder; give the full path") from None
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}; give another path") from None
    return path


def documents_at(text: str, where: str) -> Path:
    """Return an existing file or folder of documents.

    Raises:
        DataError: there is none, or it is the root or a virtual file system.
    """
    root = place_of(text, where)
    if not root.exists():
        raise DataError(f"{where} does not exist; give a file or a folder")
    real = root.resolve()
    if real in (Path("/"), Path("/dev")) or any(real.is_relative_to(folder) for folder in _SYSTEM):
        raise DataError(f"{where} is the system's own folder '{real}', not one of documents; give theirs")
    return root


def matches(path: Path, patterns: Iterable[str]) -> bool:
    """Return whether a relative path fits a pattern: ``*`` within a folder, ``**`` across."""

    def fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
        if not pattern or not parts:
            return not parts and all(p == "**" for p in pattern)
        if pattern[0] == "**":
            return fits(parts, pattern[1:]) or fits(parts[1:], pattern)
        return fnmatchcase(parts[0], pattern[0]) and fits(parts[1:], pattern[1:])

    return any(fits(path.parts, _parts(pattern)) for pattern in patterns)


def _parts(pattern: str) -> list[str]:
    """Split a pattern.

    Repeated ``**`` are merged, as they mean the same and take exponential time.
    """
    return [part for part, same in groupby(pattern.split("/")) for _ in ([0] if part == "**" else same)]
