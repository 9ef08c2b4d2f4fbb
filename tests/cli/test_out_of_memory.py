"""Out of memory, in `train` and in a loop of one's own: where, how much beside the prediction, and a plan that fits."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardwise.errors import KilledForMemory
from shardwise.plan.plan import Plan
from shardwise.run.out_of_memory import Shortage, is_out_of_memory
from shardwise.run.resume_command import with_plan
from shardwise.train.config import read_config
from tests.cli import configs

CUDA = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.11 GiB of which 12.00 MiB is free."
    " Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 70.00 GiB is "
    "allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
MODEL = '''
import resource
from pathlib import Path

import psutil
import torch
from torch import nn

from tests.models import byte_decoder

HUNGRY, KIND, RANK = Path({hungry!r}), {kind!r}, {rank}
FORWARDS = []


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError({text!r})


def asks_for_too_much():
    if KIND == "host":
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.empty(2**30, dtype=torch.uint8)


class Hungry(nn.Module):
    """Asks in the second micro batch of step 5 for more than there is."""

    def __init__(self):
        super().__init__()
        self.inner = byte_decoder(0.0)

    def forward(self, ids):
        dist = torch.distributed
        if not (self.training and dist.is_initialized() and HUNGRY.exists() and dist.get_rank() == RANK):
            return self.inner(ids)
        FORWARDS.append(ids)
        if len(FORWARDS) != 10:
            return self.inner(ids)
        asks_for_too_much()
        return Raises.apply(self.inner(ids))


def build():
    return Hungry()
'''


def hungry_config(folder: Path, kind: str, rank: int, asked: str = "2.00 KiB") -> Path:
    """The config of a run whose ``rank`` has no memory left in step 5; a checkpoint is saved after step 3."""
    hungry = folder / "hungry"
    hungry.touch()
    text = CUDA.format(asked=asked)
    (folder / "model.py").write_text(MODEL.format(hungry=str(hungry), kind=kind, rank=rank, text=text))
    model = {"factory": f"{folder / 'model.py'}:build"}
    return configs.write_config(folder, model=model, train={"steps": 6, "micro_batch": 2, "eval_samples": 8})


@pytest.mark.parametrize(("kind", "rank", "phase"), [("host", 1, "forward"), ("cuda", 0, "backward")])
def test_a_run_says_where_and_what_would_fit(kind: str, rank: int, phase: str, tmp_path: Path) -> None:
    config = hungry_config(tmp_path, kind, rank)
    _, said = configs.train(config, "--strategy", "ddp", exit_code=3)
    first = tmp_path / "run" / "checkpoints" / "step-00000003"
    kept = configs.hashes(first)
    assert f"out of memory in the {phase} of micro batch 2 of 2, step 5: " in said, said
    assert f"(on rank {rank})" in said
    if kind == "host":
        assert "1.00 GiB more were asked for" in said
        assert "that RLIMIT_AS (ulimit -v) allows; predicted were" in said
    else:
        assert "2.00 KiB more were asked for" in said
        assert "70.00 GiB were allocated and 75.00 GiB reserved of the device's 79.11 GiB; predicted were" in said
    for name in ("parameters", "gradients", "optimizer", "activations, logits, buffers, temporaries"):
        assert f"\n    {name}  " in said
    assert "Traceback" not in said
    assert f"checkpoints are untouched, the newest is '{first}'; resume with: shardwise train {config}" in said
    command = next(line.strip() for line in said.splitlines() if line.startswith("    shardwise train "))
    (tmp_path / "hungry").unlink()
    words = shlex.split(command)[2:]
    out, _ = configs.train(Path(words[0]), *words[1:])
    assert "resuming after step 3 of 6" in out
    assert configs.hashes(first) == kept or not first.exists()


def test_the_nearest_plan_is_the_fastest_that_saves_what_is_missing(tmp_path: Path) -> None:
    """In this order: predicted to fit, else the one that needs least, which is said."""
    from shardwise.run.job import prepare_job
    from shardwise.run.out_of_memory import ForeseenRun

    config = read_config(configs.write_config(tmp_path), ["train.global_batch=64", "parallel.strategy=ddp"])
    job = prepare_job(config, lambda text: None, command=("shardwise", "train", "config.toml")).job
    run = ForeseenRun.of(job)
    sizes = [one.memory_bytes or 0 for one in job.smaller]
    assert sizes
    need = job.estimate.device_bytes
    assert all(size < need for size in sizes)
    little = run.fitting(Shortage(requested=1024))
    assert little[0].startswith("the nearest plan that fits: ")
    assert "shardwise train config.toml --strategy " in little[1]
    much = run.fitting(Shortage(requested=2**50))
    assert much[0].startswith("no plan is predicted to save that much; the smallest: ")


def test_figures_are_read_from_the_allocators_message() -> None:
    found = Shortage.of(torch.OutOfMemoryError(CUDA.format(asked="1.50 GiB")))
    gib = 2**30
    assert found == Shortage(int(1.5 * gib), 70 * gib, 75 * gib, int(79.11 * gib))
    assert found.missing(100 * gib) == int(1.05 * 30 * gib)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert Shortage.of(caught.value) == Shortage(requested=2**60)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid"))
    assert not is_out_of_memory(KilledForMemory("out of memory"))


def test_the_command_has_the_options_of_the_plan(tmp_path: Path) -> None:
    config = read_config(configs.write_config(tmp_path))
    words = ["shardwise", "train", "my config.toml", "--strategy", "ddp", "--plan=p.toml", "train.steps=3"]
    plan = Plan(strategy="fsdp", micro_batch=1, grad_accum=8, recompute="full")
    assert with_plan(words, config, plan) == (
        "shardwise train 'my config.toml' train.steps=3 --strategy fsdp train.micro_batch=1 parallel.recompute=full"
    )


def test_a_rank_that_the_kernel_killed_comes_with_a_plan_too(tmp_path: Path) -> None:
    config = configs.write_config(tmp_path)
    killed = KilledForMemory("rank 1 was killed by SIGKILL (out of memory)")
    with mock.patch("shardwise.launch.local.run_local", side_effect=killed):
        _, said = configs.train(config, "--strategy", "ddp", exit_code=3)
    assert "rank 1 was killed by SIGKILL (out of memory)\n  the nearest plan that fits: " in said
    assert said.rstrip().endswith(f"start again with: shardwise train {config} --strategy ddp")


LOOP = """
import resource, sys
import psutil, shardwise, torch
from torch import nn
from tests.models import decoder, ragged_batches

