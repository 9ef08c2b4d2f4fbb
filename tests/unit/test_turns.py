"""All cases come round; those of ddp and fsdp are there each time."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import turns
from tests.cover import cover


@pytest.fixture(autouse=True)
def nothing_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.SELECTED, raising=False)
    monkeypatch.setattr(turns, "GONE", [*turns.GONE])


def test_the_commit_says_the_turn() -> None:
    assert turns.of_commit() == turns.of_commit()
    assert int(turns.of_commit()) < 16**8


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_all_come_round_and_ddp_and_fsdp_each_time(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [f"zero{n}" for n in range(10)]
    seen: Counter[str] = Counter()
    for turn in range(of):
        monkeypatch.setenv(turns.VARIABLE, str(turn))
        found = turns.by_turns(["ddp", *others, "fsdp"], of, "a name")
        assert found == turns.by_turns(["ddp", *others, "fsdp"], of, "a name")
        assert found[0] == "ddp" and found[-1] == "fsdp"
        assert len(found) - 2 in (10 // of, -(-10 // of))
        seen.update(found[1:-1])
    assert seen == dict.fromkeys(others, 1)


def test_what_a_case_says_of_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.VARIABLE, "0")
    cases = [SimpleNamespace(strategy=strategy) for strategy in ("fsdp", "hsdp", "zero1")]
    found = turns.by_turns(cases, 2, "a name")
    assert found[0].strategy == "fsdp" and len(found) == 2
    assert turns.for_each_change([2, "ddp"])
    assert turns.for_each_change([("a model", "fsdp", 2, {})])
    assert not turns.for_each_change([["ddp", "fsdp"], "ddp+tp2", 4, None])


def kept(marks: dict[str, int], turn: str, monkeypatch: pytest.MonkeyPatch, file: str = "a.py") -> list[str]:
    """What is left of tests of these names, marked ``turns`` where the number is not 0."""
    monkeypatch.setenv(turns.VARIABLE, turn)
    items: list[Any] = []
    for name, of in marks.items():
        mark = pytest.mark.turns(of).mark if of else None
        items.append(SimpleNamespace(nodeid=f"{file}::{name}", get_closest_marker=lambda _, mark=mark: mark))
        if "[" in name:
            items[-1].callspec = SimpleNamespace(params={"strategy": name.partition("[")[2][:-1], "world": 2})
    config: Any = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)),
        args=["tests"],
        option=SimpleNamespace(keyword="", fast=False),
    )
    left: list[Any] = []
    everything = list(items)
    turns.leave_out(config, items)
    assert {id(item) for item in (*items, *left)} == {id(item) for item in everything}
    return [item.nodeid.partition("::")[2] for item in items]


def test_marked_tests_come_round(monkeypatch: pytest.MonkeyPatch) -> None:
    each = [f"test_each[{name}]" for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "ddp+tp2")]
    marks = {**dict.fromkeys(each, 3), "test_alone": 2, "test_plain": 0, "test_plain[zero1]": 0}
    found = [kept(marks, str(turn), monkeypatch) for turn in range(6)]
    times = Counter(name for names in found for name in names)
    always = {"test_each[ddp]", "test_each[fsdp]", "test_plain", "test_plain[zero1]"}
    assert times == {name: 6 if name in always else 3 if name == "test_alone" else 2 for name in marks}
    assert kept(marks, turns.ALL, monkeypatch) == list(marks)


def test_tests_that_were_recorded_as_long_are_dear() -> None:
    durations = {
        "tests/world/test_a.py": {"all": 99.0, **{f"test_{n}": 3.0 + n for n in range(9)}, "test_quick": 0.5},
        "tests/unit/test_b.py": {"all": 9.0, "test_slow": 9.0},
        "tests/faults/test_effects.py": {"all": 9.0, "test_each_sabotage_is_caught": 9.0},
    }
    nodes = [f"{file}::{test}" for file, tests in durations.items() for test in tests if test != "all"]
    assert turns.dear(nodes, durations) == [f"tests/world/test_a.py::test_{n}" for n in range(8, -1, -1)]


def test_a_dear_test_and_its_cases_have_turns_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a part of the cases inside would never meet the turn of the test around them."""
    recorded = {f"test_each[{name}]": 5.0 for name in ("zero1", "zero2", "hsdp", "ddp")}
    (tmp_path / "durations.json").write_text(json.dumps({"tests/world/a.py": recorded}))
    monkeypatch.setattr(turns, "DURATIONS", tmp_path / "durations.json")
    marks = dict.fromkeys(recorded, 2)
    every = range(2 * turns.DEAR_TURNS * turns.OTHER_TURNS)
    found = [kept(marks, str(turn), monkeypatch, "tests/world/a.py") for turn in every]
    times = Counter(name for names in found for name in names)
    share = len(found) // (2 * turns.DEAR_TURNS)
    assert times == {**dict.fromkeys(recorded, share), "test_each[ddp]": len(found)}


