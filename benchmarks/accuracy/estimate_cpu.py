"""What the fit receipt shows on real gloo ranks: `cost.memory.estimate` over a traced module against recorded peaks.

Strategy × recompute × precision × micro batch × accumulation × gradient sync × optimizer × world × model. Predicted as
``shardwise train`` predicts; measured by `shardwise.measure.peaks.CpuPeakRecorder` in the third step, on the rank
where each figure is largest.

    .venv/bin/python -m benchmarks.accuracy.estimate_cpu [--quick]

Writes results/estimate_cpu.json with every sample; prints the table, the worst first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.model.architecture import Architecture
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.native import Native
from tests.worlds import run_world

RESULTS = Path(__file__).parent / "results" / "estimate_cpu.json"
LENGTH, VOCAB, STEPS = 128, 2048, 3
PHASES = ("forward", "backward", "optimizer")
KEYS = (
    "strategy",
    "world",
    "recompute",
    "precision",
    "micro_batch",
    "grad_accum",
    "gradient_sync",
    "optimizer",
    "model",
)
# strategy, world, recompute, precision, micro batch, accumulation, gradient sync, optimizer, model
CONFIGURATIONS = (
    ("ddp", 1, "none", "fp32", 1, 1, "last", "adamw", "native"),
    ("ddp", 1, "none", "bf16", 4, 2, "last", "adamw", "native"),
    ("ddp", 1, "full", "fp32", 4, 1, "last", "sgd", "hf"),
    ("ddp", 2, "none", "bf16", 1, 1, "last", "adamw", "native"),
    ("ddp", 2, "none", "bf16", 4, 1, "last", "adamw", "hf"),
    ("ddp", 2, "none", "fp32", 4, 1, "last", "adamw", "hf"),
    ("ddp", 2, "selective", "fp32", 4, 2, "last", "sgd", "native"),
    ("ddp", 2, "full", "bf16", 4, 1, "last", "adamw", "native"),
    ("ddp", 4, "full", "bf16", 1, 2, "last", "sgd", "hf"),
    ("ddp", 4, "selective", "bf16", 4, 1, "last", "adamw", "native"),
    ("zero1", 2, "none", "fp32", 1, 1, "last", "adamw", "native"),
    ("zero1", 2, "full", "bf16", 4, 2, "last", "sgd", "native"),
    ("zero1", 4, "none", "bf16", 4, 1, "last", "adamw", "hf"),
    ("zero1", 4, "selective", "fp32", 4, 1, "last", "adamw", "native"),
    ("zero2", 2, "none", "fp32", 4, 1, "last", "adamw", "native"),
    ("zero2", 2, "full", "bf16", 4, 2, "last", "adamw", "hf"),
    ("zero2", 4, "none", "bf16", 1, 2, "every", "sgd", "native"),
    ("zero2", 4, "selective", "fp32", 1, 2, "last", "adamw", "hf"),
    ("fsdp", 1, "none", "bf16", 4, 1, "last", "adamw", "native"),
    ("fsdp", 2, "none", "fp32", 4, 1, "last", "adamw", "hf"),
    ("fsdp", 2, "none", "bf16", 1, 1, "last", "adamw", "native"),
    ("fsdp", 2, "full", "fp32", 1, 2, "last", "sgd", "native"),
    ("fsdp", 2, "selective", "bf16", 4, 1, "last", "adamw", "native"),
    ("fsdp", 4, "none", "bf16", 4, 2, "every", "adamw", "hf"),
    ("fsdp", 4, "full", "bf16", 4, 1, "last", "adamw", "native"),
    ("fsdp", 4, "full", "fp32", 4, 2, "every", "adamw", "native"),
    ("fsdp", 4, "none", "fp32", 1, 2, "last", "sgd", "native"),
    ("hsdp", 4, "none", "bf16", 4, 1, "last", "adamw", "native"),
    ("hsdp", 4, "full", "fp32", 4, 2, "last", "adamw", "hf"),
    ("hsdp", 4, "selective", "bf16", 1, 2, "every", "sgd", "native"),
    ("ddp", 1, "none", "fp32", 4, 1, "last", "decay", "gpt"),
    ("ddp", 2, "none", "bf16", 4, 1, "last", "loop", "gpt"),
    ("zero1", 2, "full", "fp32", 1, 1, "last", "loop", "native"),
    ("zero2", 2, "selective", "bf16", 4, 1, "last", "decay", "gpt"),
    ("fsdp", 2, "none", "fp32", 1, 1, "last", "loop", "gpt"),
    ("fsdp", 2, "full", "bf16", 4, 2, "last", "loop", "gpt"),
    ("ddp+cp2", 2, "none", "bf16", 4, 1, "last", "adamw", "hf"),
    ("zero1+cp2", 2, "selective", "fp32", 4, 2, "last", "adamw", "hf"),
    ("fsdp+cp2", 2, "none", "fp32", 4, 1, "last", "adamw", "hf"),
    ("fsdp+cp2", 4, "full", "bf16", 4, 2, "last", "adamw", "hf"),
    ("hsdp+cp2", 4, "none", "bf16", 4, 1, "last", "sgd", "hf"),
    ("ddp+pp2", 2, "none", "fp32", 4, 1, "last", "adamw", "native"),
    ("ddp+pp2", 2, "none", "bf16", 4, 4, "last", "adamw", "hf"),
    ("ddp+pp2", 2, "full", "bf16", 4, 2, "last", "sgd", "gpt"),
    ("ddp+pp2", 4, "none", "fp32", 4, 4, "last", "adamw", "native"),
    ("ddp+pp4", 4, "selective", "bf16", 1, 8, "last", "adamw", "native"),
    ("fsdp+pp2", 4, "none", "bf16", 4, 4, "last", "adamw", "native"),
    ("fsdp+pp2", 4, "full", "fp32", 4, 2, "last", "adamw", "hf"),
    ("zero2+pp2", 4, "none", "bf16", 4, 4, "last", "adamw", "native"),
    ("hsdp+pp2", 8, "none", "fp32", 4, 2, "last", "sgd", "native"),
    ("ddp+tp2", 2, "none", "fp32", 4, 1, "last", "adamw", "hf"),
    ("ddp+tp2", 2, "none", "bf16", 4, 1, "last", "adamw", "native"),
    ("ddp+tp2", 2, "full", "bf16", 4, 2, "last", "adamw", "hf"),
    ("ddp+tp2", 2, "none", "fp32", 4, 1, "last", "sgd", "gpt2"),
    ("ddp+tp2", 4, "none", "bf16", 4, 2, "last", "adamw", "native"),
    ("ddp+tp4", 4, "selective", "bf16", 4, 1, "last", "adamw", "hf"),
    ("fsdp+tp2", 4, "none", "fp32", 4, 2, "last", "adamw", "native"),
    ("fsdp+tp2", 4, "full", "bf16", 4, 1, "last", "adamw", "native"),
    ("fsdp+tp2", 4, "none", "bf16", 4, 1, "last", "adamw", "hf"),
    ("hsdp+tp2", 8, "none", "fp32", 4, 1, "last", "adamw", "native"),
    ("ddp+tp2+pp2", 4, "none", "bf16", 4, 2, "last", "adamw", "native"),
    ("fsdp+tp2+pp2", 8, "none", "bf16", 4, 4, "last", "adamw", "native"),
    ("fsdp+tp2+cp2", 8, "none", "bf16", 4, 1, "last", "adamw", "hf"),
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "sgd": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0},
    "decay": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "loop": {"factory": "torch.optim:AdamW"},
}
SHAPE = Architecture(
    name="small",
    family="llama",
    layers=6,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn=704,
    vocab=VOCAB,
    max_seq_len=LENGTH,
)


def native() -> nn.Module:
    """A decoder in the way of Llama, written the plain way."""
    return Native(SHAPE)


def huggingface() -> nn.Module:
    """Its like from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.ffn,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt() -> nn.Module:
    """Layer norms, biases, learned positions, dropout, a head that is the embedding."""
    other = {"norm": "layer", "positions": "learned", "gated": False, "fused_qkv": True, "tied": True, "ffn": 1024}
    biased = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True, "kv_heads": SHAPE.heads}
    module = Native(SHAPE.model_copy(update={"family": "gpt2", **other, **biased}))
    for block in module.layers:
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.1))
    return module


