"""Keys of torchtitan's TOML, as releases up to 0.2 have it; since then its configurations are Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.hf_arguments import PRINTS, all_kept
from shardwise.interop.files.key_table import (
    Reading,
    Rule,
    count,
    group,
    idle,
    inner,
    left_out,
    number,
    part_of,
    refused,
    takes,
    to_set,
    whole,
)

_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "interleavedzerobubble": "interleaved-zero-bubble",
    "zbvzerobubble": "zbv",
}


def _recompute(reading: Reading, key: str, value: Any) -> None:
    if value in ("none", "selective", "full"):
        takes("plan.recompute")(reading, key, value)
    else:
        reading.refuse(key, value, "is not run; it is none, selective or full")


def _optimizer(reading: Reading, key: str, value: Any) -> None:
    if str(value).lower() in ("adam", "adamw"):
        reading.put("optimizer.name", "adamw")
        reading.taken.append(FileKey(key, value, "optimizer.name"))
        if str(value).lower() == "adam":
            reading.means.append("Adam of torchtitan adds the decay to gradients; AdamW here decays the weights")
    else:
        reading.refuse(key, value, "is not run; it is AdamW")


_TRAINING: dict[str, Rule] = {
    "dataset": to_set("torchtitan's data sets are its own; set data.path"),
    "dataset_path": to_set("set data.path"),
    "local_batch_size": part_of("micro_batch"),
    "global_batch_size": part_of("grad_accum"),
    "seq_len": takes("data.seq_len", whole),
    "max_norm": takes("optimizer.clip_norm", number),
    "steps": takes("train.steps", whole),
    "enable_cpu_offload": part_of("strategy"),
    "dtype": refused("weights are fp32 and cast in use", "float32"),
    "mixed_precision_param": part_of("precision"),
    "mixed_precision_reduce": idle("gradients are reduced in fp32"),
    "gc_freq": idle("when Python frees memory"),
    "gc_debug": idle("when Python frees memory"),
    "dataloader": idle("how samples are loaded, not which"),
    "seed": takes("train.seed", count),
    "deterministic": left_out("PyTorch's deterministic algorithms are not asked for"),
    "batch_size": part_of("micro_batch"),
    "compile": takes("parallel.compile", bool),
}
_PARALLELISM: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
            "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree",
            "pipeline_parallel_schedule",
        ),
        part_of("strategy"),
    ),
    "enable_async_tensor_parallel": takes("parallel.async_tp", bool),
    "disable_loss_parallel": takes("parallel.loss_parallel", lambda value: not value),
    "pipeline_parallel_microbatch_size": part_of("micro_batch"),
    "expert_parallel_degree": refused("expert models are not run", 1),
    "expert_tensor_parallel_degree": refused("expert models are not run", 1),
    "expert_parallel_comm_backend": idle("of expert models"),
    "pipeline_parallel_expert_parallel_overlap": idle("of expert models"),
    "pipeline_parallel_schedule_csv": refused("schedules are named"),
    "context_parallel_load_balancer": left_out("how context parallel deals tokens is Shardwise's own"),
    "context_parallel_rotate_method": left_out("how context parallel exchanges keys is Shardwise's own"),
    **dict.fromkeys(
        (
            "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage",
        ),
        left_out("stages are balanced by their predicted time"),
    ),
}  # fmt: skip
_COMMON_IDLE = {
    "job": "config_file description print_config save_config_file",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "metrics": "disable_color_printing save_tb_folder save_for_all_ranks",
}


def _idle(table: str) -> dict[str, Rule]:
    return group(idle, {PRINTS: _COMMON_IDLE[table]})


TITAN_RULES: dict[str, Rule] = {
    "job": inner(
        {"dump_folder": takes("train.output", str), "custom_config_module": refused("is code"), **_idle("job")}
    ),
    "profiling": inner(
        group(left_out, {"a trace is of train.profile": "enable_profiling enable_memory_snapshot"})
        | group(
            idle,
            {
                "of a trace": "save_traces_folder profile_freq profiler_active profiler_warmup "
                "save_memory_snapshot_folder"
            },
        )
    ),
    "metrics": inner(
        {
            "log_freq": takes("train.log_every", whole),
            "enable_tensorboard": part_of("train.trackers"),
            "enable_wandb": part_of("train.trackers"),
            **_idle("metrics"),
        }
    ),
    "model": inner(
        {
            **dict.fromkeys(
                ("name", "flavor", "hf_assets_path", "tokenizer_path"),
                to_set("torchtitan's models are its own; set model.config, model.weights and data.tokenizer"),
            ),
            "converters": refused("fp8 and other converters are not run"),
            "print_after_conversion": idle(PRINTS),
        }
    ),
    "optimizer": inner(
        {
            "name": _optimizer,
            "lr": takes("optimizer.lr", number),
            "beta1": part_of("optimizer.betas"),
            "beta2": part_of("optimizer.betas"),
            "eps": takes("optimizer.eps", number),
            "weight_decay": takes("optimizer.weight_decay", number),
            "implementation": idle("which kernel computes it, not what"),
            "early_step_in_backward": takes("optimizer.in_backward", bool),
        }
    ),
    "lr_scheduler": inner(
        {
            "warmup_steps": takes("optimizer.warmup_steps", count),
            "total_steps": refused("the schedule ends with the run"),
            "decay_ratio": part_of("optimizer.schedule"),
            "decay_type": part_of("optimizer.schedule"),
            "min_lr_factor": takes("optimizer.min_lr_ratio", number),
        }
    ),
    "training": inner(_TRAINING),
    "parallelism": inner(_PARALLELISM),
    "checkpoint": inner(
        {
            "enable": part_of("checkpoint.every"),
            "interval": part_of("checkpoint.every"),
            "keep_latest_k": part_of("checkpoint.keep"),
            "async_mode": takes("checkpoint.async_save", lambda value: value != "disabled"),
            "folder": left_out("checkpoints are below train.output"),
            "initial_load_path": to_set("convert the checkpoint, and set model.weights"),
            **group(
                left_out,
                {
                    "weights of a run are whole": "last_save_model_only last_save_in_hf export_dtype "
                    "enable_first_step_checkpoint create_seed_checkpoint load_only enable_ft_dataloader_checkpoints",
                    "a run resumes from its newest checkpoint": "initial_load_model_only initial_load_in_hf "
                    "initial_load_in_hf_quantized exclude_from_loading",
                },
            ),
            "load_step": idle("-1 is the newest"),
        }
    ),
    "activation_checkpoint": inner(
        {
            "mode": _recompute,
            "selective_ac_option": part_of("recompute"),
            **group(
                idle,
                {
                    "how recomputation is checked": "early_stop preserve_rng_state determinism_check debug "
                    "memory_budget visualize_memory_budget_pareto per_op_sac_force_recompute_mm_shapes_by_fqns"
                },
            ),
        }
    ),
    "compile": inner(
        {
            "enable": takes("parallel.compile", bool),
            "components": left_out("blocks are compiled"),
            "backend": idle("inductor"),
        }
    ),
    "quantize": inner(group(idle, {"of a converter, and model.converters names those": "linear grouped_mm"})),
    "float8": refused("fp8 is not run"),
    "comm": inner(_idle("comm")),
    "memory_estimation": inner(
        {"enable": left_out("shardwise plan predicts memory"), "disable_fake_mode": idle("of it")}
    ),
    "fault_tolerance": inner(
        {
            "enable": refused("torchft is not run; shardwise launch restarts"),
            **group(
                idle,
                {
                    "of torchft": "process_group process_group_timeout_ms replica_id group_size min_replica_size "
                    "semi_sync_method"
                },
            ),
        }
    ),
    "experimental": inner({"custom_import": refused("is code"), "custom_args_module": refused("is code")}),
    "validation": inner(
        {
            "enable": part_of("train.eval_every"),
            "freq": part_of("train.eval_every"),
            "steps": left_out("set train.eval_samples"),
            **group(left_out, {"held-out documents are a share of the data": "dataset dataset_path seq_len"}),
            **group(idle, {"of evaluation": "local_batch_size dataloader"}),
        }
    ),
    "debug": inner(
        {
            "seed": takes("train.seed", count),
            "deterministic": left_out("PyTorch's deterministic algorithms are not asked for"),
            "deterministic_warn_only": idle("of it"),
            "moe_force_load_balance": refused("expert models are not run"),
        }
    ),
}


def finish_titan(reading: Reading, values: Mapping[str, Any]) -> None:
    """Set what several keys determine together, and torchtitan's defaults that are not Shardwise's."""

    def get(table: str, key: str, usual: Any) -> Any:
        return values.get(table, {}).get(key, usual)

    usual = {"optimizer.name": "adamw", "optimizer.lr": 8e-4, "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0}
    usual |= {"train.steps": 10000, "data.seq_len": 2048, "optimizer.warmup_steps": 200}
    for key, value in usual.items():
        reading.keys.setdefault(key, value)
    reading.put("optimizer.betas", [number(get("optimizer", "beta1", 0.9)), number(get("optimizer", "beta2", 0.95))])
    ratio, shape = get("lr_scheduler", "decay_ratio", None), get("lr_scheduler", "decay_type", "linear")
    if shape == "sqrt" or (ratio is not None and shape != "linear"):
        reading.refuse("lr_scheduler.decay_type", shape, "a stable rate falls in a line here; use linear")
    reading.put("optimizer.schedule", "wsd" if ratio is not None else "cosine" if shape == "cosine" else "linear")
    if ratio is not None:
        reading.put("optimizer.decay_fraction", number(ratio))
    dtype = get("training", "mixed_precision_param", "bfloat16")
    if dtype not in ("bfloat16", "float32"):
        reading.refuse("training.mixed_precision_param", dtype, "must be bfloat16 or float32")
    narrow = dtype == "bfloat16"
    reading.plan |= {"precision": "bf16" if narrow else "fp32", "device": "cuda"}
    reading.plan.setdefault("recompute", "selective")
    if reading.plan["recompute"] == "selective" and str(
        get("activation_checkpoint", "selective_ac_option", "2")
    ) not in ("op", "2"):
        reading.refuse(
            "activation_checkpoint.selective_ac_option",
            get("activation_checkpoint", "selective_ac_option", ""),
            "is not run; it is op",
        )
    if get("checkpoint", "enable", False):
        reading.put("checkpoint.every", whole(get("checkpoint", "interval", 500)))
        if kept := get("checkpoint", "keep_latest_k", 10):
            reading.put("checkpoint.keep", whole(kept))
        all_kept(reading, kept, "checkpoint.keep_latest_k is 0")
    if get("validation", "enable", False):
        reading.put("train.eval_every", whole(get("validation", "freq", 10)))
    names = {"tensorboard": "enable_tensorboard", "wandb": "enable_wandb"}
    if trackers := [name for name, key in names.items() if get("metrics", key, False)]:
        reading.put("train.trackers", trackers)
    _strategy(reading, get)


def _strategy(reading: Reading, get: Any) -> None:
    sizes = {axis: int(get("parallelism", f"{name}_parallel_degree", 1)) for axis, name in _AXES.items()}
    replicate = int(get("parallelism", "data_parallel_replicate_degree", 1))
    shard = int(get("parallelism", "data_parallel_shard_degree", -1))
    reshard = get("parallelism", "fsdp_reshard_after_forward", "default")
    if reshard not in ("default", "always", "never"):
        reading.refuse("parallelism.fsdp_reshard_after_forward", reshard, "must be default, always or never")
    if reshard == "never" and replicate > 1 and shard != 1:
        why = "replicas of shard groups are resharded here; use always"
        reading.refuse("parallelism.fsdp_reshard_after_forward", reshard, why)
    if reshard == "default" and sizes["pp"] > 1 and shard != 1:
        reading.means.append(
            "fsdp_reshard_after_forward default: with a pipeline, parameters stay gathered there, and not here"
        )
    never = reshard == "never"
    base = "ddp" if shard == 1 else "hsdp" if replicate > 1 else "zero2" if never else "fsdp"
    reading.plan |= {"dp_replicate": replicate} if replicate > 1 else {}
    reading.plan |= {"dp_shard": shard} if shard > 1 else {}
    strategy = base + ("+offload" if get("training", "enable_cpu_offload", False) else "")
    reading.plan["strategy"] = strategy + "".join(f"+{axis}{size}" for axis, size in sizes.items() if size > 1)
    local = whole(get("training", "local_batch_size", get("training", "batch_size", 8)))
    total = int(get("training", "global_batch_size", -1))
    if total > 0:
        reading.plan["global_batch"] = total
    reading.plan["micro_batch"] = local
    if sizes["pp"] > 1:
        micro = whole(get("parallelism", "pipeline_parallel_microbatch_size", 1))
        reading.plan |= {"micro_batch": micro, "grad_accum": max(1, local // micro)}
        named = str(get("parallelism", "pipeline_parallel_schedule", "1F1B")).lower()
        if named in _SCHEDULES:
            reading.put("parallel.pipeline_schedule", _SCHEDULES[named])
        else:
            reading.refuse(
                "parallelism.pipeline_parallel_schedule", named, f"is not run; it is one of {', '.join(_SCHEDULES)}"
            )


_AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
