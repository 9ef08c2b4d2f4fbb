"""Export a plan and a config as Python that sets the fields of torchtitan's ``Trainer.Config``."""

from __future__ import annotations

from typing import Any

from shardwise.errors import PlanError
from shardwise.interop.exported import Exported
from shardwise.interop.plan_parts import base_problems, unexpressed
from shardwise.plan.plan import Plan
from shardwise.train.config import Config

TOOL = "torchtitan"
VERSION = "0.3.0"
_HAS = {"recompute", "compile", "offload", "+tp", "+pp", "+cp", "pipeline_schedule", "async_tp", "sequence_parallel"}
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


def export_titan(plan: Plan, config: Config | None, clip_norm: float | None) -> Exported:
    """Write a function that puts ``plan``, and the optimizer of ``config``, into a config of torchtitan's registry.

    Raises:
        PlanError: torchtitan has no equivalent of the strategy.
    """
    problems = base_problems(plan, TOOL, ("ddp", "zero2", "fsdp", "hsdp"))
    if plan.parsed.engine != "torch":
        problems.append(f"strategy '{plan.strategy}': torchtitan has no DeepSpeed; use fsdp")
    if plan.precision == "fp16":
        problems.append("precision fp16: torchtitan has no loss scaling; use bf16")
    if plan.parsed.adapter != "none":
        problems.append(f"strategy '{plan.strategy}': torchtitan's adapters are not written in this version")
    if problems:
        raise PlanError(*problems)
    fields, lost = titan_fields(plan, config, clip_norm), titan_losses(plan, config, clip_norm)
    lines = [f"    config.{name} = {value!r}" for name, value in fields.items()]
    ac = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}[plan.recompute]
    lines.append(f"    config.activation_checkpoint = {ac}")
    imports = {"selective": ["SelectiveAC"], "full": ["FullAC"]}.get(plan.recompute, [])
    head = [f"from torchtitan.distributed.activation_checkpoint import {name}" for name in imports]
    optimizer = []
    if config is not None:
        table = config.optimizer
        if table.factory is None and table.name == "adamw":
            head.insert(0, "from torchtitan.components.optimizer import default_adamw")
            given = (
                f"lr={table.lr!r}, betas={tuple(table.betas)!r}, eps={table.eps!r}, weight_decay={table.weight_decay!r}"
            )
            optimizer.append(f"    config.optimizer = default_adamw({given})")
    body = [
        f'"""A plan of Shardwise for torchtitan {VERSION}: {plan.strategy}, {plan.dims}, {plan.precision}."""',
        "",
        *head,
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def with_plan(config: Trainer.Config) -> Trainer.Config:",
        '    """Put the plan into a config of a model\'s config_registry, such as llama3_8b()."""',
        *lines,
        *optimizer,
        "    return config",
    ]
    notes = [
        "import it in a config_registry of yours: def mine(): return with_plan(llama3_8b())",
        f"launch: torchrun --nproc-per-node {plan.dims.world_size} -m torchtitan.train --module MODULE --config mine",
        "the model, the tokenizer and the data are those of torchtitan's registry, and the order of samples, too",
    ]
    return Exported("\n".join(body) + "\n", lost, notes, {"fields": fields})


def titan_fields(plan: Plan, config: Config | None, clip_norm: float | None) -> dict[str, Any]:
    """Return torchtitan's fields by dotted name."""
    dims, strategy = plan.dims, plan.parsed
    sharded = strategy.shards_parameters
    fields: dict[str, Any] = {
        "training.local_batch_size": plan.micro_batch,
        "training.global_batch_size": plan.global_batch,
        "training.mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "parallelism.data_parallel_replicate_degree": dims.dp_replicate if sharded else dims.dp,
        "parallelism.data_parallel_shard_degree": dims.dp_shard if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": "never"
        if strategy.base == "zero2"
        else "always"
        if sharded
        else "default",
        "parallelism.tensor_parallel_degree": dims.tp,
        "parallelism.pipeline_parallel_degree": dims.pp,
        "parallelism.context_parallel_degree": dims.cp,
        "compile.enable": plan.compile,
    }
    fields |= {"training.seq_len": plan.seq_len} if plan.seq_len is not None else {}
    fields |= {"training.max_norm": clip_norm} if clip_norm is not None else {}
    fields |= {"training.enable_cpu_offload": True} if strategy.offload else {}
    if dims.tp > 1:
        fields["parallelism.enable_sequence_parallel"] = plan.sequence_parallel
        fields |= {"compile.enable_async_tensor_parallel": True} if plan.async_tp else {}
    if dims.pp > 1:
        fields["parallelism.pipeline_parallel_schedule"] = _SCHEDULES.get(plan.pipeline_schedule, "1F1B")
        fields["parallelism.pipeline_parallel_microbatch_size"] = plan.micro_batch
        fields["training.local_batch_size"] = (plan.micro_batch or 1) * plan.grad_accum
    if config is not None:
        table, train = config.optimizer, config.train
        fields |= {"training.steps": train.steps} if train.steps is not None else {}
        fields |= {"debug.seed": train.seed, "lr_scheduler.warmup_steps": table.warmup_steps}
        fields["lr_scheduler.min_lr_factor"] = 1.0 if table.schedule == "constant" else table.min_lr_ratio
        fields["lr_scheduler.decay_type"] = "cosine" if table.schedule == "cosine" else "linear"
        fields["lr_scheduler.decay_ratio"] = table.decay_fraction if table.schedule == "wsd" else None
    return fields


def titan_losses(plan: Plan, config: Config | None, clip_norm: float | None) -> list[str]:
    """List what torchtitan has no field for, or does otherwise."""
    lost = unexpressed(plan, TOOL, _HAS)
    if plan.device == "cpu":
        lost.append("device cpu: torchtitan trains on accelerators only")
    if clip_norm is None:
        lost.append("no clipping: torchtitan always clips, to training.max_norm; set it to a number that none exceeds")
    if plan.dims.pp > 1 and plan.pipeline_schedule not in _SCHEDULES:
        lost.append(f"pipeline_schedule {plan.pipeline_schedule}: written as 1F1B")
    if config is not None:
        table, train = config.optimizer, config.train
        if table.factory is not None or table.name != "adamw":
            lost.append(f"optimizer {table.factory or table.name}: set config.optimizer yourself")
        if train.epochs is not None:
            lost.append(f"train.epochs = {train.epochs}: torchtitan counts steps; set train.steps")
        lost += [
            f"model.{key} = {value}: the model is torchtitan's own"
            for key in ("freeze", "loss")
            if (value := getattr(config.model, key))
        ]
        lost += [
            f"train.{key} = {value}: torchtitan has no field for it"
            for key in ("label_smoothing", "z_loss", "neftune_alpha", "ema_decay")
            if (value := getattr(train, key))
        ]
    return lost
