"""Nodes are killed, preempted and come back: samples and loss of each step are those of a run that kept its nodes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardwise.checkpoint.format import newest, read_manifest
from tests.agents import NAMES, Nodes, elastic
from tests.cli import configs

SEED = 3
BATCH = 8


def write_config(folder: Path, strategy: str, steps: int, pause_s: float = 0.05, **parallel: int) -> Path:
    """A run of slow steps without dropout, whose numbers are those of a rank."""
    folder.mkdir()
    return configs.write_config(
        folder,
        model={"factory": "tests.models:slow_decoder", "kwargs": {"pause_s": pause_s}},
        optimizer={"lr": 1e-3},
        train={"steps": steps, "global_batch": BATCH, "log_every": 1},
        parallel={"nproc": None, "strategy": strategy, **parallel},
        checkpoint={"every": 4},
    )


def check_equal(nodes: Nodes, full: Path, steps: int) -> None:
    """Every step once, each with the loss of the run that kept its nodes, and as many samples as steps."""
    found = [(line["step"], line["loss"]) for line in nodes.lines()]
    expected = {step: float(loss) for step, loss in configs.losses(full).items()}
    assert [step for step, _ in found] == [*range(1, steps + 1)], nodes.history()
    far = {step: (loss, expected[step]) for step, loss in found if not abs(loss - expected[step]) <= 1e-5}  # fp32
    assert not far, f"{far}\n{nodes.history()}"
    path = newest(nodes.folder / "run" / "checkpoints")
    assert path is not None
    assert read_manifest(path).state["position"] == steps * BATCH


@pytest.mark.turns(6)
@pytest.mark.timeout(400)
def test_a_node_is_lost_and_comes_back(tmp_path: Path) -> None:
    steps = 300
    configs.train(write_config(tmp_path / "full", "fsdp", steps, 0.0, nproc=2))
    with elastic(write_config(tmp_path / "nodes", "fsdp", steps), ranks=1) as nodes:
        for name in NAMES:
            nodes.start(name)
        nodes.wait_for_step(10)
        nodes.kill_agent("b")
        nodes.wait_for_world(1)
        nodes.start("b")
        nodes.wait_for_world(2)
        nodes.wait_for_end()
        check_equal(nodes, tmp_path / "full", steps)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_twenty_times_nodes_come_and_go(tmp_path: Path, strategy: str) -> None:
    """Two nodes of two ranks; ten times one of them goes, in any way, or both, and ten times they come back."""
    rng_state, steps = random.Random(f"{SEED} {strategy}"), 1000
    configs.train(write_config(tmp_path / "full", strategy, steps, 0.0, nproc=4))
    with elastic(write_config(tmp_path / "nodes", strategy, steps), ranks=2) as nodes:
        for name in NAMES:
            nodes.start(name)
        for _ in range(10):
            nodes.wait_for_world(2)
            nodes.wait_for_step(nodes.step() + rng_state.randint(1, 20))
            gone = list(NAMES) if rng_state.random() < 0.2 else [rng_state.choice(NAMES)]
            for name in gone:
                rng_state.choice((nodes.kill_agent, nodes.lose, nodes.preempt))(name)
            if len(gone) < len(NAMES) and rng_state.random() < 0.7:
                nodes.wait_for_world(1)
                nodes.wait_for_step(nodes.step() + rng_state.randint(1, 20))
            for name in gone:
                nodes.start(name)
        nodes.wait_for_end()
        print("\n".join(nodes.log))
        check_equal(nodes, tmp_path / "full", steps)
