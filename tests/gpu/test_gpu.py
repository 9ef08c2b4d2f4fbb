"""What only a GPU can show: NCCL, CUDA's allocator, real offload. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.load import load_checkpoint
from shardwise.checkpoint.save import Saver
from shardwise.plan.plan import Plan
from tests.cli import configs

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="no GPU: torch.cuda.is_available() is false")


@needs_gpu
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_strategy_on_gpus(tmp_path: Path, strategy: str, precision: str) -> None:
    config = configs.write_config(tmp_path, parallel={"nproc": GPUS, "precision": precision}, train={"steps": 12})
    out, _ = configs.train(config, "--json", "--strategy", strategy)
    document = json.loads(out.splitlines()[-1])
    assert document["receipts"]["effects"]["ok"]
    assert document["receipts"]["fit"]["ok"]


@needs_gpu
@pytest.mark.parametrize("strategy", ["fsdp+offload", "zero2+offload"])
def test_offloaded_state_lives_on_the_host(tmp_path: Path, strategy: str) -> None:
    config = configs.write_config(tmp_path, parallel={"nproc": GPUS})
    out, _ = configs.train(config, "--json", "--strategy", strategy)
    lines = json.loads(out.splitlines()[-1])["receipts"]["effects"]["lines"]
    found = {line["name"]: line["found"] for line in lines}
    assert found["state lives on"].startswith("cpu")


@needs_gpu
def test_own_loop_on_a_gpu() -> None:
    command = [sys.executable, str(configs.ROOT / "examples" / "own_loop.py")]
    done = subprocess.run(
        command, cwd=configs.ROOT, env=configs.environment(), text=True, capture_output=True, timeout=170
    )
    assert done.returncode == 0, done.stderr


@needs_gpu
@pytest.mark.parametrize("guarded", [True, False])
def test_a_background_save_on_a_gpu_is_the_state_when_it_was_asked_for(tmp_path: Path, guarded: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Saver(tmp_path, keep=2, async_save=True, guarded=guarded) as saver:
        for number in range(1, 6):
            model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
            saver.before_update()
            optimizer.step()
            optimizer.zero_grad()
            expected = [p.detach().clone() for p in model.parameters()]
            path = saver.save(number, model=model, optimizer=optimizer, plan=Plan(device="cuda"), state={})
        model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
        saver.before_update()
        optimizer.step()
    load_checkpoint(path, model=model, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


@needs_gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_on_gpus_with_background_saves(tmp_path: Path, strategy: str) -> None:
    table = {"every": 3, "async_save": True}
    config = configs.write_config(tmp_path, parallel={"nproc": GPUS}, checkpoint=table, train={"steps": 12})
    configs.train(config, "--strategy", strategy)
    out, _ = configs.train(config, "--json", "--strategy", strategy, "train.steps=15")
    assert json.loads(out.splitlines()[-1])["steps"] == 15
