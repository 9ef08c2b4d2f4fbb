"""Cases that come by turns: a part of them for each change, all of them in `make soak`.

The commit says which part, so that a run can be repeated and all parts come round; ``SHARDWISE_TESTS_TURN`` says
another (a number, or ``all``). Whoever asks for single tests (``file::test``) and says no turn gets them. ddp and fsdp,
which nearly all users run, have no turns.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

VARIABLE, ALL = "SHARDWISE_TESTS_TURN", "all"
FOR_EACH_CHANGE = ("ddp", "fsdp")
Case = TypeVar("Case")


def of_commit() -> str:
    """The turn that the commit says: eight hexadecimal digits of its name, as a number; 0 where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        name = "0"
    return str(int(name[:8], 16))


def comes(index: int, of: int, name: str, turn: str) -> bool:
    """Whether the ``index``-th of the cases called ``name`` is one of those of this ``turn``: one of ``of`` is.

    Where cases are a product, the length of its last axis is to have no divisor in common with ``of``.
    """
    return turn == ALL or (index + zlib.crc32(name.encode()) + int(turn)) % of == 0


def for_each_change(values: Iterable[Any]) -> bool:
    """Whether one of a case's parameters, or a part of a tuple, says that it has no turn."""
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return any(getattr(part, "strategy", part) in FOR_EACH_CHANGE for part in parts if not isinstance(part, list))


def by_turns(cases: Sequence[Case], of: int, name: str) -> list[Case]:
    """Those of ``cases`` that are ddp or fsdp, and one of ``of`` of the others; for a world that has many cases.

    The test is marked ``turns(1)``: it runs for each change, and with all of its cases in `make soak`.
    """
    turn = os.environ.get(VARIABLE, ALL)
    others = [case for case in cases if not for_each_change([case])]
    left_out = [id(case) for index, case in enumerate(others) if not comes(index, of, name, turn)]
    return [case for case in cases if id(case) not in left_out]


def choose(config: pytest.Config) -> None:
    """Settle the turn of this run, for its workers and ranks too."""
    single = any("::" in word for word in config.args)
    os.environ.setdefault(VARIABLE, ALL if single else of_commit())


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what is marked ``turns(of)`` and has another turn."""
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        mark, name = item.get_closest_marker("turns"), item.nodeid.partition("[")[0]
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if mark is None or for_each_change(values):
            kept.append(item)
            continue
        (kept if comes(seen[name], mark.args[0], name, os.environ[VARIABLE]) else left).append(item)
        seen[name] += 1
    if left:
        items[:] = kept
        config.hook.pytest_deselected(items=left)
