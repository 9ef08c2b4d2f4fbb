"""``docs/what-tutorials-say.md`` has the planner's figures and verdicts of today."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts import script


@pytest.fixture(scope="module")
def tutorials() -> ModuleType:
    return script("tutorials", "tutorials/tutorials.py")


def test_the_page_is_the_planners(tutorials: ModuleType) -> None:
    """After a change of the cost model: python benchmarks/tutorials/tutorials.py --write"""
    assert tutorials.page() == tutorials.PAGE.read_text()


def test_each_claim_has_a_verdict(tutorials: ModuleType) -> None:
    sections = tutorials.PAGE.read_text().split("\n## ")[1:-1]
    assert len(sections) == len(tutorials.CLAIMS) >= 8
    for section in sections:
        assert "\n| " in section and any(f"**{word}" in section for word in ("True", "False", "Half true", "16 and 18"))


def test_a_verdict_follows_its_figures(tutorials: ModuleType) -> None:
    rows, found = tutorials.fitting(tutorials.SMALL, "8xB200", ("ddp",), 512)
    assert found["ddp"].fits and "| yes |" in rows
    assert tutorials.verdict(True, "a", "b") == "**True**: a"
    assert tutorials.verdict(False, "a", "b") == "**False**: b"