def gpt2() -> nn.Module:
    """GPT-2 from transformers: a fused projection, whose columns tensor parallel exchanges, and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_embd": SHAPE.hidden, "n_layer": SHAPE.layers, "n_head": SHAPE.heads}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, n_positions=LENGTH, use_cache=False))


MODELS: dict[str, Callable[[], nn.Module]] = {"native": native, "hf": huggingface, "gpt": gpt, "gpt2": gpt2}


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan of one configuration."""
    return Plan(
        strategy=row["strategy"],
        dims=dims_for(parse_strategy(row["strategy"]), row["world"]),
        micro_batch=row["micro_batch"],
        grad_accum=row["grad_accum"],
        gradient_sync=row["gradient_sync"],
        seq_len=LENGTH,
        precision=row["precision"],
        recompute=row["recompute"],
        loss_parallel=parse_strategy(row["strategy"]).tp > 1,
    )


def table_of(row: dict[str, Any]) -> dict[str, Any]:
    """The config's table of the optimizer: fused AdamW, SGD without and with weight decay, AdamW in its plain loop."""
    return OPTIMIZERS[row["optimizer"]]


def measured(document: str, optimizer: dict[str, Any], model: str, estimate: str) -> dict[str, Any]:
    """On one rank: train three steps under the receipt, and give the peaks that it saw."""
    from shardwise.cost.memory.estimate import Estimate
    from shardwise.distributed.process_group import join
    from shardwise.parallel.materialize import build
    from shardwise.receipts.fit import FitRecorder
    from shardwise.train.config import OptimizerTable
    from shardwise.train.loss import token_loss_sum
    from shardwise.train.optimizer import build_optimizer
    from shardwise.train.session import Session

    plan, ranks = Plan.model_validate_json(document), join("cpu")
    generator = torch.Generator().manual_seed(plan.dims.place(ranks.rank).dp)
    probe = FitRecorder(Estimate.model_validate_json(estimate))

    def windows() -> Iterator[list[Any]]:
        for _ in range(STEPS):
            shape = (plan.micro_batch or 1, LENGTH)
            ids = [torch.randint(VOCAB, shape, generator=generator) for _ in range(plan.grad_accum)]
            yield [(part, part.clone()) for part in ids]

    session = Session(ranks=ranks, planner=lambda *_: plan)
    session.observers.append(probe)
    module = build(MODELS[model], 0, real=ranks.is_main)
    made = build_optimizer(module.parameters(), OptimizerTable(**optimizer))
    outer, made = session.prepare(module, made)
    del module
    for step in session.run_windows(windows()):
        if plan.dims.pp > 1:
            step.run(outer, token_loss_sum)
        else:
            for micro in step:
                step.backward(token_loss_sum(outer(micro.inputs), micro.labels))
        step.update(made, clip_norm=1.0)
    session.close()
    if probe.peaks is None:
        raise RuntimeError("nothing was recorded")
    return probe.peaks.model_dump()


