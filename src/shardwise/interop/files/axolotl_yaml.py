"""Keys of axolotl's YAML (its pydantic schemas, 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.axolotl_datasets import dataset_kind, datasets_rule
from shardwise.interop.files.data_keys import adapter_keys, drop_adapter, model_rule, settle_sources
from shardwise.interop.files.fsdp_keys import FSDP_OF_TRAINER, fsdp_strategy
from shardwise.interop.files.hf_arguments import (
    PRINTS,
    adam_betas,
    all_kept,
    optimizer_rule,
    precision_rule,
    recompute_rule,
    schedule_rule,
    warm_up,
)
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
from shardwise.interop.files.zero_file import zero_strategy

_IDLE = {
    PRINTS: "strict debug wandb_name wandb_run_id wandb_mode wandb_entity wandb_watch wandb_log_model trackio_run_name "
    "trackio_space_id use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts "
    "use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
    "comet_experiment_config use_otel_metrics otel_metrics_host otel_metrics_port include_tokens_per_second "
    "include_tkps use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode "
    "swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_workspace "
    "swanlab_log_model gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
    "gradio_temperature generate_samples num_generation_samples generation_max_new_tokens generation_temperature "
    "generation_top_p generation_top_k generation_prompt_ratio generation_do_sample axolotl_config_path",
    "which kernel computes it, not what": "flash_attention sdp_attention xformers_attention flex_attention "
    "flex_attn_compile_kwargs sage_attention eager_attention attn_implementation flash_attn_cross_entropy "
    "flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum large_head_attention flash_attn_d512 sdpa_varlen "
    "fused_attn_kernel gemma4_hybrid_attn_impl lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
    "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_glu_activation liger_swiglu use_kernels "
    "experts_implementation tf32 torch_compile_backend torch_compile_mode torch_compile_options use_scattermoe "
    "use_sonicmoe torch_empty_cache_steps gc_steps gc_collect_steps",
    "how samples are prepared and loaded, not which": "dataset_prepared_path dataset_processes dataset_num_proc "
    "dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor "
    "sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est "
    "total_num_tokens total_supervised_tokens num_dataset_shards_to_save skip_prepare_dataset remove_unused_columns "
    "eval_sample_packing eval_batch_size eval_sequence_len is_preprocess push_dataset_to_hub hf_use_auth_token",
    "how the model is loaded": "model_type tokenizer_type processor_type is_llama_derived_model tokenizer_use_fast "
    "is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model low_cpu_mem_usage device_map max_memory "
    "gpu_memory_limit lora_on_cpu qlora_sharded_model_loading experimental_skip_move_to_device lora_fan_in_fan_out "
    "embeddings_skip_upcast local_rank world_size ddp ddp_timeout ddp_broadcast_buffers torch_dtype device "
    "peft_autocast_adapter_dtype",
    "how the run is saved, which Shardwise does whole": "save_safetensors save_only_model save_first_step "
    "tokenizer_save_jinja_files",
}
_LEFT_OUT = {
    "a run of Shardwise resumes by itself from train.output": "resume_from_checkpoint auto_resume_from_checkpoints",
    "the last samples of an epoch are trained on": "dataloader_drop_last",
    "nothing is uploaded": "hub_model_id hub_strategy hub_revision",
    "set train.eval_every and train.best_metric": "metric_for_best_model greater_is_better load_best_model_at_end "
    "early_stopping_patience",
    "set the number of steps, which is known once the data is read": "evals_per_epoch saves_per_epoch",
    "a loss that jumps is reported, and does not end the run": "loss_watchdog_threshold loss_watchdog_patience",
    "all tokens of samples count, and none is added to reach a multiple": "pad_to_sequence_len pad_to_multiple_of",
    "short samples are kept": "min_sample_len",
    "duplicates are kept": "dataset_exact_deduplication",
    "ends of turns are found in the chat template": "eot_tokens",
    "a trace is of train.profile": "profiler_steps profiler_steps_start",
    "logits are chunked by train.loss_chunks": "liger_fused_linear_cross_entropy cut_cross_entropy "
    "chunked_cross_entropy chunked_cross_entropy_num_chunks liger_cross_entropy tiled_mlp tiled_mlp_num_shards "
    "tiled_mlp_use_original_mlp",
    "the base of an adapter keeps its own precision": "load_in_8bit",
    "code of a model's folder is never run": "trust_remote_code",
    "samples are in an order of their own in each epoch": "shuffle_merged_datasets shuffle_before_merging_datasets "
    "sample_packing_sequentially multipack_real_batches",
    "the embedding grows by the tokens that are new": "resize_token_embeddings_to_32x mean_resizing_embeddings "
    "shrink_embeddings",
    "weights stay on the device": "layer_offloading",
    "held-out documents are a share of the data": "test_datasets",
}
_REFUSED = {
    "preference losses, rewards and other objectives are not run": "rl trl vllm ebft reward_model process_reward_model "
    "center_rewards_coefficient dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel "
    "dpo_padding_free dpo_loss_type dpo_loss_weights orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight "
    "kto_undesirable_weight rl_beta max_prompt_len diffusion use_eaft eaft_alpha eaft_k num_labels "
    "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split",
    "changes the model or how it is quantized": "qat quantization gptq gptq_groupsize gptq_model_v1 "
    "gptq_disable_exllama bnb_config_kwargs model_quantization_config model_quantization_config_kwargs use_onebitllms "
    "quantize_moe_experts reinit_weights overrides_of_model_config overrides_of_model_kwargs rope_scaling fp32_norms "
    "fp32_norm_classes scaling_softmax scaling_softmax_factor scaling_softmax_bias s2_attention fp8 llmcompressor "
    "fp8_enable_fsdp_float8_all_gather nvfp4_merge_aware llama4_linearized_experts relora relora_prune_ratio "
    "relora_prune_method relora_cpu_offload jagged_restart_steps jagged_restart_warmup_steps "
    "jagged_restart_anneal_steps lisa_n_layers lisa_step_interval lisa_layers_attribute expert_parallel_size "
    "dsv4_fp4_grouped_mode use_dsv4_kernels use_glm_dsa_kernels",
    "is for images and other inputs than text": "image_size image_resize_algorithm role_boundaries freeze_mm_modules "
    "processor_kwargs",
    "adapters have no such option here": "lora_model_dir lora_target_parameters lora_rank_pattern lora_alpha_pattern "
    "peft_layers_to_transform peft_layers_pattern peft peft_layer_replication peft_init_lora_weights "
    "peft_trainable_token_indices peft_ensure_weight_tying loraplus_lr_ratio loraplus_lr_embedding merge_lora "
    "merge_method",
    "one learning rate is for all parameters; use optimizer.factory": "embedding_lr embedding_lr_scale lr_groups "
    "optim_target_modules",
    "is not an option of an optimizer or a schedule here": "optim_args adam_epsilon2 adam_beta3 dion_lr dion_momentum "
    "dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type "
    "qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
    "qgalore_queue_size torchdistx_path lr_scheduler_kwargs lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor",
    "changes which samples there are": "pretraining_dataset streaming streaming_multipack_buffer_size "
    "pretrain_multipack_buffer_size pretrain_multipack_attn pretraining_sample_concatenation preprocess_iterable "
    "curriculum_sampling batch_flattening use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks "
    "dataset_shard_num dataset_shard_idx group_by_length excess_length_strategy",
    "changes the tokenizer; write it into the tokenizer's files": "tokens added_tokens_overrides "
    "default_system_message "
    "tokenizer_use_mistral_common tokenizer_legacy chat_template_kwargs fix_untrained_tokens",
    "is code or a scheduler of axolotl's": "trainer_cls dynamic_checkpoint auto_find_batch_size deepcompile use_ray "
    "ray_run_name ray_num_workers resources_per_worker accelerator_config selective_checkpointing float32",
    "was removed from axolotl; remove it": "max_packed_sequence_len noisy_embedding_alpha dpo_beta evaluation_strategy "
    "eval_table_size eval_max_new_tokens dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha "
    "type_of_model revision_of_model base_model_ignore_patterns hub_private_repo",
    "another file holds the configuration than the weights; give one folder": "base_model_config cls_model_config "
    "tokenizer_config",
}  # fmt: skip


def _activation_offloading(reading: Reading, key: str, value: Any) -> None:
    """Take ``true``; axolotl's ``legacy`` and ``disk`` are other ways."""
    if isinstance(value, bool | None):
        takes("parallel.offload_activations", bool)(reading, key, value)
    else:
        reading.refuse(key, value, "is not run; it is true or false")


