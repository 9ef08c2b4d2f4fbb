"""Metrics as JSON lines: what a dead run left behind is cut back to where the new one starts."""

from __future__ import annotations

import json

import pytest

from shardwise.train.metrics import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, after=0):
    file = MetricsFile(path, after)
    for step in steps:
        file.write(step=step, loss=1 / step)
    file.close()


def steps_of(path):
    return [line["step"] for line in read_metrics(path)]


def test_lines_come_back_as_they_were(path):
    file = MetricsFile(path, 0)
    file.write(step=1, loss=0.1 + 0.2, grad_norm=None, name="Ünïcode\nline")
    file.write(step=1, heldout_bits_per_byte=2.5)
    file.close()
    assert list(read_metrics(path)) == [
        {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None, "name": "Ünïcode\nline"},
        {"step": 1, "heldout_bits_per_byte": 2.5},
    ]
    assert len(path.read_text().splitlines()) == 2


def test_a_line_is_on_disk_at_once(path):
    file = MetricsFile(path, 0)
    file.write(step=1)
    assert json.loads(path.read_text()) == {"step": 1}
    file.close()


@pytest.mark.parametrize(("after", "kept"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3, 4])])
def test_a_resumed_run_cuts_off_what_came_after_its_checkpoint(path, after, kept):
    write(path, [1, 2, 3, 4])
    write(path, [], after)
    assert steps_of(path) == kept
    write(path, [7], after)
    assert steps_of(path) == [*kept, 7]


def test_a_line_that_a_crash_cut_short_is_left_out(path):
    write(path, [1, 2, 3])
    path.write_text(path.read_text()[:-6])
    assert steps_of(path) == [1, 2]
    write(path, [3], after=2)
    assert steps_of(path) == [1, 2, 3], "the torn line does not run into the next one"


def test_without_a_file_there_is_nothing_and_a_new_one_is_made(path):
    assert list(read_metrics(path)) == []
    write(path, [])
    assert path.read_text() == ""


def test_nothing_but_the_file_is_left_in_the_folder(path):
    write(path, [1, 2])
    write(path, [3], after=2)
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]
