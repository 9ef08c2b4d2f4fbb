"""Keys of transformers' ``TrainingArguments``, version 5: a JSON file, and the part of LLaMA-Factory's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.fsdp_keys import FSDP_OF_TRAINER, fsdp_strategy
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

PRINTS = "prints, logs or names the run"
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "adamw"),
    "sgd": "sgd",
    "adafactor": "adafactor",
}


def optimizer_rule(reading: Reading, key: str, value: Any) -> None:
    """Take an optimizer by transformers' name."""
    if value not in OPTIMIZERS:
        reading.refuse(key, value, f"is not run; use one of {', '.join(sorted(OPTIMIZERS))}")
        return
    reading.put("optimizer.name", OPTIMIZERS[value])
    reading.taken.append(FileKey(key, value, "optimizer.name"))
    if "paged" in value:
        reading.means.append(f"{key} {value}: its states are not paged to host memory here")


def schedule_rule(reading: Reading, key: str, value: Any) -> None:
    """Take a schedule by transformers' name."""
    if value in _SCHEDULES:
        reading.put("optimizer.schedule", _SCHEDULES[value])
        reading.taken.append(FileKey(key, value, "optimizer.schedule"))
    elif value in ("cosine_with_min_lr", "warmup_stable_decay"):
        reading.put("optimizer.schedule", "cosine" if value == "cosine_with_min_lr" else "wsd")
        reading.taken.append(FileKey(key, value, "optimizer.schedule, with its lr_scheduler_kwargs"))
    else:
        reading.refuse(
            key, value, f"is not run; use {', '.join(_SCHEDULES)}, cosine_with_min_lr or warmup_stable_decay"
        )


def schedule_options(reading: Reading, key: str, value: Any) -> None:
    """Take the options of a schedule that have a key here."""
    names = {"min_lr_rate": "optimizer.min_lr_ratio", "min_lr_ratio": "optimizer.min_lr_ratio"}
    if not isinstance(value, Mapping):
        reading.refuse(key, value, "must be a table")
        return
    for name, one in value.items():
        if name in names:
            takes(names[name], number)(reading, f"{key}.{name}", one)
        elif name == "num_decay_steps":
            part_of("optimizer.decay_fraction")(reading, f"{key}.{name}", one)
        elif name == "decay_type":
            part_of("optimizer.schedule")(reading, f"{key}.{name}", one)
        else:
            reading.refuse(f"{key}.{name}", one, "no schedule here has this option; remove it")