def test_what_the_cover_names_comes_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "durations.json").write_text(json.dumps({"tests/world/a.py": {"test_dear": 5.0, "test_dearer": 6.0}}))
    monkeypatch.setattr(turns, "DURATIONS", tmp_path / "durations.json")
    marks = {"test_dear": 0, "test_dearer": 0, "test_two[zero1]": 2, "test_two[zero2]": 2}
    named = {"test_dear", "test_two[zero2]"}
    (tmp_path / "cover.json").write_text(json.dumps([f"tests/world/a.py::{name}" for name in named]))
    monkeypatch.setattr(turns, "COVER", tmp_path / "cover.json")
    every = range(2 * turns.DEAR_TURNS * turns.OTHER_TURNS)
    found = [set(kept(marks, str(turn), monkeypatch, "tests/world/a.py")) for turn in every]
    assert set.intersection(*found) == named
    assert not turns.GONE
    kept({"test_renamed": 0}, "1", monkeypatch, "tests/world/a.py")
    assert set(turns.GONE) == {f"tests/world/a.py::{name}" for name in named}
    monkeypatch.setenv(turns.SELECTED, turns.ALL)
    assert kept(marks, "1", monkeypatch, "tests/world/a.py") == list(marks)
    monkeypatch.setenv(turns.SELECTED, turns.UNCOVERED)
    assert not set.intersection(*(set(kept(marks, str(turn), monkeypatch, "tests/world/a.py")) for turn in every))


def test_an_unknown_selection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.SELECTED, "uncoverd")
    with pytest.raises(pytest.UsageError, match="it is all, uncovered or not set"):
        kept({"test_alone": 0}, "1", monkeypatch)


def test_a_cover_is_the_cheapest_that_reaches_all_that_any_test_does() -> None:
    places = {"always": {1, 2}, "broad": {2, 3, 4}, "dear": {3, 4}, "alone": {5}, "nothing new": {1}}
    seconds = {"always": 1.0, "broad": 1.0, "dear": 9.0, "alone": 4.5, "nothing new": 3.0}
    assert cover(places, seconds, {"always"}) == ["alone", "broad", "nothing new"], "the last one is a cheap second"
    assert cover(places, seconds | {"alone": 5.0}, {"always"}) == ["broad", "nothing new"], "not worth its seconds"
    assert cover(places, seconds | {"nothing new": 3.1}, {"always"}) == ["alone", "broad"]
    assert cover(places, seconds | {"broad": 10.0}, {"always"}) == ["alone", "dear", "nothing new"]


def test_the_cover_names_tests_that_there_are() -> None:
    """A renamed test or case would come seldom, silently."""
    what = f"rename it in {turns.COVER.name}, or write the list anew with tests.cover"
    assert not turns.GONE, f"{turns.GONE}: {what}"
    for node in json.loads(turns.COVER.read_text()):
        file, _, test = node.partition("::")
        name = test.partition("[")[0].rpartition("::")[2]
        assert (turns.ROOT / file).exists() and f"def {name}(" in (turns.ROOT / file).read_text(), f"{node}: {what}"


def test_a_test_whose_cases_have_turns_is_found_by_the_soak() -> None:
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        text = file.read_text()
        assert "by_turns(" not in text or "mark.turns(" in text or "mark.soak" in text or file == Path(__file__), file


def test_whoever_asks_for_a_test_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, all_of_them = ["tests/unit/test_turns.py::test_alone"], ["tests"]
    for said, words, turn in (
        ("7", all_of_them, "7"),
        ("7", one, "7"),
        (None, one, turns.ALL),
        (None, all_of_them, turns.of_commit()),
    ):
        monkeypatch.delenv(turns.VARIABLE, raising=False)
        if said is not None:
            monkeypatch.setenv(turns.VARIABLE, said)
        turns.choose(cast(Any, SimpleNamespace(args=words)))
        assert os.environ[turns.VARIABLE] == turn
