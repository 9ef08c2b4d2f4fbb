"""Keys of Accelerate's YAML, version 1.15."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.fsdp_keys import FSDP_OF_TRAINER, fsdp_strategy
from shardwise.interop.files.key_table import (
    Reading,
    Rule,
    group,
    idle,
    inner,
    left_out,
    part_of,
    refused,
    takes,
    whole,
)
from shardwise.interop.files.zero_file import set_zero, zero_strategy


def _kind(reading: Reading, key: str, value: Any) -> None:
    known = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
    if str(value).upper() in known or value is False:  # YAML 1.1 reads a bare NO as false
        reading.taken.append(FileKey(key, value, "strategy"))
    else:
        reading.refuse(key, value, f"is not run; it is one of {', '.join(known)}")


def _precision(reading: Reading, key: str, value: Any) -> None:
    if str(value).lower() in ("no", "false"):
        reading.plan["precision"] = "fp32"
    elif value in ("bf16", "fp16"):
        reading.plan["precision"] = value
    else:
        reading.refuse(key, value, "is not run; it is no, bf16 or fp16")
        return
    reading.taken.append(FileKey(key, value, "precision"))


_RULES_OF_DEEPSPEED: dict[str, Rule] = {
    "zero_stage": part_of("strategy"),
    "offload_optimizer_device": part_of("strategy"),
    "offload_param_device": part_of("strategy"),
    "deepspeed_config_file": part_of("strategy"),
    "gradient_accumulation_steps": part_of("grad_accum"),
    "gradient_clipping": part_of("optimizer.clip_norm"),
    "zero3_init_flag": idle("weights are created sharded"),
    "zero3_save_16bit_model": idle("how the run is saved, which Shardwise does whole"),
    "offload_optimizer_nvme_path": refused("import the DeepSpeed file by itself for a drive", "none"),
    "offload_param_nvme_path": refused("import the DeepSpeed file by itself for a drive", "none"),
    "deepspeed_moe_layer_cls_names": refused("expert models are not run"),
    "enable_msamp": refused("fp8 is not run"),
    "msamp_opt_level": refused("fp8 is not run"),
    **dict.fromkeys(
        (
            "deepspeed_multinode_launcher",
            "deepspeed_hostfile",
            "deepspeed_inclusion_filter",
            "deepspeed_exclusion_filter",
        ),
        idle("ranks are started by shardwise launch"),
    ),
}
_RULES_OF_AXES: dict[str, Rule] = {
    **{f"parallelism_config_{axis}_size": part_of("strategy") for axis in ("dp_replicate", "dp_shard", "tp", "cp")},
    "parallelism_config_sp_size": refused("DeepSpeed's sequence parallel is not run; use cp", 1),
    **dict.fromkeys(
        (
            "parallelism_config_cp_comm_strategy", "parallelism_config_cp_backend", "parallelism_config_sp_backend",
            "parallelism_config_sp_seq_length", "parallelism_config_sp_seq_length_is_variable",
            "parallelism_config_sp_attn_implementation",
        ),
        left_out("Shardwise has its own exchange of context parallel"),
    ),
}  # fmt: skip
_RULES_OF_DYNAMO: dict[str, Rule] = {
    "dynamo_backend": part_of("parallel.compile"),
    "dynamo_use_regional_compilation": left_out("each block is compiled by itself"),
    "dynamo_mode": left_out("the compiler's own default is used"),
    "dynamo_use_fullgraph": left_out("a graph break is refused"),
    "dynamo_use_dynamic": left_out("samples have one length"),
}
ACCELERATE_RULES: dict[str, Rule] = {
    "compute_environment": refused("runs are local, or by shardwise launch", "LOCAL_MACHINE"),
    "distributed_type": _kind,
    "mixed_precision": _precision,
    "num_processes": part_of("ranks"),
    "num_machines": part_of("ranks"),
    "use_cpu": part_of("device"),
    "fsdp_config": inner(FSDP_OF_TRAINER),
    "deepspeed_config": inner(_RULES_OF_DEEPSPEED),
    "parallelism_config": inner(_RULES_OF_AXES),
    "dynamo_config": inner(_RULES_OF_DYNAMO),
    "dynamo_backend": part_of("parallel.compile"),
    "fp16": part_of("precision"),
    "main_training_function": left_out("the loop is that of shardwise train"),
    "gradient_accumulation_steps": takes("plan.grad_accum", whole),
    "fp8_config": refused("fp8 is not run"),
    "megatron_lm_config": refused("Megatron is not run; name tp and pp in a strategy"),
    "downcast_bf16": refused("runs on TPUs", False, "no"),
    **group(
        idle,
        {
            "ranks are started by shardwise launch": "machine_rank gpu_ids main_process_ip main_process_port "
            "rdzv_backend same_network enable_cpu_affinity mpirun_config",
            "prints more": "debug",
        },
    ),
    **group(
        refused,
        {
            "runs on TPUs": "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands",
            "runs on SageMaker": "ec2_instance_type iam_role_name image_uri profile region base_job_name "
            "pytorch_version transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file "
            "additional_args",
            "runs on Intel's devices": "ipex_config",
        },
    ),
}


def finish_accelerate(reading: Reading, values: Mapping[str, Any]) -> None:
    """Find the strategy that Accelerate runs, which the keys alone do not say."""
    kind = str(values.get("distributed_type", "NO")).upper()
    cpu = bool(values.get("use_cpu")) or kind == "MULTI_CPU"
    if "distributed_type" not in values:
        reading.problems.append("distributed_type is missing; Accelerate needs it")
    reading.plan["device"] = "cpu" if cpu else "cuda"
    reading.ranks = whole(values.get("num_processes") or 1)
    if reading.ranks > 1 and kind in ("NO", "FALSE", "MULTI_CPU"):
        reading.means.append(
            f"distributed_type {kind}: by the file alone accelerate launch starts one process, and num_processes is "
            f"{reading.ranks}"
        )
    if values.get("fp16") and "mixed_precision" not in values:
        reading.plan["precision"] = "fp16"
    if kind == "FSDP":
        fsdp_strategy(reading, values.get("fsdp_config") or {}, cpu=cpu, default_version=1)
    elif kind == "DEEPSPEED":
        _deepspeed(reading, values.get("deepspeed_config") or {})
    elif values.get("fsdp_config") or values.get("deepspeed_config"):
        unused = "fsdp_config" if values.get("fsdp_config") else "deepspeed_config"
        reading.means.append(
            f"{unused} is set and distributed_type is {kind}: Accelerate ignores the table and trains DDP"
        )
    reading.plan.setdefault("strategy", "ddp")
    _axes(reading, values.get("parallelism_config") or {})
    dynamo = (values.get("dynamo_config") or {}).get("dynamo_backend") or values.get("dynamo_backend") or "NO"
    if str(dynamo).upper() not in ("NO", "FALSE"):
        reading.put("parallel.compile", True)
        if str(dynamo).upper() != "INDUCTOR":
            reading.refuse("dynamo_backend", dynamo, "the compiler is INDUCTOR")
    reading.open.append(
        FileKey("batch", "", "not in the file; the batch size of the script's DataLoader is the micro batch")
    )
    if "gradient_accumulation_steps" not in values and kind != "DEEPSPEED":
        reading.open.append(
            FileKey("accumulation", "", "Accelerator(gradient_accumulation_steps=...) in the script sets it")
        )
    reading.open.append(
        FileKey("clipping", "", "accelerator.clip_grad_norm_(...) in the script sets it; here optimizer.clip_norm")
    )


def _deepspeed(reading: Reading, table: Mapping[str, Any]) -> None:
    if table.get("deepspeed_config_file"):
        own = ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps")
        for key in (*own, "gradient_clipping"):
            if table.get(key) not in (None, "none"):
                why = "Accelerate refuses it beside deepspeed_config_file, which says it; remove it"
                reading.refuse(f"deepspeed_config.{key}", table[key], why)
        zero_strategy(reading, "deepspeed_config.deepspeed_config_file", table["deepspeed_config_file"])
        return
    devices = [{"device": table.get(f"offload_{part}_device") or "none"} for part in ("optimizer", "param")]
    set_zero(reading, table.get("zero_stage", 2), *devices)
    steps, norm = table.get("gradient_accumulation_steps", 1), table.get("gradient_clipping")
    if steps == "auto":
        reading.open.append(
            FileKey("gradient_accumulation_steps", steps, "is a value for Trainer; set train.grad_accum")
        )
    else:
        reading.plan["grad_accum"] = whole(steps)
    if norm not in (None, "auto"):
        reading.put("optimizer.clip_norm", float(norm) or "none")
    elif norm is None:
        reading.means.append("gradient_clipping is left out: Accelerate gives DeepSpeed no clipping of its own then")


def _axes(reading: Reading, table: Mapping[str, Any]) -> None:
    sizes = {
        axis: whole(table.get(f"parallelism_config_{axis}_size") or 1)
        for axis in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    strategy, product = reading.plan["strategy"], math.prod(sizes.values())
    if 1 < product != reading.ranks:
        reading.refuse(
            "parallelism_config", sizes, f"its sizes make {product} ranks, and num_processes is {reading.ranks}"
        )
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] > 1 and strategy.startswith("zero2"):
        reading.refuse("reshard_after_forward", False, "replicas of shard groups are resharded here; set it to true")
    if sizes["dp_replicate"] > 1 and strategy.startswith("fsdp"):
        reading.plan["dp_replicate"] = sizes["dp_replicate"]
        reading.plan |= {"dp_shard": sizes["dp_shard"]} if sizes["dp_shard"] > 1 else {}
        strategy = strategy.replace("fsdp", "hsdp", 1)
    strategy += "".join(f"+{axis}{sizes[axis]}" for axis in ("tp", "cp") if sizes[axis] > 1)
    reading.plan["strategy"] = strategy