def precision_rule(name: str) -> Rule:
    """Take ``bf16`` or ``fp16``."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        if value:
            reading.put("plan.precision", name)
            reading.taken.append(FileKey(key, value, f"precision {name}"))
        else:
            reading.no_effect.append(FileKey(key, value, "off"))

    return rule


def recompute_rule(reading: Reading, key: str, value: Any) -> None:
    """Take gradient checkpointing."""
    if value:
        reading.put("plan.recompute", "full")
        reading.taken.append(FileKey(key, value, "recompute full"))
    else:
        reading.no_effect.append(FileKey(key, value, "off"))


def trackers_rule(reading: Reading, key: str, value: Any) -> None:
    """Take trackers that Shardwise has."""
    known = ("tensorboard", "wandb", "trackio")
    names = [value] if isinstance(value, str) else list(value)
    if names in (["none"], ["all"], []):
        reading.no_effect.append(FileKey(key, value, "no tracker is named"))
        return
    if found := [name for name in names if name in known]:
        reading.put("train.trackers", found)
        reading.taken.append(FileKey(key, value, "train.trackers"))
    if left := [name for name in names if name not in known]:
        reading.not_taken.append(FileKey(key, left, f"trackers are {', '.join(known)}"))


def duration(reading: Reading, key: str, value: Any) -> None:
    """Take epochs, if they are whole; `finish_arguments` prefers steps."""
    if number(value) != int(number(value)):
        reading.refuse(key, value, "train.epochs is a whole number; round it, or set the number of steps (max_steps)")
    else:
        part_of("train.epochs, unless max_steps is set")(reading, key, value)


_IDLE = {
    PRINTS: "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen "
    "log_level log_level_replica disable_tqdm run_name project logging_dir trackio_space_id trackio_bucket_id "
    "trackio_static_space_id skip_memory_metrics include_tokens_per_second",
    "how samples are loaded, not which": "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns",
    "which kernel computes it, not what": "tf32 use_liger_kernel liger_kernel_config torch_empty_cache_steps",
    "what evaluation keeps or is asked": "prediction_loss_only eval_do_concat_batches eval_use_gather_object "
    "eval_accumulation_steps include_for_metrics batch_eval_metrics per_device_eval_batch_size bf16_full_eval "
    "fp16_full_eval do_train do_eval do_predict predict_with_generate generation_max_length generation_num_beams",
    "ranks find each other by themselves": "local_rank ddp_backend ddp_timeout ddp_broadcast_buffers",
    "how the run is saved, which Shardwise does whole": "save_only_model save_on_each_node save_safetensors "
    "enable_jit_checkpoint overwrite_output_dir",
    "a cache is never used in training": "use_cache",
}
_LEFT_OUT = {
    "a run of Shardwise resumes by itself from train.output": "resume_from_checkpoint "
    "restore_callback_states_from_checkpoint ignore_data_skip",
    "nothing is uploaded": "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push "
    "hub_revision",
    "set train.best_metric": "load_best_model_at_end metric_for_best_model greater_is_better",
    "the order of samples is a function of train.seed": "data_seed full_determinism",
    "an evaluation comes after its steps": "eval_on_start eval_delay",
    "the last samples of an epoch are trained on": "dataloader_drop_last",
    "it names a debugger": "debug",
}
_REFUSED = {
    "samples are not drawn by length": "group_by_length length_column_name",
    "the batch is planned, not searched for by failing": "auto_find_batch_size",
    "parameters of several learning rates need optimizer.factory": "optim_target_modules",
    "its axes are not read; name the strategy with shardwise train --strategy": "parallelism_config",
    "was removed from transformers 5; remove it, or use what replaced it": "evaluation_strategy no_cuda "
    "half_precision_backend fp16_opt_level fp16_backend per_gpu_train_batch_size per_gpu_eval_batch_size "
    "torchdynamo jit_mode_eval use_ipex use_mps_device tpu_num_cores past_index mp_parameters ray_scope "
    "push_to_hub_token push_to_hub_model_id push_to_hub_organization include_inputs_for_metrics fsdp_min_num_params "
    "fsdp_transformer_layer_cls_to_wrap eval_use_cache sharded_ddp",
    "Shardwise has no such optimizer option": "optim_args",
}

HF_RULES: dict[str, Rule] = {
    "output_dir": takes("train.output", str),
    "per_device_train_batch_size": takes("plan.micro_batch", whole),
    "gradient_accumulation_steps": takes("plan.grad_accum", whole),
    "num_train_epochs": duration,
    "max_steps": part_of("train.steps"),
    "learning_rate": takes("optimizer.lr", number),
    "lr_scheduler_type": schedule_rule,
    "lr_scheduler_kwargs": schedule_options,
    "warmup_steps": part_of("optimizer.warmup_steps"),
    "warmup_ratio": part_of("optimizer.warmup_steps"),
    "optim": optimizer_rule,
    "weight_decay": takes("optimizer.weight_decay", number),
    "adam_beta1": part_of("optimizer.betas"),
    "adam_beta2": part_of("optimizer.betas"),
    "adam_epsilon": takes("optimizer.eps", number),
    "max_grad_norm": part_of("optimizer.clip_norm"),
    "label_smoothing_factor": takes("train.label_smoothing", number),
    "neftune_noise_alpha": takes("train.neftune_alpha", number),
    "bf16": precision_rule("bf16"),
    "fp16": precision_rule("fp16"),
    "gradient_checkpointing": recompute_rule,
    "activation_checkpointing": recompute_rule,
    "gradient_checkpointing_kwargs": idle("non-reentrant, which Shardwise uses"),
    "activation_checkpointing_kwargs": idle("non-reentrant, which Shardwise uses"),
    "torch_compile": takes("parallel.compile", bool),
    "torch_compile_backend": part_of("parallel.compile, which it switches on"),
    "torch_compile_mode": part_of("parallel.compile, which it switches on"),
    "seed": takes("train.seed", count),
    "logging_steps": takes("train.log_every", whole),
    "save_steps": part_of("checkpoint.every"),
    "save_strategy": part_of("checkpoint.every"),
    "save_total_limit": takes("checkpoint.keep", whole),
    "eval_steps": part_of("train.eval_every"),
    "eval_strategy": part_of("train.eval_every"),
    "report_to": trackers_rule,
    "average_tokens_across_devices": part_of("the mean over labels of the global batch, as Shardwise has it"),
    "use_cpu": part_of("device"),
    "ddp_find_unused_parameters": takes("parallel.find_unused_parameters", bool),
    "ddp_bucket_cap_mb": takes("parallel.bucket_cap_mb", whole),
    "ddp_static_graph": takes("parallel.static_graph", bool),
    "fsdp": part_of("strategy"),
    "fsdp_config": inner(FSDP_OF_TRAINER),
    "deepspeed": part_of("strategy"),
    "label_names": left_out("labels are those of the task"),
    "train_sampling_strategy": refused("samples are drawn at random; remove it", "random"),
    "accelerator_config": to_set("dispatching of batches is by Shardwise's own order of samples"),
    **group(idle, _IDLE),
    **group(left_out, _LEFT_OUT),
    **group(refused, _REFUSED),
}  # fmt: skip


def finish_arguments(reading: Reading, values: Mapping[str, Any]) -> None:
    """Set what several keys determine together, and the defaults of transformers that are not Shardwise's."""
    reading.keys.setdefault("optimizer.name", "adamw")
    if reading.keys["optimizer.name"] in ("adamw", "adamw8bit"):
        reading.put("optimizer.betas", adam_betas(values))
    reading.keys.setdefault("optimizer.lr", 5e-5)
    reading.keys.setdefault("optimizer.schedule", "linear")
    reading.keys.setdefault("train.seed", 42)
    reading.plan.setdefault("micro_batch", 8)
    norm = values.get("max_grad_norm")
    clip = 1.0 if norm is None else number(norm)
    reading.put("optimizer.clip_norm", clip if clip > 0 else "none")
    steps = values.get("max_steps")
    if steps is not None and number(steps) > 0:
        reading.put("train.steps", whole(steps))
    else:
        epochs = values.get("num_train_epochs")
        reading.put("train.epochs", int(number(3 if epochs is None else epochs)))
    if values.get("use_cpu"):
        reading.plan["device"] = "cpu"
    warm_up(reading, values)
    if values.get("save_strategy", "steps") == "steps" and values.get("save_steps"):
        _every(reading, "checkpoint.every", "save_steps", values)
    if values.get("eval_strategy") == "steps":
        _every(reading, "train.eval_every", "eval_steps", values)
    for key in ("save_strategy", "eval_strategy"):
        if values.get(key) == "epoch":
            reading.open.append(
                FileKey(key, "epoch", "steps of an epoch are known once the data is read; set the number")
            )
    if values.get("average_tokens_across_devices") is False:
        reading.means.append(
            "average_tokens_across_devices is false: there each rank has the mean of its own labels, and here the loss "
            "is the mean over the labels of all ranks"
        )
    if reading.keys.get("optimizer.weight_decay"):
        reading.means.append(
            "weight_decay: Trainer decays no biases and no norms; here all trained parameters are decayed"
        )
    _wsd(reading, values)
    _compile(reading, values)
    all_kept(reading, values.get("save_total_limit"), "save_total_limit is left out")
    trainer_strategy(reading, values)


