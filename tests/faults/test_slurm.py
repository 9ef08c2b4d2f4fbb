"""``shardwise train`` under a real Slurm of two nodes, as ``srun torchrun``: the run of one machine, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.checkpoint.format import newest
from tests import slurm
from tests.cli import configs

pytestmark = pytest.mark.skipif(slurm.why_not() is not None, reason=slurm.why_not() or "")

TORCHRUN = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append
cd {root}
export PYTHONPATH={root}/src:{root} OMP_NUM_THREADS=1
srun --kill-on-bad-exit=0 {torchrun} --rdzv-endpoint localhost:{port} -m shardwise train {config}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    with slurm.two_nodes() as running:
        yield running


def write_script(folder: Path, config: Path) -> Path:
    script = folder / "job.sh"
    [port] = slurm.free_ports(1)
    script.write_text(SCRIPT.format(root=configs.ROOT, torchrun=TORCHRUN, port=port, config=config))
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
