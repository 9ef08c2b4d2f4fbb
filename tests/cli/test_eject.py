"""``shardwise export --to pytorch``: the script trains without Shardwise, with the same losses to the last bit."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.plan.plan import Plan
from tests.cli import configs
from tests.commands import shardwise
from tests.slurm import free_ports
from tests.worlds import run_world

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "attention_dropout": 0.1,
}
CHATS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
    for n in range(40)
]
STEPS, SAVED = 12, 8
Case = tuple[str, dict[str, Any], dict[str, dict[str, Any]]]
# name, keys of the plan, tables of the config
ONE_RANK: list[Case] = [
    ("ddp", {}, {}),
    ("fsdp", {"strategy": "fsdp"}, {}),
    # rows of conversations, isolated; the last batch is not full
    (
        "chat",
        {"micro_batch": 3},
        {"data": {"path": "chats.jsonl", "chat_template": "chatml", "seq_len": 64}, "train": {"epochs": 2}},
    ),
]
TWO_RANKS: list[Case] = [
    ("ddp2", {"grad_accum": 2}, {}),
    ("fsdp2", {"strategy": "fsdp", "grad_accum": 2}, {}),
    (
        "zero2",
        {"strategy": "zero2", "recompute": "full"},
        {
            "model": {"config": None, "factory": "tests.models:byte_decoder"},
            "data": {"path": "lines.jsonl", "heldout_fraction": 0},
            "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": None, "schedule": "wsd", "clip_norm": "none"},
            "train": {"epochs": 1, "label_smoothing": 0.1, "z_loss": 1e-3},
        },
    ),
    ("zero1", {"strategy": "zero1"}, {"train": {"steps": 4}, "optimizer": {"schedule": "linear"}}),
    ("bf16", {"precision": "bf16", "grad_accum": 2}, {"train": {"steps": 6}}),
]
COMPILED: list[Case] = [("compiled", {"compile": True}, {"train": {"steps": 4}})]
FOUR_RANKS: list[Case] = [
    (
        "hsdp",
        {
            "strategy": "hsdp",
            "dims": {"dp_replicate": 2, "dp_shard": 2},
            "grad_accum": 2,
            "precision": "bf16",
            "recompute": "full",
            "compile": True,
        },
        {"train": {"steps": 4}},
    ),
]


def ejected(folder: Path, case: Case, ranks: int) -> tuple[Path, list[float]]:
    """Train with Shardwise and eject: the script, and the losses that it must have."""
    name, keys, tables = case
    here = folder / name
    here.mkdir()
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(LLAMA))
    (here / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    (here / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {n}\n" * 9}) + "\n" for n in range(20)))
    document = {
        "model": {"config": str(here / "model"), "factory": None},
        "train": {
            "steps": None if "epochs" in tables.get("train", {}) else STEPS,
            "global_batch": None,
            "eval_every": 10,
            "eval_samples": 8,
        },
        "parallel": {"nproc": ranks, "threads": 1},
        "checkpoint": {"every": SAVED},
    }
    for table, values in tables.items():
        document[table] = document.get(table, {}) | values
    data = document.setdefault("data", {})
    data["path"] = str(here / data["path"]) if "path" in data else "python:json"
    if not data.get("heldout_fraction", 1):
        del document["train"]["eval_every"], document["checkpoint"]
    config = configs.write_config(here, **document)
    sharded = keys.get("strategy", "ddp") in ("fsdp", "zero2")
    dims = {"dp_shard" if sharded else "dp_replicate": ranks}
    plan = here / "plan.toml"
    plan.write_text(Plan.model_validate({"micro_batch": 4, "dims": dims, **keys}).to_toml())
    configs.train(config, "--plan", str(plan))
    script = here / "train.py"
    shardwise("export", str(plan), "--to", "pytorch", "--config", str(config), "-o", str(script), "--lossy")
    return script, losses(here / "run")


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def run_script(script: str, port: int, later: int) -> None:
    """Run a script on this rank, as torchrun would; ``later`` is a port for the world's own group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    assert "import shardwise" not in Path(script).read_text()
    runpy.run_path(script, run_name="__main__")
    os.environ["MASTER_PORT"] = str(later)
    dist.init_process_group("gloo")


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("ranks", "cases"), [(1, ONE_RANK), (2, TWO_RANKS), (2, COMPILED), (4, FOUR_RANKS)])
def test_the_losses_are_those_of_shardwise_to_the_last_bit(ranks: int, cases: list[Case], tmp_path: Path) -> None:
    found = [ejected(tmp_path, case, ranks) for case in cases]
    for script, _ in found:
        run_world(run_script, ranks, str(script), *free_ports(2), timeout_s=240.0)
    resumed = [script for (name, _, _), (script, _) in zip(cases, found, strict=True) if name in ("ddp2", "fsdp2")]
    for script in resumed:  # as if killed after its first checkpoint
        shutil.rmtree(script.parent / "run-pytorch" / f"step-{STEPS:08}")
        run_world(run_script, ranks, str(script), *free_ports(2), timeout_s=240.0)
        rows = losses(script.parent / "run-pytorch")
        assert rows[STEPS:] == rows[SAVED:STEPS]
        log = script.parent / "run-pytorch" / "metrics.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:STEPS]))
    for (name, _, _), (script, wanted) in zip(cases, found, strict=True):
        assert losses(script.parent / "run-pytorch") == wanted, name
        assert len(wanted) >= (STEPS if name in ("ddp", "fsdp", "ddp2", "fsdp2") else 3), name
        text = script.read_text()
        assert len(text.splitlines()) < 300
        ruff = [sys.executable, "-m", "ruff", "--config", "line-length = 120"]
        for words in (["check", "--isolated", "--no-cache"], ["format", "--isolated", "--check", "--no-cache"]):
            done = subprocess.run([*ruff[:3], *words, *ruff[3:], str(script)], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def test_names_cannot_write_code_into_the_script(tmp_path: Path) -> None:
    model, output = tmp_path / 'm"""\nraise SystemExit\n"""', tmp_path / 'a"""b.py'
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    config = configs.write_config(
        tmp_path,
        model={"config": str(model), "factory": None},
        data={"path": "python:json"},
        train={"global_batch": None},
    )
    plan = tmp_path / "plan.toml"
    plan.write_text(Plan.model_validate({"micro_batch": 4}).to_toml())
    shardwise("export", str(plan), "--to", "pytorch", "--config", str(config), "-o", str(output), "--lossy")
    top = ast.parse(output.read_text()).body
    assert isinstance(top[1], ast.Import)
    assert str(model) in (ast.get_docstring(ast.parse(output.read_text())) or "")
