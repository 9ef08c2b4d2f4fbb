"""Cases that come by turns: a part of them for each change, all of them in `make soak`.

The commit's name says which part, so that a run can be repeated and each part comes by chance; ``SHARDWISE_TESTS_TURN``
says another (a number, or ``all``). Whoever asks for single tests (``file::test``) and says no turn gets them. Cases
whose parameter is ddp or fsdp, which nearly all users run, have no turns.
"""

from __future__ import annotations

import json
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
DEAR_S, DEAR_TURNS, OTHER_TURNS = 0.7, 12, 36
"""A test of ranks, commands or browsers that lasts so long comes with one change in twelve, besides what its marks say.
Marks, and cases inside of a test, divide the turn by factors of 36; this takes other digits of the turn."""
DEAR_FOLDERS = ("tests/world/", "tests/cli/", "tests/faults/", "tests/browser/")
NEVER_DEAR = (
    *("test_effects", "sabotage", "caught", "end_to_end", "test_gradients.py", "test_verify"),
    *("test_serving_pages.py::test_the_sessions", "test_sums_over_parameters_under_zero1"),
)
"""For each change: sabotages of receipts, the gradients of the plain strategies, what each verb does, pages whose
figures are the planner's, which any change to a cost can turn stale, and optimizers that are wrong on a part."""
ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "benchmarks" / "tests" / "durations.json"
COVER = ROOT / "benchmarks" / "tests" / "each_change.json"
"""Tests that come with each change, so that it reaches nearly all that any test does; `tests.cover` writes the list."""
GONE: list[str] = []
"""Tests of the list that were not collected, of files that were collected whole."""
SELECTED, UNCOVERED = "SHARDWISE_TESTS_SELECTED", "uncovered"
"""``all``: every test that is collected runs, and only the cases inside have turns; ``uncovered``: without `COVER`."""
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
    words = (getattr(part, "strategy", part) for part in parts)
    return any(word in FOR_EACH_CHANGE for word in words if isinstance(word, str))


def by_turns(cases: Sequence[Case], of: int, name: str) -> list[Case]:
    """Those of ``cases`` that are ddp or fsdp, and one of ``of`` of the others; for a world that has many cases.

    The test is marked ``turns(1)``, so that `make soak` has all of its cases.
    """
    turn = os.environ.get(VARIABLE, ALL)
    others = [case for case in cases if not for_each_change([case])]
    left_out = [id(case) for index, case in enumerate(others) if not comes(index, of, name, turn)]
    return [case for case in cases if id(case) not in left_out]


def dear(nodes: Iterable[str], durations: dict[str, dict[str, float]]) -> list[str]:
    """Which of ``nodes`` are dear by their recorded seconds, the dearest first."""
    found = {}
    for node in nodes:
        file, _, test = node.partition("::")
        seconds = durations.get(file, {}).get(test, 0.0)
        if seconds >= DEAR_S and file.startswith(DEAR_FOLDERS) and not any(word in node for word in NEVER_DEAR):
            found[node] = seconds
    return sorted(found, key=lambda node: (-found[node], node))


def choose(config: pytest.Config) -> None:
    """Settle the turn of this run, for its workers and ranks too."""
    single = any("::" in word for word in config.args)
    os.environ.setdefault(VARIABLE, ALL if single else of_commit())


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what is marked ``turns(of)``, or is dear, has another turn, and reaches nothing that others do not."""
    seen: Counter[str] = Counter()
    kept, left = [], []
    turn = os.environ[VARIABLE]
    twelfth = turn if turn == ALL else str(int(turn) // OTHER_TURNS)
    selected = os.environ.get(SELECTED, "")
    if selected not in ("", ALL, UNCOVERED):
        raise pytest.UsageError(f"{SELECTED}={selected}: it is {ALL}, {UNCOVERED} or not set")
    if selected == ALL:
        return
    covers = set(json.loads(COVER.read_text())) if COVER.exists() and selected != UNCOVERED else set()
    if not (any("::" in word for word in config.args) or config.option.keyword or config.option.fast):
        there = {item.nodeid for item in items}
        whole = {node.partition("::")[0] for node in there}
        GONE[:] = sorted(node for node in covers - there if node.partition("::")[0] in whole)
    free = [item.nodeid for item in items if not for_each_change(_values(item)) and item.nodeid not in covers]
    late = {
        node
        for index, node in enumerate(dear(free, json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}))
        if not comes(index, DEAR_TURNS, "dear", twelfth)
    }
    for item in items:
        mark, name = item.get_closest_marker("turns"), item.nodeid.partition("[")[0]
        mine = True
        if mark is not None and not for_each_change(_values(item)):
            mine = item.nodeid in covers or comes(seen[name], mark.args[0], name, turn)
            seen[name] += 1
        (kept if mine and item.nodeid not in late else left).append(item)
    if left:
        items[:] = kept
        config.hook.pytest_deselected(items=left)


def _values(item: pytest.Item) -> Iterable[Any]:
    return item.callspec.params.values() if hasattr(item, "callspec") else ()
