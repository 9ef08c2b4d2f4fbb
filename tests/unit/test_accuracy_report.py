"""The accuracy report: its rows are all read, its figures are right, and the page says what the results say."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "accuracy"
RESULTS = HERE / "results"


def script(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def tables():
    return script("tables")


@pytest.fixture(scope="module")
def targets():
    return script("targets")


@pytest.fixture(scope="module")
def rows():
    return script("rows")


@pytest.fixture(scope="module")
def run():
    return script("run")


@pytest.fixture(scope="module")
def documents(targets):
    return targets.read_results()


def memory_row(source="a", error=None, outcome="ran", kind="reserved", fits=True, framework="x", label="one"):
    return {
        "source": source,
        "framework": framework,
        "label": label,
        "kind": kind,
        "outcome": outcome,
        "measured_bytes": 100,
        "predicted_bytes": None if error is None else round(100 * (1 + error)),
        "error": error,
        "untold_error": error,
        "fits": fits,
        "untold_fits": fits,
        "device_bytes": 90,
        "untold_device_bytes": 90,
        "limit_bytes": 100,
    }


def test_every_published_row_is_read(rows):
    with rows.DATA.open(newline="") as file:
        records = list(csv.DictReader(file))
    loaded, out = rows.load_rows(), rows.records_left_out()
    assert len(loaded) + len(out) == len(records) > 1200
    assert {one["reason"] for one in out} <= {"shape not stated"}
    assert sum(row.plan.dims.ep > 1 for row in loaded) >= 12
    assert len(out) <= 0.01 * len(records)
    assert {row.source for row in loaded} == {record["source"] for record in records}
    assert sum(row.oom for row in loaded) == sum(record["status"] == "oom" for record in records) > 0
    assert sum(row.step_time_s is not None for row in loaded) >= 1000


def test_errors_by_hand(targets):
    found = targets.Errors.of([0.1, -0.2, 0.05, -0.4, 0.0])
    assert (found.rows, found.median, found.worst, found.bias) == (5, 0.1, -0.4, 0.0)
    assert found.p90 == pytest.approx(0.2 + 0.6 * 0.2)  # 0.9 × 4 = 3.6: between the fourth and the fifth
    assert targets.Errors.of([]) is None


def test_halving_is_as_far_off_as_doubling(targets):
    order = targets.worst_first([{"error": e} for e in (0.5, None, -0.45, 1.0, -0.55)])
    assert [one["error"] for one in order] == [-0.55, 1.0, -0.45, 0.5, None]


def test_a_sign_is_systematic_only_where_chance_would_not_do_it(targets):
    assert targets.sign_chance([0.01] * 5 + [-0.01] * 5) == 1.0
    assert targets.sign_chance([-0.01] * 10) == pytest.approx(2 / 1024)
    assert targets.sign_chance([-0.01, 0.01, *[-1e-5] * 50]) == 1.0, "what is equal but for noise has no sign"
    assert targets.sign_chance([]) == 1.0


def test_memory_is_judged_by_hand(targets):
    rows = [
        memory_row(error=0.05),
        memory_row(error=-0.07),
        memory_row(error=0.20),
        memory_row(error=0.9, kind="device"),  # the driver's figure is not the allocator's
        memory_row(kind="fits", fits=False),
        memory_row(kind="fits", fits=None),  # device memory unknown: refused by nobody
        memory_row(kind="oom", outcome="oom", fits=False),
        memory_row(kind="oom", outcome="oom", fits=True),
    ]
    found = {one.what: (one.found, one.ok) for one in targets.memory_targets(rows)}
    assert found["published memory, told: median error (3 rows)"] == ("7.0 %", True)
    assert found["published OOM rows called “fits”, told"] == ("1 of 2", False)
    assert found["rows that ran called “does not fit”, told"] == ("1 of 6 (16.7 %)", False)
    worse = targets.memory_targets([memory_row(error=0.081), *rows[6:7]])
    assert [one.ok for one in worse[:2]] == [False, True]


def test_the_choice_and_what_it_costs_by_hand(targets):
    plans = (("a", 2.0, 1.1, 3.0, 1.0), ("b", 1.0, 1.2, 2.0, 2.0), ("c", 4.0, 9.0, 1.0, 3.0))
    names = ("label", "measured_s", "predicted_s", "untold_s", "rule")
    found = targets.choose([dict(zip(names, plan, strict=True)) for plan in plans])
    assert (found["chosen"], found["best"], found["plans"]) == ("a", "b", 3)
    assert (found["model"], found["untold"], found["rule"]) == (1.0, 3.0, 1.0)
    assert found["random"] == pytest.approx(7 / 3 - 1)


def test_speed_is_judged_by_hand(targets):
    def row(source, framework, error, null):
        errors = {"error": error, "untold_error": 2 * error, "null_error": null}
        return {"source": source, "framework": framework} | errors

    rows = [
        *[row("m", "Megatron-LM", e, n) for e, n in ((0.04, 0.1), (-0.05, -0.12), (0.3, 0.2))],
        *[row("n", "NeMo 24", e, n) for e, n in ((0.04, 0.05), (0.04, 0.05))],
        *[row("t", "torchtitan", e, 0.0) for e in (0.2, 0.2)],
    ]
    groups = [{"model": value, "untold": value / 2} for value in (0.0, 0.0, 0.03, 0.16)]
    found = {one.what: (one.found, one.ok) for one in targets.speed_targets(rows, groups)}
    assert found["step time, told, all rows: median error (7 rows)"] == ("5.0 %", True)
    assert found["step time, told, without the source that has most: median error (4 rows)"] == ("12.0 %", False)
    assert found["step time, untold, all rows: median error (7 rows)"] == ("10.0 %", True)
    against = "step time against the null model, told, "
    assert found[f"{against}all Megatron-type rows (5 rows)"] == ("4.0 %", True)
    assert found[f"{against}m (3 rows)"] == ("5.0 %", True)
    assert found[f"{against}n (2 rows)"] == ("4.0 %", False)
    assert found["regret of the choice, told, mean of 4 groups"] == ("4.8 %", False)
    assert found["regret of the choice, told, worst of 4 groups"] == ("16.0 %", False)
    assert found["regret of the choice, untold, worst of 4 groups"] == ("8.0 %", True)
    assert found["step time against the null model, untold, all Megatron-type rows (5 rows)"] == ("8.0 %", False)


def test_phases_are_told_apart_by_hand(tables):
    sample = {"predicted": {"1 forward": 90, "2 forward": 110, "2 backward": 50}}
    sample |= {"measured": {"1 forward": 100, "2 forward": 100, "2 backward": 100}}
    found = tables.phase_errors([{"samples": [sample]}, {"errors": {"forward": 0.5}}])
    assert found == {"forward": [pytest.approx(-0.1), pytest.approx(0.1), 0.5], "backward": [-0.5]}


def test_the_page_says_what_the_results_say(tables, documents):
    """After a change of the cost model or of the results: make accuracy."""
    assert (HERE / "README.md").read_text() == tables.render(documents), "stale: run make accuracy"


def test_the_page_would_not_hide_a_change(targets, tables, documents):
    changed = json.loads(json.dumps(documents))
    changed["published_memory"]["rows"][0]["error"] += 1.0
    changed["published_speed"]["rows"][0]["predicted_s"] *= 2
    changed["persistent"]["equal"] -= 1
    before, after = tables.render(documents).splitlines(), tables.render(changed).splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) >= 4
    assert {one.what: one.ok for one in targets.all_targets(changed)}["persistent bytes equal to the byte"] is False


@pytest.mark.parametrize("name", ["published_memory", "published_speed"])
def test_every_row_is_listed_the_worst_first(targets, documents, name):
    recorded = documents[name]["rows"]
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        listed = list(csv.DictReader(file))
    assert listed == [{key: "" if value is None else str(value) for key, value in row.items()} for row in recorded]
    assert recorded == targets.worst_first(recorded)
    for row in recorded:
        sides = [next((row[k] for k in row if k.startswith(word)), None) for word in ("predicted_", "measured_")]
        if row["error"] is not None:
            assert row["error"] == pytest.approx(sides[0] / sides[1] - 1, abs=1e-4), row["label"]


def test_the_plots_are_there_and_small(documents):
    shown = [part.split(")")[0] for part in (HERE / "README.md").read_text().split("](results/")[1:] if ".png" in part]
    names = {name.split(")")[0] for name in shown if name.endswith(".png")}
    assert len(names) >= 7
    for name in names:
        size = (RESULTS / name).stat().st_size
        assert 5_000 < size <= 150 * 1024, name


def test_what_is_written_can_be_read_again(run, tmp_path):
    document = {"schema": 1, "rows": [{"label": "a", "error": None}, {"label": "b", "error": 0.5}], "problems": []}
    run.write_json(tmp_path / "a.json", document)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == document
    assert text.count("\n") == 8, "a line for each row"


def test_a_prediction_that_changed_is_told(run):
    before = {"rows": [memory_row(error=0.1), memory_row(error=0.2), memory_row(kind="fits", label="other")]}
    same = {"rows": [before["rows"][2], memory_row(error=0.2004), memory_row(error=0.1)]}
    assert list(run.changes(before, same)) == []
    moved = {
        "rows": [memory_row(error=0.1), memory_row(error=0.25), memory_row(kind="fits", label="other", fits=False)]
    }
    found = "\n".join(run.changes(before, moved))
    assert "one: error recorded 0.2, now 0.25" in found
    assert "other: fits recorded True, now False" in found
    assert any("only in the record" in line for line in run.changes(before, {"rows": before["rows"][:2]}))


def test_slow_results_keep_their_date_until_they_change(run, monkeypatch, tmp_path):
    monkeypatch.setattr(run.targets, "RESULTS", tmp_path)
    (tmp_path / "persistent.json").write_text("{}")
    first = run.recorded_document({})
    date, mark = first["persistent"].split(" ")
    kept = run.recorded_document({"persistent": f"2001-02-03 {mark}"})
    assert kept["persistent"] == f"2001-02-03 {mark}"
    (tmp_path / "persistent.json").write_text("{ }")
    changed = run.recorded_document({"persistent": f"2001-02-03 {mark}"})
    assert changed["persistent"].split(" ")[0] == date
    assert "cpu_peak" not in changed, "it is not there"
    assert str(HERE) not in sys.path
