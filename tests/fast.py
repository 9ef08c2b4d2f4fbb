"""`pytest --fast`, what one runs while working: units and messages, and one case of a strategy on two real ranks.

Tests that were recorded as long, or that use a fixture which was, are left to `make test`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from tests.turns import DURATIONS

LONG_S = 0.25
OF_RANKS = ("tests/world/", "test_gradient_is_that_of_one_process[", "-2]")


def seconds(node: str, fixtures: Collection[str], durations: dict[str, dict[str, float]]) -> float:
    """What a test was recorded to take, or the longest of its fixtures; 0 for a new one."""
    file, _, test = node.partition("::")
    recorded = durations.get(file, {})
    return max(recorded.get(name, 0.0) for name in (test, *(f"fixture {name}" for name in fixtures)))


def chosen(node: str, fixtures: Collection[str], durations: dict[str, dict[str, float]]) -> bool:
    """Whether a test is run while one works."""
    folder, test, ranks = OF_RANKS
    if node.startswith(folder):
        return test in node and node.endswith(ranks)
    return seconds(node, fixtures, durations) <= LONG_S


class Fast:
    """The plugin."""

    def __init__(self) -> None:
        self.left = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        durations = json.loads(DURATIONS.read_text())
        kept = [item for item in items if chosen(item.nodeid, getattr(item, "fixturenames", ()), durations)]
        ids = set(map(id, kept))
        left = [item for item in items if id(item) not in ids]
        self.left = sum(not item.nodeid.startswith(OF_RANKS[0]) for item in left)
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left"] = self.left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left = max(self.left, getattr(node, "workeroutput", {}).get("left", 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        what, were = ("test", "was") if self.left == 1 else ("tests", "were")
        terminalreporter.write_line(f"{self.left} {what} recorded at more than {LONG_S:g} s {were} left to make test")
