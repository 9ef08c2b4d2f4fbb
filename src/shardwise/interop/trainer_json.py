"""Export a plan and a config as the JSON of transformers' ``TrainingArguments``."""

from __future__ import annotations

import json
from typing import Any

from shardwise.errors import PlanError
from shardwise.interop.accelerate_yaml import reduced_in_16_bits
from shardwise.interop.deepspeed.export import export_deepspeed
from shardwise.interop.exported import Exported
from shardwise.interop.plan_parts import base_problems, on_cpu, unexpressed
from shardwise.plan.plan import Plan
from shardwise.train.config import Config, OptimizerTable

TOOL = "Trainer"
TRAINER_HAS: dict[str, tuple[str, ...]] = {
    "model": ("config", "factory", "kwargs", "weights", "freeze", "task"),
    "optimizer": (
        "name", "lr", "betas", "eps", "weight_decay", "schedule", "warmup_steps", "min_lr_ratio", "decay_fraction",
        "clip_norm",
    ),
    "train": (
        "steps", "epochs", "global_batch", "micro_batch", "grad_accum", "label_smoothing", "neftune_alpha", "seed",
        "output", "log_every", "eval_every", "trackers",
    ),
    "parallel": (
        "strategy", "nproc", "device", "dp_replicate", "dp_shard", "precision", "recompute", "compile",
        "find_unused_parameters", "static_graph", "bucket_cap_mb",
    ),
    "checkpoint": ("every", "keep"),
}  # fmt: skip
"""Keys of a config that `TrainingArguments` have; those of the model and of ``[data]`` are arguments of `Trainer`."""
_HAS = {
    "recompute", "compile", "offload", "nvme", "find_unused_parameters", "static_graph", "bucket_cap_mb",
}  # fmt: skip
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd"}


def export_trainer(plan: Plan, config: Config, clip_norm: float | None) -> Exported:
    """Write ``plan`` and ``config`` for Trainer.

    Raises:
        PlanError: Trainer has no equivalent of the strategy.
    """
    problems = base_problems(plan, TOOL, ("ddp", "zero2", "fsdp"))
    problems += [
        f"strategy '{plan.strategy}': +{axis} is not written for Trainer in this version; take +{axis} out"
        for axis in ("tp", "pp", "cp")
        if getattr(plan.dims, axis) > 1
    ]
    if problems:
        raise PlanError(*problems)
    strategy, train = plan.parsed, config.train
    document: dict[str, Any] = {
        "output_dir": train.output,
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        **({"max_steps": train.steps} if train.steps is not None else {"num_train_epochs": train.epochs}),
        "max_grad_norm": 0.0 if clip_norm is None else clip_norm,
        "average_tokens_across_devices": True,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "use_cpu": plan.device == "cpu",
        "seed": train.seed,
        "logging_steps": train.log_every,
        "report_to": list(train.trackers) or "none",
        "save_strategy": "steps" if config.checkpoint.every else "no",
        **(
            {"save_steps": config.checkpoint.every, "save_total_limit": config.checkpoint.keep}
            if config.checkpoint.every
            else {}
        ),
        "eval_strategy": "steps" if train.eval_every else "no",
        **({"eval_steps": train.eval_every} if train.eval_every else {}),
    }
    document |= {"label_smoothing_factor": train.label_smoothing} if train.label_smoothing else {}
    document |= {"neftune_noise_alpha": train.neftune_alpha} if train.neftune_alpha else {}
    keys, lost = _optimizer_keys(config.optimizer, train.steps)
    document |= keys | _strategy_keys(plan, clip_norm)
    lost += (
        unexpressed(plan, TOOL, _HAS) + on_cpu(plan, TOOL) + reduced_in_16_bits(plan) + lost_keys(config, TRAINER_HAS)
    )
    if plan.recompute == "selective":
        lost.append("recompute selective: Trainer recomputes all of a block")
    notes = [
        "the model and the data are arguments of Trainer; its order of samples is its own",
        f"launch: torchrun --nproc-per-node {plan.dims.world_size} script.py, or accelerate launch",
    ]
    if strategy.offload and strategy.engine == "torch":
        notes.append("cpu_offload leaves gradients and the optimizer's step on the CPU, as FSDP2's policy does here")
    text = json.dumps(document, indent=2) + "\n"
    return Exported(text, list(dict.fromkeys(lost)), notes, document)


