"""Exported configurations train: Accelerate and Trainer start two ranks from the file that `shardwise export` wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shardwise.interop.accelerate_yaml import export_accelerate
from shardwise.interop.trainer_json import export_trainer
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from tests.cli import configs
from tests.ledger import spent
from tests.slurm import free_ports
from tests.unit import test_exports
from tests.world.test_observe import Lines, train, wrong
from tests.world.test_observe_tools import fresh, judged, llama
from tests.worlds import run_each

ACCELERATED = """
import json, sys
import torch
from accelerate import Accelerator
from torch import nn

import shardwise
from shardwise.integrations.accelerate import observe

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
data = torch.utils.data.TensorDataset(torch.randn(48, 8) + torch.arange(8), torch.arange(48) // 47)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-2), loader)
losses, receipts = [], []
with observe(accelerator, sys.argv[2], precision=sys.argv[3], grad_accum=2, on_receipt=receipts.append):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
if accelerator.is_main_process:
    wrong = {line.name: line.found for line in receipts[0].lines if line.ok is False}
    text = {"ranks": accelerator.num_processes, "losses": losses, "wrong": wrong, "device": accelerator.device.type}
    open(sys.argv[1], "w").write(json.dumps(text))
accelerator.end_training()
"""


def started(words: list[str], folder: Path, **variables: str) -> None:
    env = configs.environment() | {"PYTHONPATH": str(configs.ROOT / "src"), "OMP_NUM_THREADS": "1", **variables}
    spent("ranks", 2)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr


def plan_of(strategy: str = "ddp", **keys: Any) -> Plan:
    sharded = "dp_shard" if strategy == "fsdp" else "dp_replicate"
    return Plan.model_validate(
        {"strategy": strategy, "dims": {sharded: 2}, "micro_batch": 4, "grad_accum": 2, "device": "cpu", **keys}
    )


def fsdp_from_the_file(folder: str) -> tuple[Lines, int]:
    """Train as the file says, once Accelerate's state is told to shard on CPUs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    fresh()
    _, variables = test_exports.TestAccelerate().read(plan_of("fsdp", recompute="full", device="cuda"), Path(folder))
    with mock.patch.dict(os.environ, {name: value for name, value in variables.items() if name.startswith("FSDP_")}):
        plugin = FullyShardedDataParallelPlugin()
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        model = llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    receipt = train(
        model,
        optimizer,
        "fsdp",
        call=lambda ids: model(ids).logits,
        backward=accelerator.backward,
        before_step=lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1),
        recompute=True,
        accum=2,
        grad_accum=2,
        clip_norm=0.1,
    )
    return wrong(receipt), judged(receipt)


def trainer_from_the_file(strategy: str, folder: str) -> tuple[Lines, list[float], list[str]]:
    """As it is: optimizer, schedule, clipping, evaluation and checkpoints with it."""
    from transformers import Trainer, TrainingArguments

    from shardwise.integrations.transformers import ReceiptCallback

    fresh()
    config = Config.model_validate(
        {
            "model": {"factory": "tests.models:byte_decoder"},
            "data": {"path": "python:json", "seq_len": 8},
            "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1, "clip_norm": 0.5},
            "train": {"steps": 4, "log_every": 1, "eval_every": 2, "output": f"{folder}/{strategy}"},
            "checkpoint": {"every": 3},
        }
    )
    found = export_trainer(plan_of(strategy), config, 0.5)
    callback = ReceiptCallback(on_receipt=lambda _: None)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, (64, 8), generator=generator)]
    arguments = TrainingArguments(**json.loads(found.text), disable_tqdm=True)
    trainer = Trainer(model=llama(), args=arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[callback])
    trainer.train()
    assert callback.receipt is not None
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return wrong(callback.receipt), losses, found.lost


def from_the_file(kind: str, folder: str) -> Any:
    return fsdp_from_the_file(folder) if kind == "accelerate" else trainer_from_the_file(kind, folder)


def test_trainer_and_fsdp_train_from_the_file(tmp_path: Path) -> None:
    """On CPUs Trainer leaves FSDP out: the receipt and the export say so."""
    kinds = ("accelerate", "ddp", "fsdp")
    accelerate, *trainer = run_each(from_the_file, 2, [(kind, str(tmp_path)) for kind in kinds], timeout_s=170)
    for lines, number in accelerate:
        assert not lines
        assert number >= 10
    for kind, ranks in zip(kinds[1:], trainer, strict=True):
        lines, losses, lost = ranks[0]
        assert lines.keys() == (set() if kind == "ddp" else {"wrapper", "parameters", "optimizer state"})
        assert len(losses) == 4 and losses[-1] < losses[0]
        assert any("runs DDP on a CPU" in line for line in lost) == (kind == "fsdp")
        assert (tmp_path / kind / "checkpoint-3").is_dir()


def test_accelerate_trains_from_the_file(tmp_path: Path) -> None:
    """Its own launcher starts the ranks, as the note says; the receipt agrees with the plan."""
    found = export_accelerate(plan_of(precision="bf16"), 1.0)
    (tmp_path / "file.yaml").write_text(found.text)
    (tmp_path / "script.py").write_text(ACCELERATED)
    (note,) = [line for line in found.notes if line.startswith("launch: ")]
    variable, *words = note.removeprefix("launch: ").partition(",")[0].split()
    assert (variable, words[:2], words[-1]) == ("ACCELERATE_USE_CPU=true", ["accelerate", "launch"], "script.py")
    words = ["file.yaml" if word == "FILE" else word for word in words[2:]]
    port = ["--main_process_port", str(free_ports(1)[0])]
    script = ["result.json", "ddp", "bf16"]
    started(["accelerate.commands.launch", *port, *words, *script], tmp_path, ACCELERATE_USE_CPU="true")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["device"], result["wrong"]) == (2, "cpu", {})
    assert len(result["losses"]) == 6 and result["losses"][-1] < result["losses"][0]
