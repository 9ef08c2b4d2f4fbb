"""The history of predicted against measured: kept small, never broken by a broken line, safe beside other runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.environment import history_file
from shardwise.measure import history
from shardwise.measure.history import KEPT_RUNS, MIN_RUNS, device_key, median_step_s, read_history, remember


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "shardwise" / "history.jsonl"


def add(file: Path, **changes: object) -> str:
    run = {"device": "CPU", "base": "fsdp", "world_size": 2, "planned_peak": 100, "found_peak": 110}
    return remember(**{**run, **changes}, file=file)


def test_what_is_remembered_is_read(file):
    assert read_history(file).runs == ()
    assert add(file, planned_step_s=2.0, found_step_s=1.0) == ""
    (run,) = read_history(file).runs
    assert (run.peak_ratio, run.step_ratio) == (1.1, 0.5)
    assert (run.device, run.base, run.world_size) == ("CPU", "fsdp", 2)
    assert run.torch.startswith("2.") and run.shardwise != "unknown"


def test_the_correction_is_the_median_with_its_spread_and_count(file):
    for found in (90, 100, 110, 120, 500):
        add(file, found_peak=found)
    ratio = read_history(file).correction("CPU", "fsdp").peak
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high, ratio.count) == (1.1, 1.0, 1.2, 5)
    assert read_history(file).correction("CPU", "fsdp").step is None


def test_only_runs_alike_correct(file, monkeypatch):
    for _ in range(MIN_RUNS):
        add(file)
    found = read_history(file)
    assert found.correction("CPU", "fsdp").peak is not None
    assert found.correction("CPU", "ddp").peak is None
    assert found.correction("NVIDIA H100 80GB HBM3", "fsdp").peak is None
    monkeypatch.setattr(history, "_versions", lambda: ("9.9", "0.1.0"))
    assert found.correction("CPU", "fsdp").peak is None


def test_few_runs_correct_nothing(file):
    for _ in range(MIN_RUNS - 1):
        add(file)
    assert read_history(file).correction("CPU", "fsdp").peak is None


def test_a_run_without_a_prediction_corrects_nothing(file):
    for _ in range(MIN_RUNS):
        add(file, planned_peak=None, found_step_s=1.0)
    assert len(read_history(file).runs) == MIN_RUNS
    assert read_history(file).correction("CPU", "fsdp") == history.Correction()


def test_a_run_without_a_measurement_is_not_kept(file):
    assert add(file, found_peak=None) == ""
    assert not file.exists()


def test_broken_lines_are_ignored_and_counted(file):
    add(file)
    good = file.read_text()
    future = json.dumps({**json.loads(good), "schema_version": 2}) + "\n"
    nan = good.replace('"found_peak":110', '"found_step_s":NaN')
    file.write_bytes(b"\x00\xff not json\n{}\n[]\n\n" + (future + nan + good).encode() + b'{"time_s": 1')
    found = read_history(file)
    assert (len(found.runs), found.ignored_lines) == (1, 6)
    assert add(file) == ""  # after a line that a kill cut short
    found = read_history(file)
    assert (len(found.runs), found.ignored_lines) == (2, 6)


def test_nonsense_ratios_are_none(file):
    for planned, measured in ((0, 5), (5, 0), (-5, 5), (5, -5)):
        add(file, planned_peak=planned, found_peak=measured)
    assert [run.peak_ratio for run in read_history(file).runs] == [None] * 4


def test_the_file_stays_small_and_keeps_the_newest(file):
    add(file)
    line = json.loads(file.read_text())
    file.write_text("".join(json.dumps({**line, "world_size": n}) + "\n" for n in range(2 * KEPT_RUNS)))
    add(file, world_size=7777)
    runs = read_history(file).runs
    assert len(runs) == KEPT_RUNS
    assert runs[-1].world_size == 7777
    assert runs[0].world_size == KEPT_RUNS + 1
    assert sorted(p.name for p in file.parent.iterdir()) == ["history.jsonl", "history.jsonl.lock"]


def test_runs_at_the_same_time_lose_nothing(file):
    script = (
        "import sys; from pathlib import Path; from shardwise.measure.history import remember\n"
        "for n in range(25):\n"
        "    remember(device='CPU', base='ddp', world_size=n, found_peak=1, file=Path(sys.argv[1]))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script, str(file)]) for _ in range(3)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0, 0]
    found = read_history(file)
    assert (len(found.runs), found.ignored_lines) == (75, 0)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "taken").write_text("a file")
    problem = add(tmp_path / "taken" / "history.jsonl")
    assert "taken/history.jsonl' cannot be written" in problem and "SHARDWISE_HISTORY=off" in problem
    assert read_history(tmp_path / "taken" / "history.jsonl").runs == ()


def test_reading_needs_no_torch():
    script = (
        "import sys; from shardwise.measure.history import read_history; read_history(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SHARDWISE_HISTORY": "off"}, None),
        ({"SHARDWISE_HISTORY": " No "}, None),
        ({"SHARDWISE_HISTORY": "0"}, None),
        ({"SHARDWISE_HISTORY": "/a/b.jsonl", "XDG_DATA_HOME": "/x"}, "/a/b.jsonl"),
        ({"XDG_DATA_HOME": "/x"}, "/x/shardwise/history.jsonl"),
        ({"XDG_DATA_HOME": "relative"}, "/home/me/.local/share/shardwise/history.jsonl"),
        ({}, "/home/me/.local/share/shardwise/history.jsonl"),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_where_it_is_kept(monkeypatch, variables, expected):
    for name in ("SHARDWISE_HISTORY", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert history_file() == (None if expected is None else Path(expected))


def test_switched_off_nothing_is_written_or_read(file, monkeypatch):
    monkeypatch.setenv("SHARDWISE_HISTORY", "off")
    assert remember(device="CPU", base="ddp", world_size=1, found_peak=1) == ""
    assert read_history().runs == ()


def test_a_device_has_one_name():
    assert device_key("CPU") == "CPU"
    assert device_key("no such device") == "no such device"
    assert device_key("NVIDIA H100 80GB HBM3") == device_key(device_key("NVIDIA H100 80GB HBM3"))


def test_median_step_leaves_out_the_first_steps_and_other_lines(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert median_step_s(metrics, 0) is None
    lines = [{"step": n, "step_time_s": 9.0 if n <= 13 else float(n)} for n in range(1, 17)]
    lines.insert(14, {"step": 14, "heldout_bits_per_byte": 1.0})
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert median_step_s(metrics, 10) == 15.0
    assert median_step_s(metrics, 11) is None
