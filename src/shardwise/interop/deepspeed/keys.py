"""Keys of a DeepSpeed configuration, as of DeepSpeed 0.19, and their use in a plan.

Sources: deepspeed.ai/docs/config-json, and the fields of DeepSpeed 0.19's own configuration classes where the page has
less. Defaults are those of the classes. Tables that only print or record are known by name, not by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fate = Literal["taken", "tuning", "no effect", "not run", "removed"]


@dataclass(frozen=True)
class Key:
    """Use of a key.

    ``taken`` is read into the plan or into ``[optimizer]``. ``tuning`` changes how DeepSpeed works, not the
    result: Shardwise has its own values. ``no effect`` is for what DeepSpeed prints and records. ``not run`` changes
    the result and is refused unless it is off. ``removed`` was removed from DeepSpeed, and is refused likewise.
    """

    fate: Fate
    why: str = ""
    default: Any = None

    def is_off(self, value: Any) -> bool:
        """True if ``value`` is the default, or switches the feature off."""
        if isinstance(value, dict):
            return value == self.default or not value or value.get("enabled") is False
        return value in (None, False, "none", self.default) or value == []


def _tuning(**defaults: Any) -> dict[str, Key]:
    return {name: Key("tuning", "", default) for name, default in defaults.items()}


def _each(fate: Fate, **whys: str) -> dict[str, Key]:
    return {name: Key(fate, why) for name, why in whys.items()}


_OFFLOAD = {"device": Key("taken"), "nvme_path": Key("taken")}
_SWITCH = {"enabled": Key("taken")}
_PRINTS = "DeepSpeed's own printing and timing; Shardwise logs to metrics.jsonl and to train.trackers"
_TRACKS = "Shardwise writes metrics to train.trackers (tensorboard, wandb, trackio)"
_MASTERS = "the fp32 weights would be kept in 16 bits, which changes the result; remove it"
_QUANTISED = "what is sent would be rounded to 8 bits, which changes the result; remove it"
_SCALE = "Shardwise scales fp16 losses dynamically, from 2^16"
_MODEL_CODE = (
    "it sets up calls of deepspeed.checkpointing in the model's own code; Shardwise recomputes blocks by itself: "
    "--recompute full"
)

ZERO: dict[str, Key] = {
    **_each("taken", stage="", offload_optimizer="", offload_param="", cpu_offload="", cpu_offload_param=""),
    **_tuning(
        contiguous_gradients=True,
        reduce_scatter=True,
        reduce_bucket_size=500_000_000,
        use_multi_rank_bucket_allreduce=True,
        allgather_partitions=True,
        allgather_bucket_size=500_000_000,
        overlap_comm=None,
        sub_group_size=1_000_000_000,
        stage3_prefetch_bucket_size=50_000_000,
        stage3_param_persistence_threshold=100_000,
        stage3_model_persistence_threshold=None,
        stage3_max_live_parameters=1_000_000_000,
        stage3_max_reuse_distance=1_000_000_000,
        stage3_module_granularity_threshold=0,
        stage3_use_all_reduce_for_fetch_params=False,
        stage3_allgather_sequential=False,
        round_robin_gradients=False,
        parameter_alignment=False,
        memory_efficient_linear=True,
        override_module_apply=True,
        compute_grad_norm=True,
        cpu_offload_use_pin_memory=None,
    ),
    **dict.fromkeys(
        ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        Key("no effect", "Shardwise's checkpoints need no gathering; export weights with checkpoint convert", False),
    ),
    **dict.fromkeys(
        ("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint"),
        Key("no effect", "about DeepSpeed's own checkpoints; Shardwise writes and reads its own"),
    ),
    **dict.fromkeys(
        ("log_trace_cache_warnings", "enable_sanity_checks"), Key("no effect", "DeepSpeed's own warnings", False)
    ),
    "ignore_unused_parameters": Key("no effect", "parameters without a gradient are found out by Shardwise", True),
    "leaf_module": Key("tuning", "Shardwise names no leaf modules"),
    "save_muon_momentum_buffer_in_memory": Key("tuning", "only for Muon", False),
    "legacy_stage1": Key("not run", "DeepSpeed's old stage 1 is not run; remove it", False),
    "zero_hpz_partition_size": Key(
        "not run", "a second shard group inside each node is not run on DeepSpeed; use hsdp on PyTorch instead", 1
    ),
    "zero_quantized_weights": Key("not run", _QUANTISED, False),
    "zero_quantized_nontrainable_weights": Key("not run", _QUANTISED, False),
    "zero_quantized_gradients": Key("not run", _QUANTISED, False),
    "zenflow": Key("not run", "ZenFlow updates part of the weights late, which changes the result; remove it"),
    "mics_shard_size": Key("removed", "use hsdp on PyTorch instead", -1),
    "mics_hierarchical_params_gather": Key("removed", "use hsdp on PyTorch instead", False),
    "zeropp_loco_param": Key("removed", "remove it"),
}
for _name in [name for name in ZERO if name.startswith("stage3_")]:
    ZERO[_name.removeprefix("stage3_")] = ZERO[_name]  # DeepSpeed reads these under both names

TOP: dict[str, Key] = {
    **_each("taken", train_batch_size="", train_micro_batch_size_per_gpu="", gradient_accumulation_steps=""),
    **_each("taken", zero_optimization="", bf16="", bfloat16="", fp16="", shardwise=""),
    **_each("taken", gradient_clipping="", optimizer="", scheduler=""),
    **dict.fromkeys(
        ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers"),
        Key("no effect", _PRINTS),
    ),
    **dict.fromkeys(("comms_logger", "flops_profiler"), Key("no effect", "use train.profile for a trace")),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), Key("no effect", _TRACKS)),
    "vocabulary_size": Key("no effect", "DeepSpeed only warns about its alignment"),
    "checkpoint": Key("no effect", "about DeepSpeed's own checkpoints; Shardwise writes its own, see [checkpoint]"),
    "datastates_ckpt": Key("no effect", "about DeepSpeed's own checkpoints; Shardwise writes its own"),
    "dataloader_drop_last": Key("no effect", "Shardwise's own loader fills every batch"),
    "disable_python_gc": Key("tuning", "", False),
    "disable_allgather": Key("tuning", "", False),
    "zero_allow_untested_optimizer": Key("tuning", "", False),
    "zero_force_ds_cpu_optimizer": Key("tuning", "Shardwise steps with PyTorch's optimizer, on the CPU too", True),
    "managed_gradient_accumulation": Key("tuning", "", True),
    "prescale_gradients": Key("tuning", "", False),
    "gradient_predivide_factor": Key("tuning", "only with prescale_gradients", 1.0),
    "communication_data_type": Key("tuning", "the width of what gradients are summed in"),
    "seq_parallel_communication_data_type": Key("tuning", "only with sequence parallel"),
    "aio": Key("tuning", "Shardwise leaves reading and writing the drive to DeepSpeed's defaults"),
    "data_types": Key("tuning", "the width of what gradients are added up in"),
    "activation_checkpointing": Key("tuning", _MODEL_CODE),
    "autotuning": Key("not run", "shardwise plan finds the fastest plan; remove it"),
    "gradient_allreduce_op": Key("not run", "Shardwise takes the mean over ranks; a sum changes the step", "mean"),
    "torch_autocast": Key("not run", "Shardwise runs DeepSpeed with 16-bit weights; write bf16 enabled instead"),
    "tensor_parallel": Key("not run", "Shardwise shards layers on PyTorch only; make a plan with +tp instead"),
    "pipeline": Key("not run", "Shardwise runs pipelines on PyTorch only; make a plan with +pp instead"),
    "sequence_parallel_size": Key("not run", "Shardwise shards sequences on PyTorch only; make a plan with +cp", 1),
    "expert_parallel": Key("not run", "DeepSpeed is not run with experts over ranks; remove it, or use fsdp+ep"),
    "use_data_before_expert_parallelism": Key(
        "not run", "DeepSpeed is not run with experts over ranks; remove it", False
    ),
    "data_efficiency": Key("not run", "it changes which samples a step sees; remove it"),
    "hybrid_engine": Key("not run", "Shardwise trains only; remove it"),
    "weight_quantization": Key("not run", "it is for inference; remove it, or plan with +qlora"),
    "compile": Key("not run", "DeepSpeed's own compiler passes are not run; remove it"),
    "amp": Key("removed", "use bf16"),
    "sparse_gradients": Key("removed", "remove it", False),
    "sparse_attention": Key("removed", "remove it"),
    "progressive_layer_drop": Key("removed", "remove it"),
    "curriculum_learning": Key("removed", "remove it"),
    "compression_training": Key("removed", "remove it"),
    "quantize_training": Key("removed", "remove it"),
    "eigenvalue": Key("removed", "remove it"),
    "elasticity": Key("removed", "set the three batch keys"),
    "graph_harvesting": Key("removed", "remove it", False),
    "nebula": Key("removed", "remove it"),
}

TABLES: dict[str, Mapping[str, Key]] = {
    "": TOP,
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD,
        **_tuning(buffer_count=4, pin_memory=True, pipeline_read=False, pipeline_write=False, fast_init=False),
        "cpuadam_cores_perc": Key("tuning", "only with super_offload", 0.8),
        "ratio": Key("not run", "Shardwise offloads the full optimizer; remove it", 1.0),
        "super_offload": Key("not run", "SuperOffload is not run by this version; remove it", False),
    },
    "zero_optimization.offload_param": {
        **_OFFLOAD,
        **_tuning(buffer_count=5, buffer_size=100_000_000, max_in_cpu=1_000_000_000, pin_memory=True),
    },
    "bf16": {
        **_SWITCH,
        **_tuning(immediate_grad_update=False, check_grad_overflow=True),
        "bf16_master_weights_and_grads": Key("not run", _MASTERS, False),
        "bf16_optimizer_states": Key("not run", _MASTERS, False),
    },
    "fp16": {
        **_SWITCH,
        "auto_cast": Key("tuning", "token ids are not cast", False),
        **{
            name: Key("tuning", _SCALE, default)
            for name, default in {
                "loss_scale": 0,
                "initial_scale_power": 16,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "consecutive_hysteresis": False,
                "min_loss_scale": 1,
            }.items()
        },
        "fp16_master_weights_and_grads": Key("not run", _MASTERS, False),
    },
    "activation_checkpointing": {
        name: Key("tuning", _MODEL_CODE)
        for name in (
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    },
    "data_types": _tuning(grad_accum_dtype=None, param_dtype=None, buffer_dtype=None, keep_in_fp32_modules="auto"),
    "optimizer": {"type": Key("taken"), "params": Key("taken"), "legacy_fusion": Key("tuning", "", False)},
    "scheduler": {"type": Key("taken"), "params": Key("taken")},
    "pipeline": {
        "stages": Key("not run", TOP["pipeline"].why, "auto"),
        "partition": Key("tuning", "only with a pipeline", "best"),
        "seed_layers": Key("tuning", "only with a pipeline", False),
        "activation_checkpoint_interval": Key("tuning", "only with a pipeline", 0),
        "pipe_partitioned": Key("tuning", "only with a pipeline", True),
        "grad_partitioned": Key("tuning", "only with a pipeline", True),
    },
    "tensor_parallel": {
        "autotp_size": Key("not run", TOP["tensor_parallel"].why, 1),
        **dict.fromkeys(
            (
                "dtype",
                "tp_overlap_comm",
                "vocab_parallel_lm_head",
                "vocab_parallel_ce_backend",
                "tp",
                "partition_config",
            ),
            Key("tuning", "only with tensor parallel"),
        ),
        **dict.fromkeys(("preset_model", "injection_policy_tuple"), Key("tuning", "only with tensor parallel")),
    },
}
TABLES["bfloat16"] = TABLES["bf16"]

_PER_DEVICE, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
AUTO: dict[str, str] = {
    "train_batch_size": f"{_PER_DEVICE} × {_ACCUMULATION} × ranks, or remove the key",
    "train_micro_batch_size_per_gpu": _PER_DEVICE,
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "the number of training steps",
    "bf16.enabled": "bf16 (true or false)",
    "fp16.enabled": "fp16 (true or false)",
}
"""Replacement of ``auto`` by Hugging Face's Trainer: the field of its TrainingArguments (DeepSpeed integration)."""
