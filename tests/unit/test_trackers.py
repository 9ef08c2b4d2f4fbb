"""Trackers: what reaches them, that a run goes on without them, and that a resumed run is the same run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.train import trackers
from shardwise.train.config import Config, read_config
from shardwise.train.trackers import Trackers, check_trackers, flat, open_trackers

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"


def config_for(folder: Path, *names: str) -> Config:
    return read_config(EXAMPLE, [f"train.output={folder}", f"train.trackers={json.dumps(names)}"])


class Recording:
    """A tracker that remembers, and fails from its ``limit``-th call on."""

    def __init__(self, limit: float = math.inf) -> None:
        self.calls: list[Any] = []
        self.limit = limit

    def _note(self, *call: Any) -> None:
        print("a tracker talks to stdout")
        if len(self.calls) >= self.limit:
            raise OSError("the disk\n is full")
        self.calls.append(call)

    def log(self, step: int, values: Any) -> None:
        self._note("log", step, dict(values))

    def text(self, step: int, name: str, text: str) -> None:
        self._note("text", step, name, text)

    def close(self) -> None:
        self._note("close")


def test_a_line_of_metrics_under_the_names_of_trackers():
    line = {
        "step": 7, "time": 1.0, "loss": 2.5, "grad_norm": None, "tokens": 100, "mfu": 0.4, "flag": True, "name": "x",
        "parts": {"data": 0.25, "exposed_tp": None}, "between_s": {"checkpoint": 0.5}, "something": 3,
    }  # fmt: skip
    assert flat(line) == {
        "train/loss": 2.5, "train/tokens": 100.0, "speed/mfu": 0.4, "parts/data_s": 0.25,
        "between/checkpoint_s": 0.5, "more/something": 3.0,
    }  # fmt: skip


def test_every_tracker_gets_everything_and_stdout_nothing(capsys):
    one, other = Recording(), Recording()
    all_of = Trackers({"one": one, "other": other}, pytest.fail)
    all_of.log(3, {"step": 3, "loss": 1.0})
    all_of.log(3, {"step": 3, "grad_norm": None})
    all_of.text(3, "findings", ["healthy", "really"])
    all_of.text(3, "findings", [])
    all_of.close()
    all_of.close()
    expected = [("log", 3, {"train/loss": 1.0}), ("text", 3, "findings", "healthy\n\nreally"), ("close",)]
    assert one.calls == other.calls == expected
    assert capsys.readouterr().out == ""


def test_one_that_fails_is_said_once_and_the_others_go_on():
    said: list[str] = []
    bad, good = Recording(limit=1), Recording()
    all_of = Trackers({"bad": bad, "good": good}, said.append)
    for step in range(1, 5):
        all_of.log(step, {"loss": 1.0})
    all_of.close()
    assert len(good.calls) == 5 and len(bad.calls) == 1
    assert said == ["tracker bad failed and is disabled, training continues: OSError: the disk is full"]


def test_packages_that_are_missing_are_told_at_once(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name != "trackio" else object())
    with pytest.raises(ConfigError) as raised:
        check_trackers(["tensorboard", "trackio", "wandb"])
    assert "tensorboard, wandb are not installed" in str(raised.value)
    assert "shardwise[trackers]" in str(raised.value)
    check_trackers(["trackio"])


def test_one_that_cannot_be_opened_does_not_stop_the_run(tmp_path, monkeypatch):
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no service")

    monkeypatch.setitem(trackers._OPENERS, "trackio", refuse)
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
    said: list[str] = []
    opened = open_trackers(config_for(tmp_path, "trackio"), 0, said.append)
    assert opened.names == ()
    assert said == ["tracker trackio cannot be opened and is disabled, training continues: RuntimeError: no service"]


def test_without_trackers_nothing_is_written(tmp_path):
    opened = open_trackers(config_for(tmp_path), 0, pytest.fail)
    opened.log(1, {"loss": 1.0})
    opened.close()
    assert list(tmp_path.iterdir()) == []


# the real ones, each in a process of its own: they keep threads, a service and an exit hook

SCRIPT = """
import json, socket, sys
from pathlib import Path

def refuse(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "localhost", "::1"):
        print("NETWORK", address, flush=True)
        raise OSError("no network in tests")
    return connect(self, address)

connect, socket.socket.connect = socket.socket.connect, refuse
from shardwise.train.config import read_config
from shardwise.train.trackers import open_trackers

example, folder, name, done = sys.argv[1:]
config = read_config(Path(example), [f"train.output={folder}", f'train.trackers=["{name}"]'])
said = []
opened = open_trackers(config, int(done), said.append)
for step in range(int(done) + 1, int(done) + 4):
    opened.log(step, {"step": step, "loss": 1 / step, "parts": {"data": 0.5, "clip": None}})
opened.log(step, {"step": step, "heldout_bits_per_byte": 2.0})
opened.log(step - 1, {"step": step - 1, "checkpoint_stall_s": 0.25})
opened.text(step, "findings", ["healthy"])
names = opened.names
opened.close()
print(json.dumps({"said": said, "names": names}), flush=True)
"""


def track(folder: Path, name: str, done: int) -> dict[str, Any]:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    (folder / "run").mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO"))}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(EXAMPLE), str(folder / "run"), name, str(done)]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "NETWORK" not in ended.stdout
    lines = ended.stdout.splitlines()
    assert len(lines) == 1, "stdout is for documents"
    found: dict[str, Any] = json.loads(lines[0])
    assert found["names"] == [name], found
    assert len(found["said"]) == 1, found
    return found


@pytest.mark.turns(3)
def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path):
    track(tmp_path, "tensorboard", 0)
    track(tmp_path, "tensorboard", 2)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5]
    assert scalars["parts/data_s"][0] == (1, 0.5) and "parts/clip_s" not in scalars
    assert scalars["heldout/bits_per_byte"][-1] == (5, 2.0)
    assert "findings/text_summary" in events.Tags()["tensors"]


@pytest.mark.turns(3)
def test_trackio_goes_on_with_the_run(tmp_path):
    track(tmp_path, "trackio", 0)
    track(tmp_path, "trackio", 3)
    with sqlite3.connect(tmp_path / "trackio" / "shardwise.db") as base:
        rows = base.execute("select run_id, step, metrics from metrics order by id").fetchall()
    base.close()
    assert len({number for number, _, _ in rows}) == 1
    lines = [(step, json.loads(text)) for _, step, text in rows]
    losses = {step: line["train/loss"] for step, line in lines if "train/loss" in line}
    assert losses == pytest.approx({step: 1 / step for step in range(1, 7)})


@pytest.mark.turns(3)
def test_wandb_is_offline_and_goes_on_under_the_same_number(tmp_path):
    assert "offline" in track(tmp_path, "wandb", 0)["said"][0]
    track(tmp_path, "wandb", 3)
    number = json.loads((tmp_path / "run" / "trackers.json").read_text())["run"]
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert 1 <= len(written) <= 2 and {file.name for file in written} == {f"run-{number}.wandb"}
    assert sum(file.stat().st_size for file in written) > 500


def test_a_damaged_number_is_made_anew(tmp_path):
    (tmp_path / "trackers.json").write_text("{")
    first = trackers._run_id(tmp_path)
    assert first == trackers._run_id(tmp_path) != ""