def adam_betas(values: Mapping[str, Any]) -> list[float]:
    """Return Adam's two betas; 0 is one, too."""
    found = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    return [usual if values.get(key) is None else number(values[key]) for key, usual in found.items()]


def all_kept(reading: Reading, limit: Any, why: str) -> None:
    """Say that the tool keeps all checkpoints, where it does."""
    if "checkpoint.every" in reading.keys and not limit:
        reading.means.append(f"{why}: all checkpoints are kept there, and the newest 2 here; set checkpoint.keep")


def _compile(reading: Reading, values: Mapping[str, Any]) -> None:
    """Switch compilation on where a backend or a mode is named, as Trainer does."""
    backend, mode = values.get("torch_compile_backend"), values.get("torch_compile_mode")
    if backend is None and mode is None:
        return
    reading.put("parallel.compile", True)
    if backend not in (None, "inductor"):
        reading.refuse("torch_compile_backend", backend, "the compiler is inductor")
    if mode not in (None, "default"):
        reading.means.append(f"torch_compile_mode {mode}: the compiler's own default is used here")


def _wsd(reading: Reading, values: Mapping[str, Any]) -> None:
    options, steps = values.get("lr_scheduler_kwargs") or {}, reading.keys.get("train.steps")
    if values.get("lr_scheduler_type") != "warmup_stable_decay" or not isinstance(options, Mapping):
        return
    shape, decay = options.get("decay_type", "cosine"), options.get("num_decay_steps")
    if shape != "linear":
        why = "a stable rate falls in a line here; set it to linear (left out, it is cosine there)"
        reading.refuse("lr_scheduler_kwargs.decay_type", shape, why)
    if decay is None:
        reading.problems.append("lr_scheduler_kwargs.num_decay_steps is missing; warmup_stable_decay needs it")
    elif steps is None:
        why = "a share of the run's steps; set optimizer.decay_fraction once they are known"
        reading.open.append(FileKey("lr_scheduler_kwargs.num_decay_steps", decay, why))
    else:
        reading.put("optimizer.decay_fraction", number(decay) / steps)


