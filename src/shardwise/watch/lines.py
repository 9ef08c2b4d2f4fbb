"""Which line of a stack to name: the user's own, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")
_OURS = "/shardwise/"
Line = TypeVar("Line")


def telling_line(stack: Sequence[Line], file_of: Callable[[Line], str]) -> Line | None:
    """Return the innermost line of the user's code, else of Shardwise, else of all. Innermost is last."""
    own = [line for line in stack if not any(part in file_of(line) for part in _LIBRARIES)]
    users = [line for line in own if _OURS not in file_of(line)]
    return next((lines[-1] for lines in (users, own, stack) if lines), None)
