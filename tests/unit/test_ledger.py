"""A file that starts many more ranks or processes than it did is told so; one that starts a few more is not."""

from __future__ import annotations

import json
from pathlib import Path

from tests import ledger

BUDGETS = {"a.py": {"ranks": 40, "processes": 2}}


def test_what_is_beyond_a_budget() -> None:
    assert not ledger.over("a.py", {"ranks": 58, "processes": 10}, BUDGETS)
    assert "59 ranks where 40 are its budget" in ledger.over("a.py", {"ranks": 59, "processes": 10}, BUDGETS)
    assert "11 processes where 2" in ledger.over("a.py", {"ranks": 0, "processes": 11}, BUDGETS)
    assert "9 ranks where 0" in ledger.over("new.py", {"ranks": 9, "processes": 0}, BUDGETS)


def test_polls_do_not_count() -> None:
    """The same question again and again, as a slow machine asks it, is no process of the file's."""
    file = ledger._running["file"]
    before = ledger.counted(file)["processes"]
    ledger.spent("processes")
    with ledger.uncounted():
        ledger.spent("processes", 100)
    assert ledger.counted(file)["processes"] == before + 1


def test_every_recorded_file_is_there() -> None:
    root = Path(__file__).parents[2]
    for kept in (ledger.BUDGETS, ledger.DURATIONS):
        missing = [file for file in json.loads(kept.read_text()) if not (root / file).exists()]
        assert not missing, f"{kept.name} tells of {missing}; pytest --record takes them out"
