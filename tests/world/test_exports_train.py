"""Exported configurations train: Accelerate and Trainer start two ranks from the file that `shardwise export` wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.interop.accelerate_yaml import export_accelerate
from shardwise.interop.trainer_json import export_trainer
from shardwise.plan.plan import Plan
from shardwise.train.config import Config
from tests.cli import configs
from tests.slurm import free_ports

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
TRAINED = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardwise.integrations.transformers import ReceiptCallback

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, (64, 8))]
arguments = TrainingArguments(**json.load(open(sys.argv[2])))
callback = ReceiptCallback(on_receipt=lambda _: None)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[callback])
trainer.train()
if arguments.process_index == 0:
    wrong = {line.name: line.found for line in callback.receipt.lines if line.ok is False}
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    text = {"ranks": arguments.world_size, "losses": losses, "wrong": wrong, "device": arguments.device.type}
    open(sys.argv[1], "w").write(json.dumps(text))
"""


def started(words: list[str], folder: Path, **variables: str) -> None:
    env = configs.environment() | {"PYTHONPATH": str(configs.ROOT / "src"), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr


def plan_of(strategy: str = "ddp", **keys: Any) -> Plan:
    sharded = "dp_shard" if strategy == "fsdp" else "dp_replicate"
    return Plan.model_validate(
        {"strategy": strategy, "dims": {sharded: 2}, "micro_batch": 4, "grad_accum": 2, "device": "cpu", **keys}
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accelerate_trains_from_the_file(precision: str, tmp_path: Path) -> None:
    """Its own launcher starts the ranks, as the note says; the receipt agrees with the plan."""
    found = export_accelerate(plan_of(precision=precision), 1.0)
    (tmp_path / "file.yaml").write_text(found.text)
    (tmp_path / "script.py").write_text(ACCELERATED)
    (note,) = [line for line in found.notes if line.startswith("launch: ")]
    variable, *words = note.removeprefix("launch: ").partition(",")[0].split()
    assert (variable, words[:2], words[-1]) == ("ACCELERATE_USE_CPU=true", ["accelerate", "launch"], "script.py")
    words = ["file.yaml" if word == "FILE" else word for word in words[2:]]
    port = ["--main_process_port", str(free_ports(1)[0])]
    script = ["result.json", "ddp", precision]
    started(["accelerate.commands.launch", *port, *words, *script], tmp_path, ACCELERATE_USE_CPU="true")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["device"], result["wrong"]) == (2, "cpu", {})
    assert len(result["losses"]) == 6 and result["losses"][-1] < result["losses"][0]


def test_trainer_trains_from_the_file(tmp_path: Path) -> None:
    """As it is, the fused optimizer and the schedule with it; FSDP on a CPU is what the export says is lost."""
    config = Config.model_validate(
        {
            "model": {"factory": "tests.models:byte_decoder"},
            "data": {"path": "python:json", "seq_len": 8},
            "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1, "clip_norm": 0.5},
            "train": {"steps": 4, "log_every": 1, "eval_every": 2, "output": str(tmp_path / "out")},
            "checkpoint": {"every": 3},
        }
    )
    (tmp_path / "script.py").write_text(TRAINED)
    wrong = {}
    for strategy in ("ddp", "fsdp"):
        found = export_trainer(plan_of(strategy), config, 0.5)
        (tmp_path / f"{strategy}.json").write_text(found.text)
        port = ["--master-port", str(free_ports(1)[0])]
        words = [*port, "--nproc-per-node", "2", "script.py", f"{strategy}-result.json", f"{strategy}.json"]
        started(["torch.distributed.run", *words], tmp_path)
        result = json.loads((tmp_path / f"{strategy}-result.json").read_text())
        assert (result["ranks"], result["device"], len(result["losses"])) == (2, "cpu", 4)
        assert result["losses"][-1] < result["losses"][0]
        wrong[strategy] = result["wrong"]
        assert any("runs DDP on a CPU" in line for line in found.lost) == (strategy == "fsdp")
    assert wrong["ddp"] == {}
    assert wrong["fsdp"].keys() == {"wrapper", "parameters", "optimizer state"}
    assert (tmp_path / "out" / "checkpoint-3").is_dir()
