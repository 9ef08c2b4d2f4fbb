"""What ``docs/lint-rules.md`` says was shown was, with the fixtures that are here."""

from __future__ import annotations

import json

import pytest

from tests.lint import shown, shown_launches

KEPT = json.loads(shown.KEPT.read_text())


def test_everything_that_a_fixture_promises_was_shown() -> None:
    promised = {id: text.partition(" ")[0] for id, text in shown.showing().items()}
    scripts = promised.keys() - shown_launches.SHOWS.keys()
    needy = {id for id in scripts if "needs" in shown.header(shown.HERE / id / "bad.py")}  # shown where there are GPUs
    kept = {id: one["shows"] for id, one in KEPT["rules"].items()}
    assert len(promised.keys() - needy) >= 82 and promised == {id: promised[id] for id in needy} | kept


@pytest.mark.soak
@pytest.mark.parametrize(("id", "promise"), shown.showing().items(), ids=list(shown.showing()))
def test_a_bad_fixture_shows_its_fault(id: str, promise: str) -> None:
    problem = shown_launches.why_not(id) if id in shown_launches.SHOWS else None
    if problem is not None:
        pytest.skip(problem)
    assert shown.show(id, promise)["shows"] == promise.partition(" ")[0]
