"""``shardwise train`` under a real Slurm of two nodes, as ``srun torchrun``: the run of one machine, bit for bit."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.checkpoint.format import newest
from tests import slurm
from tests.cli import configs

pytestmark = pytest.mark.skipif(slurm.why_not() is not None, reason=slurm.why_not() or "")

SEED = 7
EVENTS = ("requeue", "USR1", "requeue")
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --signals-to-handle {SIGNALS}"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append
cd {root}
export PYTHONPATH={root}/src:{root} OMP_NUM_THREADS=1
rdzv="--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id $SLURM_JOB_ID"
srun {torchrun} $rdzv -m shardwise train {config} &
pid=$!
trap 'kill -USR1 $pid' USR1
wait $pid  # the trap ends it
wait $pid
code=$?
if [ -e {output}/preempted ] || [ $code = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


@pytest.fixture(scope="module")
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


def test_requeued_and_preempted_it_ends_as_if_nothing_had_happened(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """``scontrol requeue``, which sends SIGTERM to all processes, and the SIGUSR1 that comes before a time limit."""
    rng_state = random.Random(SEED)
    report, output = tmp_path / "job.out", tmp_path / "slurm" / "run"
    (tmp_path / "slurm").mkdir()
    (tmp_path / "local").mkdir()
    changes = {"train": {"steps": 60}, "checkpoint": {"every": 0, "async_save": True}}
    script = write_script(
        tmp_path / "slurm", configs.write_config(tmp_path / "slurm", parallel={"nproc": None}, **changes)
    )
    job = cluster.submit(script, f"--output={report}")
    configs.train(configs.write_config(tmp_path / "local", parallel={"nproc": 2}, **changes))
    step = 0
    for restarts, how in enumerate(EVENTS, 1):
        step += rng_state.randint(2, 50 // len(EVENTS))
        cluster.wait_for(lambda step=step: logged(tmp_path / "slurm", step), report)
        if how == "requeue":
            cluster.tool("scontrol", "requeue", job)
        else:
            cluster.tool("scancel", "--batch", "--signal=USR1", job)
        cluster.wait_for((output / "preempted").exists, report)
        facts = json.loads((output / "preempted").read_text())
        assert facts["signal"] == ("SIGTERM" if how == "requeue" else "SIGUSR1")
        step = int(facts["step"])
        cluster.hurry(job, restarts)
    found = cluster.wait(job, report=report)
    assert found["Restarts"] == str(len(EVENTS))
    assert configs.losses(tmp_path / "slurm") == configs.losses(tmp_path / "local")
    assert weights(tmp_path / "slurm") == weights(tmp_path / "local")


def logged(folder: Path, step: int) -> bool:
    """Whether a run has logged ``step``."""
    file = folder / "run" / "metrics.jsonl"
    return file.exists() and f'{{"step": {step}, "loss"' in file.read_text()
