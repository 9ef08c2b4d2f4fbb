"""Export a plan as the YAML file of ``accelerate launch --config_file``."""

from __future__ import annotations

from typing import Any

from shardwise.errors import PlanError
from shardwise.interop.deepspeed.export import export_deepspeed
from shardwise.interop.exported import Exported
from shardwise.interop.plan_parts import base_problems, on_cpu, unexpressed
from shardwise.plan.plan import Plan
from shardwise.units import counted

TOOL = "accelerate"
_HAS = {"recompute", "compile", "offload", "nvme", "nvme_path", "+tp", "+cp"}
_WHYS = {
    "gradient_sync": "give Accelerator a GradientAccumulationPlugin with sync_each_batch=True",
    "adapter": "wrap the model with peft in your script",
    "find_unused_parameters": "give Accelerator a DistributedDataParallelKwargs",
    "static_graph": "give Accelerator a DistributedDataParallelKwargs",
    "bucket_cap_mb": "give Accelerator a DistributedDataParallelKwargs",
}


def export_accelerate(plan: Plan, clip_norm: float | None) -> Exported:
    """Write ``plan`` for Accelerate; ``clip_norm`` is the script's, and noted.

    Raises:
        PlanError: Accelerate has no equivalent of the strategy.
    """
    problems = base_problems(plan, TOOL, ("ddp", "zero2", "fsdp", "hsdp"))
    if plan.dims.pp > 1:
        problems.append(f"strategy '{plan.strategy}': Accelerate has no pipeline parallel training; take +pp out")
    if plan.dims.tp * plan.dims.cp > 1 and not plan.parsed.shards_parameters:
        problems.append(f"strategy '{plan.strategy}': Accelerate has +tp and +cp beside FSDP alone; use fsdp")
    if problems:
        raise PlanError(*problems)
    strategy, device = plan.parsed, plan.device
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(plan),
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "num_machines": 1,
        "num_processes": plan.dims.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": device == "cpu",
    }
    if strategy.engine == "deepspeed":
        document["deepspeed_config"] = _deepspeed_keys(plan, clip_norm)
    elif strategy.shards_parameters:
        document["fsdp_config"] = fsdp_keys(plan)
    if strategy.shards_parameters and (plan.dims.dp_replicate > 1 or plan.dims.tp * plan.dims.cp > 1):
        axes = {"dp_replicate": plan.dims.dp_replicate, "dp_shard": plan.dims.dp_shard}
        axes |= {"tp": plan.dims.tp, "cp": plan.dims.cp}
        document["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in axes.items()}
    if plan.compile:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    lost = unexpressed(plan, TOOL, _HAS, _WHYS) + on_cpu(plan, TOOL) + reduced_in_16_bits(plan)
    if plan.recompute == "selective":
        lost.append("recompute selective: fsdp_activation_checkpointing recomputes all of a block")
    if plan.recompute != "none" and not strategy.shards_parameters:
        lost.append(f"recompute {plan.recompute}: its key is FSDP's; call model.gradient_checkpointing_enable()")
    return Exported(_yaml(document), lost, script_notes(plan, clip_norm), document)


def fsdp_keys(plan: Plan) -> dict[str, Any]:
    """Return Accelerate's keys of FSDP2."""
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.parsed.base != "zero2",
        "fsdp_offload_params": plan.parsed.offload,
        "fsdp_activation_checkpointing": plan.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def reduced_in_16_bits(plan: Plan) -> list[str]:
    """Say that Accelerate's FSDP2 reduces gradients in the compute dtype, and Shardwise in fp32."""
    if plan.precision == "fp32" or not plan.parsed.shards_parameters or plan.parsed.engine != "torch":
        return []
    return [
        f"reduction in fp32: Accelerate's FSDP2 reduces gradients in {plan.precision}; for fp32 set "
        "accelerator.state.fsdp_plugin.mixed_precision_policy in your script"
    ]


def script_notes(plan: Plan, clip_norm: float | None) -> list[str]:
    """List what the user's script does beside Accelerate's file."""
    notes = [
        f"micro batch {plan.micro_batch}: DataLoader(batch_size={plan.micro_batch}), which each rank gets in turn",
        f"accumulation {plan.grad_accum}: Accelerator(gradient_accumulation_steps={plan.grad_accum}), and "
        "accelerator.accumulate(model) around each micro batch",
    ]
    if plan.grad_accum > 1 or plan.dims.dp > 1:
        notes.append(
            "Accelerate averages the means of micro batches: with padded or ragged samples divide a summed loss by the "
            "labels of the global batch instead"
        )
    if plan.seq_len is not None:
        notes.append(f"seq_len {plan.seq_len}: split samples to this length")
    if clip_norm is not None:
        notes.append(f"clipping: accelerator.clip_grad_norm_(model.parameters(), {clip_norm:g})")
    return [*notes, _launch(plan)]


def _launch(plan: Plan) -> str:
    """Say how to start; on CPUs the launcher starts one process, or several that train alone, unless it is told."""
    words, ranks = "accelerate launch --config_file FILE script.py", counted(plan.dims.world_size, "rank")
    if plan.device != "cpu" or plan.dims.world_size == 1 or plan.parsed.engine != "torch":
        return f"launch: {words}, {ranks}"
    flag = " --multi_gpu" if _kind(plan) == "MULTI_CPU" else ""
    return (
        f"launch: ACCELERATE_USE_CPU=true {words.replace(' --config', f'{flag} --config')}, {ranks}: by the file alone "
        f"Accelerate {'starts one process' if flag else 'has each rank train alone'} on CPUs"
    )


def _kind(plan: Plan) -> str:
    if plan.parsed.engine == "deepspeed":
        return "DEEPSPEED"
    if plan.parsed.shards_parameters:
        return "FSDP"
    if plan.dims.world_size == 1:
        return "NO"
    return "MULTI_CPU" if plan.device == "cpu" else "MULTI_GPU"


def _deepspeed_keys(plan: Plan, clip_norm: float | None) -> dict[str, Any]:
    """Return Accelerate's own keys for DeepSpeed; those that they lack go into a file of DeepSpeed's."""
    zero = export_deepspeed(plan, clip_norm=clip_norm)["zero_optimization"]
    return {
        "zero_stage": zero["stage"],
        "gradient_accumulation_steps": plan.grad_accum,
        "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
        "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
        "zero3_init_flag": False,
        **({} if clip_norm is None else {"gradient_clipping": clip_norm}),
    }


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