session = shardwise.start("ddp", grad_accum=2, receipts=False)
model, optimizer = decoder(), None
model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters()))
for step in session.steps(ragged_batches(8)):
    for number, micro in enumerate(step):
        loss = nn.functional.cross_entropy(model(micro.inputs).flatten(0, 1), micro.labels.flatten(), reduction="sum")
        if step.number == 3 and number == 1:
            if sys.argv[1] == "other":
                raise RuntimeError("the loop's own")
            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**26, -1))
            torch.empty(2**30, dtype=torch.uint8)
        step.backward(loss)
    step.update(optimizer)
"""


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["host", "other"])
def test_a_loop_of_ones_own_ends_with_a_message_in_place_of_a_traceback(kind: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "loop.py"), kind],
        env=configs.environment() | {"PYTHONPATH": f"{configs.ROOT / 'src'}:{configs.ROOT}"},
        text=True,
        capture_output=True,
        timeout=170,
        check=False,
    )
    if kind == "other":
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        return
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert (
        "shardwise: out of memory in the forward of micro batch 2 of 2, step 3: 1.00 GiB more were asked for"
        in done.stderr
    )
    assert "loop.py, line 17)" in done.stderr
    assert "\n    optimizer  " in done.stderr
    assert 'batches of 1 samples instead of 2, and shardwise.start("ddp", grad_accum=4)' in done.stderr
