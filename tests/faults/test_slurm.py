"""The job of ``shardwise launch`` under a real Slurm of two nodes: whatever happens to it, its numbers are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.format import newest, read_manifest
from shardwise.train.metrics import read_metrics
from tests import slurm
from tests.cli import configs
from tests.commands import shardwise

pytestmark = pytest.mark.skipif(slurm.why_not() is not None, reason=slurm.why_not() or "")

SEED = 7
PROGRESS_S = 180.0
"""A job that neither starts nor makes a step for so long hangs, also on a machine that has other work."""
SLOW = {"factory": "tests.models:slow_decoder"}


@pytest.fixture
def cluster() -> Iterator[slurm.Slurm]:
    with slurm.two_nodes(timeout_s=10) as running:
        yield running


@dataclass
class Job:
    """A job of two nodes, and what has happened to it."""

    cluster: slurm.Slurm
    folder: Path
    number: str
    restarts: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def report(self) -> Path:
        """What the job prints."""
        return self.output / f"slurm-{self.number}.log"

    def step(self) -> int:
        """The last step that the run has logged."""
        return max((line["step"] for line in read_metrics(self.output / "metrics.jsonl")), default=0)

    def saved(self) -> int:
        """The step of the newest checkpoint."""
        path = newest(self.output / "checkpoints")
        return 0 if path is None else read_manifest(path).step

    def nodes(self) -> int:
        """How many nodes the run trains on."""
        return int(json.loads((self.output / "job.json").read_text())["cluster"]["nodes"])

    def wait_for_steps(self, number: int) -> None:
        """Wait for so many more steps than have ever been logged."""
        step = self.step() + number
        self.cluster.wait_for(lambda: self.step() >= step, self.report, PROGRESS_S, pause_s=0.05)

    def preempt(self, how: str) -> None:
        """A requeue, by which Slurm sends SIGTERM to all; or USR1, as before a time limit. The job starts again."""
        self._note(how)
        words = ("scontrol", "requeue") if how == "requeue" else ("scancel", "--batch", "--signal=USR1")
        self.cluster.tool(*words, self.number)
        self.cluster.wait_for((self.output / "preempted").exists, self.report, PROGRESS_S)
        facts = json.loads((self.output / "preempted").read_text())
        assert facts["signal"] == ("SIGTERM" if how == "requeue" else "SIGUSR1")
        assert facts["step"] == self.saved()
        self._start_again()

    def lose(self, node: str) -> None:
        """A node is killed, with the job's script where it is the first; the job starts again when it is back."""
        self._note(f"{node} is lost")
        self.cluster.kill_node(node)
        restarts = str(self.restarts + 1)
        self.cluster.wait_for(
            lambda: self.cluster.job(self.number)["Restarts"] == restarts, self.report, PROGRESS_S, pause_s=0.5
        )
        self.cluster.start_node(node)
        self._start_again()

    def continue_without(self, node: str) -> None:
        """A node is killed, and the run continues on the other one."""
        self._note(f"{node} is lost, and the run continues")
        self.cluster.kill_node(node)
        self.cluster.wait_for(lambda: self.nodes() == 1, self.report, PROGRESS_S, pause_s=0.5)

    def end(self) -> None:
        """Wait for its end; no process of it may be left."""
        found = self.cluster.wait(self.number, 4 * PROGRESS_S, report=self.report)
        assert found["Restarts"] == str(self.restarts)
        self.cluster.wait_for(lambda: not self.cluster.tasks_of(self.number), self.report)
        print("\n".join(self.log))

    def _start_again(self) -> None:
        self.restarts += 1
        self.cluster.hurry(self.number, self.restarts, PROGRESS_S)

    def _note(self, what: str) -> None:
        self.log.append(f"step {self.step()}: {what}")


def submit(
    cluster: slurm.Slurm, folder: Path, patch: pytest.MonkeyPatch, *words: str, **changes: dict[str, Any]
) -> Job:
    """``shardwise launch`` of the small config on both nodes."""
    folder.mkdir()
    config = configs.write_config(folder, **changes, parallel={"device": "cpu", "nproc": None, "strategy": "fsdp"})
    words = ("--via", "slurm", "--nodes", "2", "--nproc", "1", "--interface", "lo", "--restarts", "99", *words)
    with patch.context() as patched:
        for name, value in cluster.env.items():
            patched.setenv(name, value)
        done = shardwise("launch", str(config), *words, "--json", "-o", str(folder / "job.sbatch"))
    return Job(cluster, folder, json.loads(done.stdout.splitlines()[-1])["submitted"])