def lost_keys(config: Config, has: dict[str, tuple[str, ...]]) -> list[str]:
    """List the keys that the config sets, other than to their defaults, and that are not among ``has``."""
    lost = []
    for table in ("model", "optimizer", "train", "parallel", "checkpoint", "launch"):
        given = getattr(config, table)
        for key in sorted(given.model_fields_set):
            usual = type(given).model_fields[key].get_default(call_default_factory=True)
            if key not in has.get(table, ()) and getattr(given, key) != usual:
                lost.append(f"{table}.{key} = {getattr(given, key)}: {TOOL} has no key for it")
    return lost


def _optimizer_keys(table: OptimizerTable, steps: int | None) -> tuple[dict[str, Any], list[str]]:
    lost = []
    keys: dict[str, Any] = {"learning_rate": table.lr, "weight_decay": table.weight_decay}
    if table.factory is not None or table.name not in _OPTIMIZERS:
        lost.append(f"optimizer {table.factory or table.name}: pass it to Trainer as optimizers=(optimizer, None)")
    else:
        keys["optim"] = _OPTIMIZERS[table.name]
    if table.name == "sgd" and table.momentum:
        keys["optim_args"] = f"momentum={table.momentum}"
    if table.name.startswith("adam"):
        keys |= {"adam_beta1": table.betas[0], "adam_beta2": table.betas[1], "adam_epsilon": table.eps}
    if table.weight_decay:
        lost.append(
            f"optimizer.weight_decay = {table.weight_decay}: Trainer decays no biases and no norms, and here all"
        )
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "wsd": "warmup_stable_decay"}
    keys |= {"lr_scheduler_type": names[table.schedule], "warmup_steps": table.warmup_steps}
    if table.schedule == "cosine" and table.min_lr_ratio:
        keys |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": table.min_lr_ratio}}
    if table.schedule == "linear" and table.min_lr_ratio:
        ends = {"lr_end": table.lr * table.min_lr_ratio, "power": 1.0}
        keys |= {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": ends}
    if table.schedule == "wsd":
        if steps is None:
            lost.append("optimizer.schedule = wsd: warmup_stable_decay needs the number of steps; set train.steps")
        else:
            ends = {"num_decay_steps": round(table.decay_fraction * steps), "min_lr_ratio": table.min_lr_ratio}
            keys["lr_scheduler_kwargs"] = {**ends, "decay_type": "linear"}
        if table.min_lr_ratio and table.warmup_steps:
            lost.append(
                f"optimizer.warmup_steps: Trainer's warm-up begins at {table.min_lr_ratio:g} × lr with wsd, not at 0"
            )
    if table.schedule != "constant" or table.warmup_steps:
        lost.append(
            "the rate of each step: Trainer's first step has the rate of step 0, so its rates come a step later"
        )
    return keys, lost


def _strategy_keys(plan: Plan, clip_norm: float | None) -> dict[str, Any]:
    strategy = plan.parsed
    found: dict[str, Any] = {"torch_compile": True} if plan.compile else {}
    if strategy.engine == "deepspeed":
        found["deepspeed"] = {k: v for k, v in export_deepspeed(plan, clip_norm=clip_norm).items() if k != "shardwise"}
    elif strategy.shards_parameters:
        found["fsdp"] = True
        found["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": strategy.base != "zero2",
            "cpu_offload": strategy.offload,
            "activation_checkpointing": plan.recompute == "full",
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    else:
        found["ddp_find_unused_parameters"] = plan.find_unused_parameters
        found |= {"ddp_static_graph": True} if plan.static_graph else {}
        found |= {"ddp_bucket_cap_mb": plan.bucket_cap_mb} if plan.bucket_cap_mb else {}
        found |= {"gradient_checkpointing": True} if plan.recompute == "full" else {}
    if strategy.engine == "deepspeed" and plan.recompute == "full":
        found["gradient_checkpointing"] = True
    return found
