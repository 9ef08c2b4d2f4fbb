"""``shardwise train`` under a real Slurm of two nodes, as ``srun torchrun``: the run of one machine, bit for bit."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.format import newest, read_manifest
from tests import slurm
from tests.cli import configs

pytestmark = pytest.mark.skipif(slurm.why_not() is not None, reason=slurm.why_not() or "")

SEED = 7
EVENTS = ("USR1", "node", "requeue")
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3"
TORCHRUN += f" --signals-to-handle {SIGNALS} --monitor-interval 0.3 --rdzv-backend c10d"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append
cd {root}
export PYTHONPATH={root}/src:{root} OMP_NUM_THREADS=1
srun bash -c '{torchrun} --rdzv-id $SLURM_JOB_ID --rdzv-endpoint localhost:{port} \\
    --rdzv-conf is_host=$((SLURM_NODEID == 0)) -m shardwise train {config}' &
pid=$!
trap 'kill -USR1 $pid' USR1
wait $pid  # the trap ends it
wait $pid
code=$?
if [ -e {output}/preempted ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60  # until Slurm ends it: the exit code of a script that ends first would be that of the job started anew
fi
exit $code
"""


@pytest.fixture
def cluster() -> Iterator[slurm.Slurm]:
    with slurm.two_nodes() as running:
        yield running


def write_script(folder: Path, config: Path) -> Path:
    script = folder / "job.sh"
    [port] = slurm.free_ports(1)
    output = folder / "run"
    script.write_text(SCRIPT.format(root=configs.ROOT, torchrun=TORCHRUN, port=port, config=config, output=output))
    return script


def weights(folder: Path) -> dict[str, list[str]]:
    """The hashes of a run's newest checkpoint: weights, optimizer and random states."""
    path = newest(folder / "run" / "checkpoints")
    assert path is not None
    return configs.hashes(path)


@pytest.mark.turns(6)
def test_two_nodes_train_as_one_machine_does(cluster: slurm.Slurm, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "local").mkdir()
    changes = {"parallel": {"nproc": None, "strategy": "fsdp"}}
    script = write_script(tmp_path / "slurm", configs.write_config(tmp_path / "slurm", **changes))
    job = cluster.submit(script, f"--output={tmp_path / 'job.out'}")
    configs.train(configs.write_config(tmp_path / "local", parallel={"nproc": 2, "strategy": "fsdp"}))
    found = cluster.wait(job, report=tmp_path / "job.out")
    assert found["NumNodes"] == "2"
    assert configs.losses(tmp_path / "slurm") == configs.losses(tmp_path / "local")
    assert weights(tmp_path / "slurm") == weights(tmp_path / "local")


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_requeued_preempted_and_without_a_node_it_ends_as_if_nothing_had_happened(
    cluster: slurm.Slurm, tmp_path: Path
) -> None:
    """``scontrol requeue``, which sends SIGTERM to all; SIGUSR1, as before a time limit; and a node that goes down."""
    are_survived(cluster, tmp_path, EVENTS, steps=150)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_requeues_and_five_nodes_down(cluster: slurm.Slurm, tmp_path: Path) -> None:
    events = ["requeue"] * 10 + ["node"] * 5 + ["USR1"] * 2
    random.Random(SEED).shuffle(events)
    are_survived(cluster, tmp_path, events, steps=1000)


def are_survived(cluster: slurm.Slurm, tmp_path: Path, events: Sequence[str], steps: int) -> None:
    """Let these events happen to a job, each some steps after the last; it ends with the numbers of a run without."""
    rng_state = random.Random(SEED)
    report, output = tmp_path / "job.out", tmp_path / "slurm" / "run"
    (tmp_path / "slurm").mkdir()
    (tmp_path / "local").mkdir()
    changes: dict[str, Any] = {
        "model": {"factory": "tests.models:slow_decoder", "kwargs": {"pause_s": 0.1}},
        "train": {"steps": steps},
    }
    changes["checkpoint"] = {"every": 4, "async_save": True}
    config = configs.write_config(tmp_path / "slurm", parallel={"nproc": None}, **changes)
    changes["model"]["kwargs"]["pause_s"] = 0.0
    configs.train(configs.write_config(tmp_path / "local", parallel={"nproc": 2}, **changes))
    job = cluster.submit(write_script(tmp_path / "slurm", config), f"--output={report}")
    step = 0
    for restarts, how in enumerate(events, 1):
        step += rng_state.randint(1, steps // len(events) // 4)
        cluster.wait_for(lambda step=step: logged(tmp_path / "slurm", step), report)
        if how == "node":
            cluster.kill_node("n2")
            counted = str(restarts)
            cluster.wait_for(lambda counted=counted: cluster.job(job)["Restarts"] == counted, report, pause_s=0.5)
            cluster.start_node("n2")
            step = saved(output)
        else:
            words = ("scontrol", "requeue") if how == "requeue" else ("scancel", "--batch", "--signal=USR1")
            cluster.tool(*words, job)
            cluster.wait_for((output / "preempted").exists, report)
            facts = json.loads((output / "preempted").read_text())
            assert facts["signal"] == ("SIGTERM" if how == "requeue" else "SIGUSR1")
            step = int(facts["step"])
            assert step == saved(output)
        cluster.hurry(job, restarts)
    found = cluster.wait(job, report=report)
    assert found["Restarts"] == str(len(events))
    assert configs.losses(tmp_path / "slurm") == configs.losses(tmp_path / "local")
    assert weights(tmp_path / "slurm") == weights(tmp_path / "local")


def saved(output: Path) -> int:
    """The step of a run's newest checkpoint."""
    path = newest(output / "checkpoints")
    return 0 if path is None else read_manifest(path).step


def logged(folder: Path, step: int) -> bool:
    """Whether a run has logged ``step``."""
    file = folder / "run" / "metrics.jsonl"
    return file.exists() and f'{{"step": {step}, "loss"' in file.read_text()