def predicted(row: dict[str, Any]) -> tuple[Any, int, float]:
    """The estimate that ``shardwise train`` compares with, the search's quick one, and the seconds of the former."""
    from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
    from shardwise.hardware.cluster import ClusterSpec
    from shardwise.model.trace import build_on_meta
    from shardwise.run.inspect_model import traced_profile, workload_for
    from shardwise.train.config import OptimizerTable

    plan = plan_of(row)
    module = build_on_meta(MODELS[row["model"]], row["model"])
    profile = traced_profile(module, LENGTH, VOCAB, precision=plan.precision, device=plan.device)
    workload = workload_for(module, OptimizerTable(**table_of(row)), plan.device)
    workload = workload.model_copy(update={"seq_len": LENGTH, "global_batch": plan.global_batch})
    cluster = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=row["world"])
    began = time.perf_counter()
    found = estimate(profile, plan, workload, cluster)
    return found, peak_lower_bound(profile, plan, workload), time.perf_counter() - began


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """One configuration: bytes predicted and measured by phase, and their ratio less one."""
    found, quick, seconds = predicted(row)
    world, document = row["world"], plan_of(row).to_json()
    real = run_world(measured, world, document, table_of(row), row["model"], found.model_dump_json())[0]
    said = {str(phase.name): phase.allocated for phase in found.phases}
    if "+pp" in row["strategy"]:  # forwards and backwards alternate, and are measured as one
        said |= dict.fromkeys(("forward", "backward"), max(said["forward"], said["backward"]))
        real["allocated"] |= dict.fromkeys(("forward", "backward"), max(real["allocated"].values()))
    errors = {phase: said[phase] / real["allocated"][phase] - 1.0 for phase in PHASES}
    peak = max(real["allocated"].values())
    return row | {
        "predicted": {phase: said[phase] for phase in PHASES},
        "measured": real,
        "errors": errors,
        "error": max(said[phase] for phase in PHASES) / peak - 1.0,
        "screen": quick,
        "allocated": found.allocated,
        "seconds": seconds,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the table's foot."""
    by_phase = {phase: [row["errors"][phase] for row in rows] for phase in PHASES} | {
        "peak": [row["error"] for row in rows]
    }
    return {
        "configurations": len(rows),
        "median_abs_error": {name: statistics.median(map(abs, errors)) for name, errors in by_phase.items()},
        "worst_error": {name: max(errors, key=abs) for name, errors in by_phase.items()},
        "screen_above_estimate": sum(row["screen"] > row["allocated"] for row in rows),
        "slowest_s": max(row["seconds"] for row in rows),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run, write, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one configuration in six; writes nothing")
    parser.add_argument("--only", default="", help="configurations whose text holds this; writes nothing")
    options = parser.parse_args()
    chosen = [dict(zip(KEYS, values, strict=True)) for values in CONFIGURATIONS]
    chosen = [row for row in chosen if all(word in text_of(row).split() for word in options.only.split())]
    rows = []
    for row in chosen[::6] if options.quick else chosen:
        rows.append(compare(row))
        print(f"{len(rows)} of {len(chosen)}", file=sys.stderr)
    rows.sort(key=lambda row: -max(map(abs, row["errors"].values())))
    print("forward backward optimizer    peak   configuration")
    for row in rows:
        by_phase = " ".join(f"{row['errors'][phase]:+8.1%}" for phase in PHASES)
        print(f"{by_phase} {row['error']:+8.1%}   {text_of(row)}")
    foot = summary(rows)
    print(json.dumps(foot, indent=1))
    if not (options.quick or options.only):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"schema": 1, "summary": foot, "rows": rows}, indent=1) + "\n")


def text_of(row: dict[str, Any]) -> str:
    """A configuration on one line."""
    return " ".join(str(row[key]) for key in KEYS)


if __name__ == "__main__":
    main()