def alone(folder: Path, **changes: dict[str, Any]) -> Path:
    """The same run, undisturbed: two ranks of this machine, and no Slurm."""
    folder.mkdir()
    configs.train(configs.write_config(folder, **changes, parallel={"nproc": 2, "strategy": "fsdp"}))
    return folder


def weights(folder: Path) -> dict[str, list[str]]:
    """The hashes of a run's newest checkpoint: weights, optimizer and random states."""
    path = newest(folder / "run" / "checkpoints")
    assert path is not None
    return configs.hashes(path)


@pytest.mark.timeout(600)
def test_two_nodes_train_as_one_machine_does(
    cluster: slurm.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that needs quotes, in a job without the environment of who submits it, and doctor first."""
    words = ("--sbatch-option", "export=NONE", "--env", "SHARDWISE_HISTORY=off")
    job = submit(cluster, tmp_path / "100% of $HOME & 2 nodes", monkeypatch, *words)
    other = alone(tmp_path / "alone")
    job.end()
    assert "all 2 ranks answer" in job.report.read_text()
    assert configs.losses(job.folder) == configs.losses(other)
    assert weights(job.folder) == weights(other)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_requeues_and_five_nodes_down(
    cluster: slurm.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two time limits, each some steps after the last event: it ends with the numbers of a run without."""
    rng_state = random.Random(SEED)
    changes = {"train": {"steps": 500}, "checkpoint": {"every": 4, "async_save": True}}
    events = ["requeue"] * 10 + [rng_state.choice(slurm.NODES) for _ in range(5)] + ["USR1"] * 2
    rng_state.shuffle(events)
    other = alone(tmp_path / "alone", model={**SLOW, "kwargs": {"pause_s": 0.0}}, **changes)
    job = submit(cluster, tmp_path / "slurm", monkeypatch, "--no-doctor", model=SLOW, **changes)
    for how in events:
        job.wait_for_steps(rng_state.randint(1, 14))
        (job.lose if how in slurm.NODES else job.preempt)(how)
    job.end()
    assert configs.losses(job.folder) == configs.losses(other)
    assert weights(job.folder) == weights(other)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_times_a_run_continues_on_the_node_that_is_left(
    cluster: slurm.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples and loss of each step are those of a run that kept both nodes.

    Queued again it has both, also after the loss of the first node, which takes the job's script with it.
    """
    rng_state, steps = random.Random(SEED), 500
    changes: dict[str, dict[str, Any]] = {
        "optimizer": {"lr": 1e-3},
        "train": {"steps": steps},
        "checkpoint": {"every": 4},
    }
    other = alone(tmp_path / "alone", model={**SLOW, "kwargs": {"pause_s": 0.0}}, **changes)
    changes |= {"launch": {"min_nodes": 1}}
    job = submit(cluster, tmp_path / "slurm", monkeypatch, "--no-doctor", model=SLOW, **changes)
    for next_event in ("requeue", "n1", "USR1", "requeue", ""):
        job.wait_for_steps(rng_state.randint(1, 20))
        job.continue_without("n2")
        job.wait_for_steps(rng_state.randint(1, 20))
        if next_event:
            cluster.start_node("n2")
            job.preempt("USR1" if next_event == "USR1" else "requeue")
            job.wait_for_steps(rng_state.randint(1, 20))
        if next_event == "n1":
            job.lose("n1")
    job.end()
    assert job.nodes() == 1
    found = [(line["step"], line["loss"]) for line in read_metrics(job.output / "metrics.jsonl") if "loss" in line]
    expected = {step: float(loss) for step, loss in configs.losses(other).items()}
    assert [step for step, _ in found] == [*range(1, steps + 1)]
    far = {step: (loss, expected[step]) for step, loss in found if not abs(loss - expected[step]) <= 1e-6}
    assert not far
    assert manifest_state(job.folder)["position"] == manifest_state(other)["position"]


def manifest_state(folder: Path) -> dict[str, Any]:
    """What a run's newest checkpoint says of its data."""
    path = newest(folder / "run" / "checkpoints")
    assert path is not None
    return read_manifest(path).state
