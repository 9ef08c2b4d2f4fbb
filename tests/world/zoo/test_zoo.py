"""Every model of the zoo under every strategy: right, or refused by name, and nothing else."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.turns import by_turns
from tests.world.zoo.case import CASES
from tests.world.zoo.harness import GOOD, Trial, column, known, run, trials_of
from tests.world.zoo.models import LATER
from tests.world.zoo.page import PAGE, page

NAMES = [name for name in CASES if name not in LATER]
CHUNK = 40


def test_the_zoo_is_large_and_its_table_whole() -> None:
    assert len(NAMES) >= 150
    assert set(LATER) <= set(CASES)
    assert list(known()) == NAMES
    assert {verdict.split(":")[0] for row in known().values() for verdict in row.values()} <= set(GOOD)


def check(trials: list[Trial]) -> None:
    """Each verdict is a good one, and the one that the table has."""
    found = run(trials)
    wrong = {str(trial): verdict for trial, verdict in found.items() if not verdict.startswith(GOOD)}
    assert wrong == {}
    expected = {str(trial): known()[trial.case][column(trial)] for trial in found}
    assert {str(trial): verdict for trial, verdict in found.items()} == expected


def for_each_change(trial: Trial) -> bool:
    return trial.strategy in ("ddp", "fsdp") and trial.world == 2


def trials(at: int, world: int) -> list[Trial]:
    names = NAMES[at : at + CHUNK]
    return [trial for trial in trials_of(list(CASES)) if trial.case in names and trial.world == world]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("at", range(0, len(NAMES), CHUNK))
def test_each_model_is_right_or_refused(at: int, world: int) -> None:
    """ddp and fsdp of a third of the models, and of the rest a ninth, by turns; `make soak` has all."""
    names = by_turns(NAMES[at : at + CHUNK], 3, f"models {at}")
    found = [trial for trial in trials(at, world) if for_each_change(trial) and trial.case in names]
    others = [astuple(trial) for trial in trials(at, world) if not for_each_change(trial)]
    check(found + [Trial(*trial) for trial in by_turns(others, 9, f"{at} {world}")])


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("at", range(0, len(NAMES), CHUNK))
def test_each_model_under_each_strategy(at: int, world: int) -> None:
    check(trials(at, world))


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), "write it with: python -m tests.world.zoo.page --write"
