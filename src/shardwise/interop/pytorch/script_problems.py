"""Which keys of a plan and a config a training script of plain PyTorch has, loses, or cannot be written with."""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

from shardwise.plan.plan import Plan
from shardwise.train.config import Config

SCRIPT_HAS: dict[str, tuple[str, ...]] = {
    "model": ("config", "factory", "kwargs", "weights", "freeze", "task"),
    "optimizer": (
        "name", "factory", "kwargs", "lr", "betas", "eps", "weight_decay", "momentum", "schedule", "warmup_steps",
        "decay_fraction", "min_lr_ratio", "clip_norm",
    ),
    "train": (
        "steps", "epochs", "global_batch", "micro_batch", "grad_accum", "label_smoothing", "z_loss", "seed", "output",
        "log_every", "eval_every", "eval_samples",
    ),
    "parallel": (
        "strategy", "nproc", "device", "dp_replicate", "dp_shard", "precision", "recompute",
        "recompute_layers", "compile",
        "find_unused_parameters", "static_graph", "bucket_cap_mb", "threads",
    ),
    "checkpoint": ("every", "resume"),
}  # fmt: skip
"""Keys that the script expresses; all of ``[data]`` are, by what they make of the samples."""
SCRIPT_LOSES: dict[str, str] = {
    "train.loss_chunks": "it computes all logits of a micro batch at once, with the memory of that",
    "train.neftune_alpha": "it adds no noise to embedded tokens, so that its losses differ",
    "train.ema_decay": "it keeps no average of the weights",
    "train.metrics": "it evaluates the loss alone",
    "train.generate": "it writes no continuations",
    "train.generate_tokens": "it writes no continuations",
    "train.best_metric": "it keeps no best checkpoint",
    "train.best_is": "it keeps no best checkpoint",
    "train.early_stopping": "it ends after its last step",
    "train.export": "it saves sharded checkpoints of torch.distributed.checkpoint only",
    "train.watch": "nothing watches its ranks",
    "train.profile": "it has no profiler",
    "train.profile_ranks": "it has no profiler",
    "train.trackers": "it writes metrics.jsonl only",
    "optimizer.in_backward": "it steps after the backward, with the memory of all gradients",
    "parallel.prefetch": "FSDP2 gathers one block ahead",
    "checkpoint.keep": "it removes no checkpoint",
    "checkpoint.folder": "it saves below OUTPUT",
    "checkpoint.async_save": "training waits for a checkpoint",
    "checkpoint.verify": "it keeps no hashes",
    "launch.min_nodes": "torchrun has --nnodes MIN:MAX",
    "launch.max_nodes": "torchrun has --nnodes MIN:MAX",
    "recompute": "selective recompute is recompute of nothing there, with the memory of that",
    "gradient_sync": "it reduces gradients after the last micro batch, with the memory of unsharded ones before",
}
"""What the script lacks where it is set, and what becomes of the run; the last two are keys of a plan."""


def script_losses(plan: Plan, config: Config) -> list[str]:
    """List what is set and the script lacks; each line says what becomes of it."""
    lost = []
    for table, key, value in _given(config):
        if (why := SCRIPT_LOSES.get(f"{table}.{key}")) and value != _usual(config, table, key):
            lost.append(f"{table}.{key} = {value}: {why}")
    of_plan: dict[str, tuple[Any, Any]] = {
        "recompute": (plan.recompute, "selective"),
        "gradient_sync": (plan.gradient_sync, "every"),
    }
    lost += [f"{key} = {value}: {SCRIPT_LOSES[key]}" for key, (value, odd) in of_plan.items() if value == odd]
    for key, name in (("loss_chunks", "train.loss_chunks"), ("prefetch", "parallel.prefetch")):
        if getattr(plan, key) > 1 and not any(line.startswith(name) for line in lost):
            lost.append(f"{key} = {getattr(plan, key)}: {SCRIPT_LOSES[name]}")
    if plan.parsed.base == "zero1":
        lost.append("checkpoints: torch.distributed.checkpoint cannot save ZeroRedundancyOptimizer, so there are none")
    return lost


def script_problems(plan: Plan, config: Config) -> list[str]:
    """List why there is no script of the plan and the config; empty if there is one."""
    strategy, table = plan.parsed, config.optimizer
    problems = [
        f"{where}.kwargs: {key!r} is no name of an argument; rename it"
        for where, kwargs in (("model", config.model.kwargs), ("optimizer", table.kwargs))
        for key in kwargs
        if not key.isidentifier() or iskeyword(key)
    ]
    whys = {
        "tp": "layers of this model sharded by hand",
        "pp": "the model split by hand",
        "cp": "attention over several ranks",
    }
    problems += [
        f"strategy '{plan.strategy}': +{axis} needs {need}, which a script of any model has not; take +{axis} out"
        for axis, need in whys.items()
        if max(getattr(strategy, axis), getattr(plan.dims, axis)) > 1
    ]
    if strategy.engine != "torch":
        problems.append(f"strategy '{plan.strategy}': DeepSpeed's engine is its own; use --to deepspeed")
    if strategy.adapter != "none":
        problems.append(f"strategy '{plan.strategy}': its adapters are not written in this version; use full weights")
    if strategy.offload or strategy.nvme:
        problems.append(f"strategy '{plan.strategy}': offload is not written in this version; take it out")
    if plan.precision in ("fp16", "fp8"):
        problems.append(f"precision {plan.precision}: its scaling is not written in this version; use bf16 or fp32")
    if plan.micro_batch is None:
        problems.append("the plan leaves the micro batch open; set micro_batch in the plan")
    if plan.objective != "lm":
        problems.append(f"objective {plan.objective}: the script trains language models on the next token")
    if config.model.trained_task != "causal-lm":
        problems.append(f"model.task {config.model.trained_task}: the script trains causal language models only")
    if config.model.loss is not None:
        problems.append(f"model.loss '{config.model.loss}': the script has the usual loss of causal-lm only; remove it")
    if table.factory is None and table.name not in ("adamw", "sgd"):
        problems.append(f"optimizer.name '{table.name}' is Shardwise's own; use adamw, sgd or optimizer.factory")
    if config.data.sources and any(one.weight is not None for one in config.data.sources):
        problems.append("data.sources: the script has no mixture by weights; remove the weights, or give data.path")
    own = [path for path in (config.model.factory, table.factory) if path is not None and path.startswith("shardwise")]
    problems += [f"'{path}' is Shardwise's, and the script is to run without it" for path in own]
    return problems


def _given(config: Config) -> list[tuple[str, str, Any]]:
    tables = [(name, getattr(config, name)) for name in type(config).model_fields]
    return [(name, key, getattr(table, key)) for name, table in tables for key in sorted(table.model_fields_set)]


def _usual(config: Config, table: str, key: str) -> Any:
    return type(getattr(config, table)).model_fields[key].get_default(call_default_factory=True)
