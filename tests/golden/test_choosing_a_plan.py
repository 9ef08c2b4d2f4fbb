"""``docs/choosing-a-plan.md`` shows what the planner says today."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts import script


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    return script("rules", "rules/rules.py")


def test_the_tables_are_the_planners(rules: ModuleType) -> None:
    """After a change of the cost model: python benchmarks/rules/rules.py --write"""
    text = rules.DOCUMENT.read_text()
    assert rules.filled(text) == text


def test_seven_billion_need_112_gb(rules: ModuleType) -> None:
    held, _ = rules.state_gb(rules.nominal(7e9), "ddp", 1)
    assert held == pytest.approx(112, abs=0.01)


def test_sharding_divides(rules: ModuleType) -> None:
    model = rules.nominal(7.5e9)
    for strategy, expected in (("ddp", 120), ("zero1", 60 + 60 / 64), ("fsdp", 120 / 64)):
        held, _ = rules.state_gb(model, strategy, 64)
        assert held == pytest.approx(expected, rel=0.02), strategy


def test_a_table_without_a_place_is_an_error(rules: ModuleType) -> None:
    with pytest.raises(SystemExit, match="'sixteen' has 0 places"):
        rules.filled("no tables")
