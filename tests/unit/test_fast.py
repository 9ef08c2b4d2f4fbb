"""What is run while one works: all that is quick, one case of a strategy on two ranks, and nothing long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import fast, ledger

DURATIONS = {"tests/unit/a.py": {"all": 99.0, "test_long": 9.0, "test_at_the_limit": fast.LONG_S, "fixture ranks": 7.0}}


@pytest.mark.parametrize(
    ("node", "fixtures", "runs"),
    [
        ("tests/unit/a.py::test_long", (), False),
        ("tests/unit/a.py::test_at_the_limit", (), True),
        ("tests/unit/a.py::test_new", ("tmp_path",), True),
        ("tests/unit/a.py::test_new", ("tmp_path", "ranks"), False),
        ("tests/unit/b.py::test_long", ("ranks",), True),
        ("tests/world/test_gradients.py::test_gradient_is_that_of_one_process[ddp-2]", (), True),
        ("tests/world/test_gradients.py::test_gradient_is_that_of_one_process[ddp-3]", (), False),
        ("tests/world/test_gradients.py::test_every_pair_is_covered", (), False),
    ],
)
def test_what_is_run_while_one_works(node: str, fixtures: tuple[str, ...], runs: bool) -> None:
    assert fast.chosen(node, fixtures, DURATIONS) == runs


def test_the_ranks_that_are_meant_are_there() -> None:
    folder, test, _ = fast.OF_RANKS
    root = Path(__file__).parents[2]
    assert f"def {test[:-1]}(" in (root / folder / "test_gradients.py").read_text()


def test_what_is_left_out_is_told_and_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = ["tests/unit/a.py::test_long", "tests/unit/a.py::test_new", "tests/world/test_gradients.py::test_other"]
    items: list[Any] = [SimpleNamespace(nodeid=node) for node in nodes]
    (tmp_path / "durations.json").write_text('{"tests/unit/a.py": {"all": 9.0, "test_long": 9.0}}')
    monkeypatch.setattr(fast, "DURATIONS", tmp_path / "durations.json")
    left: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)))
    worker = fast.Fast()
    worker.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == [nodes[1]] and [item.nodeid for item in left] == [nodes[0], nodes[2]]
    config.workeroutput = {}
    worker.pytest_sessionfinish(cast(Any, SimpleNamespace(config=config)))
    whole, said = fast.Fast(), []
    for _ in range(2):  # each worker has collected everything
        whole.pytest_testnodedown(SimpleNamespace(workeroutput=config.workeroutput))
    whole.pytest_terminal_summary(cast(Any, SimpleNamespace(write_line=said.append)))
    assert said == [f"1 test recorded at more than {fast.LONG_S:g} s was left to make test"]


def test_fixtures_that_tests_share_are_recorded_beside_them() -> None:
    told = ledger._told({"test_a": 3.0, "test_quick": 0.01}, {"fixture ranks": 2.5})
    assert told == {"all": 3.0, "test_a": 3.0, "fixture ranks": 2.5}