def _every(reading: Reading, target: str, key: str, values: Mapping[str, Any]) -> None:
    value = values.get(key) or values.get("logging_steps") or 500
    if 0 < number(value) < 1:
        reading.open.append(FileKey(key, value, f"a share of all steps; set {target} to a number of steps"))
    else:
        reading.put(target, whole(value))


def warm_up(reading: Reading, values: Mapping[str, Any]) -> None:
    """Set the steps of the warm-up; a share of the run needs the number of its steps."""
    steps, ratio = number(values.get("warmup_steps") or 0), number(values.get("warmup_ratio") or 0)
    if "constant" in (values.get("lr_scheduler_type"), values.get("lr_scheduler")):
        if steps or ratio:
            reading.means.append("schedule constant: it has no warm-up there, whatever the file says; none is set here")
        return
    share = steps if 0 < steps < 1 else ratio if not steps else 0.0
    total: Any = reading.keys.get("train.steps")
    if share and total is None:
        reading.open.append(
            FileKey("warmup", share, "a share of all steps; set optimizer.warmup_steps once they are known")
        )
    elif share:
        import math

        reading.put("optimizer.warmup_steps", math.ceil(share * total))
    elif steps:
        reading.put("optimizer.warmup_steps", int(steps))
    if steps or share:
        reading.means.append("warm-up: Trainer's first step has the rate of step 0, so its rates come a step later")


def trainer_strategy(reading: Reading, values: Mapping[str, Any]) -> None:
    """Find what Trainer really runs: its FSDP keys have no effect on a CPU."""
    if values.get("deepspeed"):
        from shardwise.interop.files.zero_file import zero_strategy

        zero_strategy(reading, "deepspeed", values["deepspeed"])
        return
    asked = values.get("fsdp")
    if asked and str(asked).lower() not in ("false", ""):
        options = {key.removeprefix("fsdp_"): one for key, one in (values.get("fsdp_config") or {}).items()}
        if options.pop("sharding_strategy", None):
            reading.means.append("fsdp_config.sharding_strategy has no effect there: reshard_after_forward has")
        _old_words(reading, asked, options)
        fsdp_strategy(reading, options, cpu=bool(values.get("use_cpu")), default_version=2)
    elif values.get("fsdp_config"):
        reading.means.append("fsdp_config is set and fsdp is not: Trainer ignores the table and trains DDP")


def _old_words(reading: Reading, asked: Any, options: dict[str, Any]) -> None:
    """Add to FSDP's options what the old words of ``fsdp`` say; the options' own count, as in Trainer."""
    words = asked.split() if isinstance(asked, str) else asked if isinstance(asked, list) else []
    version = int(options.get("version") or 2)
    for word in words:
        if word in ("full_shard", "shard_grad_op"):
            options.setdefault("reshard_after_forward", word == "full_shard" if version == 2 else word)
        elif word in ("no_shard", "hybrid_shard", "hybrid_shard_zero2") and version == 1:
            options.setdefault("reshard_after_forward", word)
        elif word == "offload":
            options.setdefault("cpu_offload", True)
        elif word not in ("auto_wrap", "true", "True"):
            reading.refuse("fsdp", word, "Trainer refuses this word for this version of FSDP")