def _template(reading: Reading, key: str, value: Any) -> None:
    if value == "chatml":
        reading.put("data.chat_template", "chatml")
        reading.taken.append(FileKey(key, value, "data.chat_template"))
    elif value == "tokenizer_default":
        reading.no_effect.append(FileKey(key, value, "the tokenizer's own, as here"))
    else:
        reading.not_taken.append(
            FileKey(key, value, "the tokenizer's own template is used; give a file as data.chat_template")
        )


def _special_tokens(reading: Reading, key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        reading.refuse(key, value, "must be a table")
        return
    for name, one in value.items():
        rule = (
            idle("padding has no label and no attention")
            if name == "pad_token"
            else to_set("set it in the tokenizer's own files, which are read here")
        )
        rule(reading, f"{key}.{name}", one)


def _plugins(reading: Reading, key: str, value: Any) -> None:
    known = ("liger", "cut_cross_entropy", "kernels", "swanlab")
    for one in value if isinstance(value, list) else [value]:
        if any(name in str(one).lower() for name in known):
            reading.no_effect.append(FileKey(key, one, "kernels and logging; see its own keys"))
        else:
            reading.refuse(key, one, "code of axolotl's own; remove it")


AXOLOTL_RULES: dict[str, Rule] = {
    "base_model": model_rule,
    "datasets": datasets_rule,
    "output_dir": takes("train.output", str),
    "sequence_len": takes("data.seq_len", whole),
    "micro_batch_size": takes("plan.micro_batch", whole),
    "gradient_accumulation_steps": takes("plan.grad_accum", whole),
    "batch_size": part_of("accumulation, where gradient_accumulation_steps is left out"),
    "num_epochs": part_of("train.epochs, unless max_steps is set"),
    "max_steps": part_of("train.steps"),
    "learning_rate": takes("optimizer.lr", number),
    "optimizer": optimizer_rule,
    "lr_scheduler": schedule_rule,
    "cosine_min_lr_ratio": takes("optimizer.min_lr_ratio", number),
    "eta_min": refused("give cosine_min_lr_ratio, a share of the learning rate"),
    "weight_decay": takes("optimizer.weight_decay", number),
    "adam_beta1": part_of("optimizer.betas"),
    "adam_beta2": part_of("optimizer.betas"),
    "adam_epsilon": takes("optimizer.eps", number),
    "max_grad_norm": part_of("optimizer.clip_norm"),
    "warmup_steps": part_of("optimizer.warmup_steps"),
    "warmup_ratio": part_of("optimizer.warmup_steps"),
    "neftune_noise_alpha": takes("train.neftune_alpha", number),
    "bf16": part_of("precision"),
    "bfloat16": part_of("precision"),
    "fp16": precision_rule("fp16"),
    "float16": precision_rule("fp16"),
    "gradient_checkpointing": recompute_rule,
    "activation_offloading": _activation_offloading,
    "gradient_checkpointing_kwargs": idle("non-reentrant, which Shardwise uses"),
    "torch_compile": takes("parallel.compile", bool),
    "seed": takes("train.seed", count),
    "logging_steps": takes("train.log_every", whole),
    "save_steps": part_of("checkpoint.every"),
    "save_strategy": part_of("checkpoint.every"),
    "save_total_limit": takes("checkpoint.keep", whole),
    "eval_steps": part_of("train.eval_every"),
    "eval_strategy": part_of("train.eval_every"),
    "use_wandb": part_of("train.trackers"),
    "wandb_project": part_of("train.trackers"),
    "use_trackio": part_of("train.trackers"),
    "trackio_project_name": part_of("train.trackers"),
    "use_tensorboard": part_of("train.trackers"),
    "val_set_size": part_of("data.heldout_fraction"),
    "sample_packing": part_of("data.pack"),
    "train_on_inputs": part_of("data.loss_on"),
    "chat_template": _template,
    "chat_template_jinja": refused("write the template to a file, and give it as data.chat_template"),
    "special_tokens": _special_tokens,
    "plugins": _plugins,
    "adapter": part_of("strategy"),
    "load_in_4bit": part_of("strategy"),
    "lora_r": takes("lora.rank", whole),
    "lora_alpha": takes("lora.alpha", number),
    "lora_dropout": takes("lora.dropout", number),
    "lora_target_modules": part_of("lora.targets"),
    "lora_target_linear": part_of("lora.targets"),
    "lora_modules_to_save": takes("lora.modules_to_save", list),
    "peft_use_dora": takes("lora.dora", bool),
    "peft_use_rslora": takes("lora.rslora", bool),
    "unfrozen_parameters": refused("name what is frozen instead, as patterns in model.freeze", []),
    "ddp_find_unused_parameters": takes("parallel.find_unused_parameters", bool),
    "ddp_bucket_cap_mb": takes("parallel.bucket_cap_mb", whole),
    "deepspeed": part_of("strategy"),
    "fsdp": part_of("strategy"),
    "fsdp_version": part_of("strategy"),
    "fsdp_config": inner(FSDP_OF_TRAINER),
    "fsdp_final_state_dict_type": idle("how weights are loaded and saved, which Shardwise does sharded"),
    "dp_shard_size": part_of("strategy"),
    "dp_replicate_size": part_of("strategy"),
    "tensor_parallel_size": part_of("strategy"),
    "context_parallel_size": part_of("strategy"),
    "sequence_parallel_degree": part_of("strategy"),
    "heads_k_stride": idle("how a ring of attention is computed"),
    "ring_attn_func": idle("how a ring of attention is computed"),
    **group(idle, _IDLE),
    **group(left_out, _LEFT_OUT),
    **group(refused, _REFUSED),
}  # fmt: skip


def finish_axolotl(reading: Reading, values: Mapping[str, Any]) -> None:
    """Set what several keys determine together, and axolotl's defaults that are not Shardwise's."""
    keys = reading.keys
    usual = {"optimizer.name": "adamw", "optimizer.schedule": "cosine", "train.seed": 42, "data.seq_len": 512}
    for key, value in usual.items():
        keys.setdefault(key, value)
    reading.plan.setdefault("micro_batch", 1)
    if keys["optimizer.name"].startswith("adamw"):
        reading.put("optimizer.betas", adam_betas(values))
    norm = values.get("max_grad_norm")
    clip = 1.0 if norm is None else number(norm)
    reading.put("optimizer.clip_norm", clip if clip > 0 else "none")
    if values.get("max_steps") and number(values["max_steps"]) > 0:
        reading.put("train.steps", whole(values["max_steps"]))
    else:
        epochs = number(1 if values.get("num_epochs") is None else values["num_epochs"])
        reading.put("train.epochs", max(1, int(epochs)))
        if epochs != int(epochs) or epochs < 1:
            reading.refuse("num_epochs", epochs, "train.epochs is a whole number; round it, or set max_steps")
    _warm_up(reading, values)
    for target, key in (("checkpoint.every", "save"), ("train.eval_every", "eval")):
        _every(reading, target, key, values)
    all_kept(reading, values.get("save_total_limit"), "save_total_limit is left out")
    if values.get("batch_size") and not values.get("gradient_accumulation_steps"):
        reading.plan["grad_accum"] = max(1, whole(values["batch_size"]) // reading.plan.get("micro_batch", 1))
    wanted = {"wandb": ("use_wandb", "wandb_project"), "trackio": ("use_trackio", "trackio_project_name")}
    trackers = [name for name, names in wanted.items() if any(values.get(one) for one in names)]
    trackers += ["tensorboard"] if values.get("use_tensorboard") else []
    keys |= {"train.trackers": trackers} if trackers else {}
    _precision(reading, values)
    _samples(reading, values)
    settle_sources(reading)
    _strategy(reading, values)


def _warm_up(reading: Reading, values: Mapping[str, Any]) -> None:
    """Set the steps of the warm-up, which axolotl chooses by itself where the file does not."""
    steps, ratio, total = values.get("warmup_steps"), values.get("warmup_ratio"), reading.keys.get("train.steps")
    given = {"lr_scheduler": values.get("lr_scheduler")}
    if steps is None and ratio is None and given["lr_scheduler"] != "constant":
        reading.means.append("the warm-up is left out, and is 3 % of the steps there, 100 at the most")
        ratio = 0.03 if total is None else None
        steps = None if total is None else min(int(0.03 * total), 100)
    elif steps is None and ratio is not None and total is not None:
        steps, ratio = int(number(ratio) * total), None
    warm_up(reading, {**given, "warmup_steps": 2 if steps == 1 else steps, "warmup_ratio": ratio})


def _every(reading: Reading, target: str, kind: str, values: Mapping[str, Any]) -> None:
    """Set the steps between saves or evaluations, where they are steps."""
    strategy, steps = values.get(f"{kind}_strategy"), values.get(f"{kind}_steps")
    if strategy == "epoch" or (strategy in (None, "steps") and steps and number(steps) < 1):
        what = "steps of an epoch" if strategy == "epoch" else "a share of all steps"
        reading.open.append(FileKey(f"{kind}_steps", steps or strategy, f"{what}; set {target} to a number of steps"))
    elif strategy in (None, "steps") and steps:
        reading.put(target, whole(steps))


def _precision(reading: Reading, values: Mapping[str, Any]) -> None:
    narrow = values.get("bf16", values.get("bfloat16"))
    if narrow is None and "bf16" not in values and not any(values.get(key) for key in ("fp16", "float16")):
        narrow = "auto"
        reading.means.append("bf16 is left out, and is auto there: bf16 where a GPU has it")
    if narrow in (True, "auto", "full"):
        reading.plan["precision"] = "bf16"
    if narrow == "full" or values.get("bfloat16"):
        reading.means.append("bf16 full: weights are in bf16 there; here they stay fp32 and are cast in use")
    elif narrow:
        reading.means.append("bf16: axolotl loads the weights of an adapter's base in bf16; here trained ones are fp32")


def _samples(reading: Reading, values: Mapping[str, Any]) -> None:
    share = values.get("val_set_size")
    if share is not None and number(share) >= 1:
        reading.open.append(FileKey("val_set_size", share, "a number of rows; set data.heldout_fraction to a share"))
    elif share is not None:
        reading.put("data.heldout_fraction", number(share))
    else:
        reading.put("data.heldout_fraction", 0.0)
    kinds = {dataset_kind(one) for one in values.get("datasets") or [] if isinstance(one, Mapping)}
    reading.put("data.pack", "isolated" if values.get("sample_packing") else "none")
    if kinds == {"completion"}:
        return
    if values.get("train_on_inputs"):
        reading.put("data.loss_on", "all")
        reading.means.append("train_on_inputs: prompts are labels, too, as data.loss_on = all has it")
    else:
        reading.put("data.loss_on", "assistant")


def _strategy(reading: Reading, values: Mapping[str, Any]) -> None:
    if values.get("deepspeed"):
        zero_strategy(reading, "deepspeed", values["deepspeed"])
    elif values.get("fsdp") or values.get("fsdp_config"):
        options = dict(values.get("fsdp_config") or {})
        asked = " ".join(values["fsdp"]) if isinstance(values.get("fsdp"), list) else str(values.get("fsdp") or "")
        for word in ("shard_grad_op", "hybrid_shard", "no_shard"):
            if word in asked.split():
                options.setdefault("sharding_strategy", word)
        if "offload" in asked.split():
            options.setdefault("cpu_offload", True)
        version = (
            values.get("fsdp_version")
            or options.get("fsdp_version")
            or options.get("version")
            or (2 if not values.get("fsdp") else 1)
        )
        fsdp_strategy(reading, {**options, "version": version}, cpu=False, default_version=1)
    sizes = {
        "tp": values.get("tensor_parallel_size"),
        "cp": values.get("context_parallel_size") or values.get("sequence_parallel_degree"),
    }
    strategy = reading.plan.get("strategy", "ddp")
    for key in ("dp_replicate_size", "dp_shard_size"):
        if values.get(key) and number(values[key]) > 1:
            reading.plan[key.removesuffix("_size")] = whole(values[key])
    if reading.plan.get("dp_replicate") and strategy.startswith("fsdp"):
        strategy = strategy.replace("fsdp", "hsdp", 1)
    if reading.plan.get("dp_shard") and strategy == "ddp":
        strategy = "fsdp"
    strategy += "".join(f"+{axis}{whole(size)}" for axis, size in sizes.items() if size and number(size) > 1)
    adapter = values.get("adapter") or ""
    if adapter and adapter not in ("lora", "qlora"):
        reading.refuse("adapter", adapter, "adapters are lora and qlora")
        adapter = ""
    if adapter == "lora" and values.get("load_in_4bit"):
        adapter = "qlora"
    if adapter:
        targets = values.get("lora_target_modules")
        given = targets if isinstance(targets, list) else [targets] if targets else []
        if values.get("lora_target_linear") or not given:
            given = ["all-linear"]
        reading.put("lora.targets", given)
        if missing := [key for key in ("lora_r", "lora_alpha") if not values.get(key)]:
            reading.problems.append(f"{' and '.join(missing)} must be set with adapter {adapter}")
    else:
        drop_adapter(reading)
    reading.plan["strategy"] = adapter_keys(reading, strategy, adapter)
