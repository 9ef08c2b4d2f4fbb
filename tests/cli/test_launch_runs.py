"""What ``shardwise launch`` renders, run: torchrun over a stand-in for ssh, and a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from shardwise.checkpoint.format import newest
from tests.cli import configs
from tests.cli.test_readme import fits, masked
from tests.commands import shardwise

SSH = """\
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.execvp("sh", ["sh", "-c", sys.argv[-1]])
"""
STEPS = {"train": {"steps": 60}, "checkpoint": {"every": 0, "async_save": True}}


PAGE = (configs.ROOT / "docs" / "many-machines.md").read_text()
SESSIONS = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE)
LINES = re.findall(r"^(shardwise launch .+?)(?: +#.*)?$", PAGE, flags=re.MULTILINE)


def hashes(folder: Path) -> dict[str, list[str]]:
    path = newest(folder / "run" / "checkpoints")
    assert path is not None
    return configs.hashes(path)


def alone(folder: Path, **changes: dict[str, object]) -> Path:
    """The same run, with both ranks on this machine and no engine."""
    folder.mkdir()
    configs.train(configs.write_config(folder, parallel={"nproc": 2, "strategy": "ddp"}, **changes))
    return folder


@pytest.mark.turns(6)
def test_torchrun_over_ssh_trains_as_one_machine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, folder = tmp_path / "bin", tmp_path / "two nodes"  # a folder that needs quotes
    tools.mkdir()
    folder.mkdir()
    (tools / "ssh").write_text(f"#!{sys.executable}\n{SSH}")
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    config = configs.write_config(folder, parallel={"device": "cpu", "nproc": None})
    words = ("--via", "torchrun", "--nodes", "2", "--nproc", "1", "--hosts", "localhost,n2", "-o", str(folder / "file"))
    done = shardwise("launch", str(config), *words, "--json")
    assert "localhost | " in done.stderr
    assert json.loads(done.stdout)["strategy"] == "ddp"
    other = alone(tmp_path / "alone")
    assert configs.losses(folder) == configs.losses(other)
    assert hashes(folder) == hashes(other)


@pytest.mark.turns(6)
@pytest.mark.timeout(600)
def test_slurm_trains_and_is_queued_again_before_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = pytest.importorskip("tests.slurm")
    if (why := slurm.why_not()) is not None:
        pytest.skip(why)
    folder = tmp_path / "slurm"
    folder.mkdir()
    config = configs.write_config(folder, parallel={"device": "cpu", "nproc": None}, **STEPS)
    words = ("--via", "slurm", "--nodes", "2", "--nproc", "1", "--interface", "lo", "--no-doctor", "--json")
    with slurm.two_nodes() as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        done = shardwise("launch", str(config), *words, "-o", str(folder / "file"))
        job = json.loads(done.stdout.splitlines()[-1])["submitted"]
        report = folder / "run" / f"slurm-{job}.log"
        metrics = folder / "run" / "metrics.jsonl"
        cluster.wait_for(lambda: metrics.exists() and '{"step": 5, ' in metrics.read_text(), report)
        cluster.tool("scancel", "--batch", "--signal=USR1", job)
        cluster.hurry(job, 1)
        found = cluster.wait(job, report=report)
    assert (found["Restarts"], found["NumNodes"]) == ("1", "2")
    assert "saved before the time limit: queued again" in report.read_text()
    assert not (folder / "run" / "preempted").exists()
    other = alone(tmp_path / "alone", **STEPS)
    assert configs.losses(folder) == configs.losses(other)
    assert hashes(folder) == hashes(other)


def test_the_sessions_of_the_page(tmp_path: Path) -> None:
    assert len(SESSIONS) == 2
    places = {"/shared/runs/lm": str(tmp_path / "lm"), "lm.sbatch": str(tmp_path / "lm.sbatch")}
    for command, expected in SESSIONS:
        for shown, place in places.items():
            command = command.replace(shown, place)
        done = shardwise(*shlex.split(command)[1:], exit_code=None)
        found = done.stdout + done.stderr
        for shown, place in reversed(places.items()):
            found = found.replace(place, shown)
        wrong = fits(masked(found), masked(expected))
        assert not wrong, f"{command}: {wrong}\n{found}"


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_is_taken(line: str, tmp_path: Path) -> None:
    """Only the config is another one; the model is small, and the batch divides."""
    config = configs.write_config(
        tmp_path, parallel={"nproc": None}, train={"output": "runs/page", "global_batch": 128}, data={"path": "corpus"}
    )
    words = shlex.split(line.replace("lm.toml", str(config)))[1:]
    shares = words[words.index("--via") + 1] in ("torchrun", "slurm")
    more = [f"train.output={tmp_path / 'run'}", "data.path=python:json"] if shares else []
    done = shardwise(*words, "--dry-run", "-o", str(tmp_path / "file"), *more)
    assert "dry run: nothing was submitted" in done.stdout
