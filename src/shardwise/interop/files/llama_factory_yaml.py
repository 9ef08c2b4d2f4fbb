"""Keys of LLaMA-Factory's YAML: its own arguments beside those of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.data_keys import adapter_keys, add_source, drop_adapter, model_rule, settle_sources
from shardwise.interop.files.hf_arguments import HF_RULES, PRINTS, finish_arguments
from shardwise.interop.files.key_table import (
    Reading,
    Rule,
    group,
    idle,
    left_out,
    number,
    part_of,
    refused,
    takes,
    whole,
)

_IDLE = {
    PRINTS: "plot_loss print_param_status include_effective_tokens_per_second use_swanlab swanlab_project "
    "swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url "
    "swanlab_lark_secret compute_accuracy",
    "which kernel computes it, not what": "flash_attn enable_liger_kernel use_unsloth use_unsloth_gc use_v1_kernels "
    "use_reentrant_gc",
    "how samples are prepared and loaded, not which": "overwrite_cache preprocessing_num_workers "
    "preprocessing_batch_size buffer_size media_dir data_shared_file_system eval_num_beams tool_format",
    "how the model is loaded": "use_fast_tokenizer cache_dir hf_hub_token ms_hub_token om_hub_token low_cpu_mem_usage "
    "device_map quantization_device_map offload_folder split_special_tokens",
    "is of inference, export and evaluation": "infer_backend infer_dtype use_kv_cache export_dir export_size "
    "export_device export_quantization_bit export_quantization_dataset export_quantization_nsamples "
    "export_quantization_maxlen export_legacy_format export_hub_model_id do_sample temperature top_p top_k num_beams "
    "max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens vllm_maxlen vllm_gpu_util "
    "vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config "
    "sglang_lora_backend eval_dataset eval_on_each_dataset image_max_pixels image_min_pixels image_do_pan_and_scan "
    "crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate",
}
_LEFT_OUT = {
    "code of a model's folder is never run": "trust_remote_code",
    "the template is the tokenizer's own; give a file as data.chat_template": "template enable_thinking "
    "preserve_thinking",
    "logits stay as the model gives them, and the loss is computed in fp32": "upcast_lmhead_output upcast_layernorm",
    "all rows are trained on; cut the file": "max_samples",
    "an evaluation ends no run unless train.early_stopping is set": "early_stopping_steps",
    "a trace is of train.profile": "enable_torch_profiler profiler_output_dir profiler_wait_steps "
    "profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
    "profiler_with_stack profile_modules",
}
_REFUSED = {
    "preference losses, rewards and other objectives are not run": "pref_beta pref_ftx pref_bco_weight pref_loss "
    "dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm "
    "ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model "
    "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha use_dft_loss use_asft_loss "
    "asft_alpha use_eaft_loss eaft_alpha",
    "Shardwise has no such optimizer": "use_galore galore_target galore_rank galore_update_interval galore_scale "
    "galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank apollo_update_interval apollo_scale "
    "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front use_badam badam_mode "
    "badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose "
    "use_adam_mini use_muon",
    "adapters have no such option here": "adapter_name_or_path adapter_folder oft_rank oft_block_size oft_target "
    "module_dropout create_new_adapter pissa_init pissa_iter pissa_convert loraplus_lr_ratio loraplus_lr_embedding "
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro",
    "changes the model or how it is quantized": "rope_scaling shift_attn mixture_of_depths moe_aux_loss_coef fp8 "
    "fp8_backend fp8_enable_fsdp_float8_all_gather resize_vocab add_tokens add_special_tokens "
    "new_special_tokens_config init_special_tokens model_revision compute_dtype model_max_length block_diag_attn "
    "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
    "another engine runs it": "use_mca use_megatron_bridge megatron_bridge_args use_hyper_parallel "
    "hyper_parallel_args hyper_parallel_cp_size use_kt kt_config kt_cpu_activation kt_weight_path "
    "kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
    "kt_lora_expert_intermediate_size ray_num_workers ray_init_kwargs master_addr master_port",
    "changes which samples there are": "mask_history streaming mix_strategy interleave_probs tokenized_path "
    "default_system disable_shuffling train_from_scratch",
    "padding has no label here": "ignore_pad_token_for_loss",
}


def _stage(reading: Reading, key: str, value: Any) -> None:
    if value in ("sft", "pt"):
        reading.taken.append(FileKey(key, value, "causal-lm" if value == "pt" else "causal-lm on conversations"))
    else:
        reading.refuse(key, value, "preference losses and rewards are not run; stages are sft and pt")


def _dataset(reading: Reading, key: str, value: Any) -> None:
    reading.taken.append(FileKey(key, value, "data.path, by dataset_info.json in dataset_dir"))


LLAMA_FACTORY_RULES: dict[str, Rule] = {
    **HF_RULES,
    "model_name_or_path": model_rule,
    "stage": _stage,
    "finetuning_type": part_of("strategy"),
    "dataset": _dataset,
    "dataset_dir": part_of("data.path"),
    "cutoff_len": takes("data.seq_len", whole),
    "val_size": part_of("data.heldout_fraction"),
    "packing": part_of("data.pack"),
    "neat_packing": part_of("data.pack"),
    "train_on_prompt": part_of("data.loss_on"),
    "lora_rank": takes("lora.rank", whole),
    "lora_alpha": takes("lora.alpha", number),
    "lora_dropout": takes("lora.dropout", number),
    "lora_target": part_of("lora.targets"),
    "additional_target": part_of("lora.modules_to_save"),
    "use_dora": takes("lora.dora", bool),
    "use_rslora": takes("lora.rslora", bool),
    "quantization_bit": part_of("strategy"),
    "quantization_method": part_of("strategy"),
    "quantization_type": takes("lora.quant_type", str),
    "double_quantization": takes("lora.double_quant", bool),
    "disable_gradient_checkpointing": part_of("recompute"),
    "pure_bf16": part_of("precision"),
    "warmup_ratio": part_of("optimizer.warmup_steps"),
    "group_by_length": refused("samples are not drawn by length"),
    **group(idle, _IDLE),
    **group(left_out, _LEFT_OUT),
    **group(refused, _REFUSED),
}
for _key in ("overwrite_output_dir", "ddp_timeout"):
    LLAMA_FACTORY_RULES.setdefault(_key, idle(PRINTS))


def finish_llama_factory(reading: Reading, values: Mapping[str, Any]) -> None:
    """Set what several keys determine together, and LLaMA-Factory's defaults that are not Shardwise's."""
    finish_arguments(reading, values)
    reading.keys.setdefault("data.seq_len", 2048)
    _sources(reading, values)
    share = number(values.get("val_size") or 0)
    if share >= 1:
        reading.open.append(FileKey("val_size", share, "a number of rows; set data.heldout_fraction to a share"))
    else:
        reading.put("data.heldout_fraction", share)
    pretrains = values.get("stage") == "pt"
    packs = values.get("packing") or values.get("neat_packing") or (pretrains and values.get("packing") is None)
    isolated = values.get("neat_packing") or False
    reading.put(
        "data.pack", "isolated" if isolated else "joined" if packs and pretrains else "isolated" if packs else "none"
    )
    if packs and not isolated and not pretrains:
        reading.means.append("packing without neat_packing: documents of a sample see each other there, and not here")
    if not pretrains:
        reading.put("data.loss_on", "all" if values.get("train_on_prompt") else "assistant")
    if not values.get("disable_gradient_checkpointing"):
        reading.plan["recompute"] = "full"
        reading.means.append(
            "recompute full: LLaMA-Factory checkpoints activations unless disable_gradient_checkpointing"
        )
    if values.get("pure_bf16"):
        reading.plan["precision"] = "bf16"
        reading.means.append("pure_bf16: weights are in bf16 there; here they stay fp32 and are cast in use")
    _adapter(reading, values)
    settle_sources(reading)


def _adapter(reading: Reading, values: Mapping[str, Any]) -> None:
    kind, bits = values.get("finetuning_type", "lora"), values.get("quantization_bit")
    adapter = ""
    if kind == "lora":
        adapter = "qlora" if bits else "lora"
        if bits and (bits != 4 or values.get("quantization_method", "bnb") not in ("bnb", "bitsandbytes")):
            reading.refuse("quantization_bit", bits, "the base of qlora has 4 bits, by bitsandbytes")
        target = values.get("lora_target", "all")
        names = [one.strip() for one in target.split(",")] if isinstance(target, str) else list(target)
        reading.put("lora.targets", ["all-linear"] if names == ["all"] else names)
        rank = reading.keys.setdefault("lora.rank", 8)
        reading.keys.setdefault("lora.alpha", 2.0 * rank)
        if extra := values.get("additional_target"):
            reading.put("lora.modules_to_save", [one.strip() for one in str(extra).split(",")])
        if "finetuning_type" not in values:
            reading.means.append("finetuning_type is left out, and is lora there")
    elif kind != "full":
        reading.refuse("finetuning_type", kind, "is not run; it is full or lora")
    else:
        drop_adapter(reading)
    reading.plan["strategy"] = adapter_keys(reading, reading.plan.get("strategy", "ddp"), adapter)


def _sources(reading: Reading, values: Mapping[str, Any]) -> None:
    """Find the files of data sets in ``dataset_info.json``."""
    folder = Path(str(values.get("dataset_dir", "data")))
    named = values.get("dataset")
    if not named:
        reading.problems.append("dataset is missing; name data sets of dataset_info.json")
        return
    names = [one.strip() for one in named.split(",")] if isinstance(named, str) else list(named)
    try:
        known = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
        reading.open.append(FileKey("dataset", named, f"'{folder / 'dataset_info.json'}' is not here; set data.path"))
    for index, name in enumerate(names):
        facts = {} if known is None else known.get(name)
        if facts is None:
            reading.refuse("dataset", name, "is not in dataset_info.json")
            continue
        path = str(folder / facts["file_name"]) if "file_name" in facts else name
        columns = {}
        names_of = {"prompt": "instruction", "query": "input", "response": "output", "messages": "messages"}
        for theirs, ours in names_of.items():
            if theirs in (facts.get("columns") or {}):
                columns[ours] = facts["columns"][theirs]
        text = columns.pop("instruction", None) if values.get("stage") == "pt" else None
        source = {"path": path, "name": f"{index}-{name}"} | ({"columns": columns} if columns else {})
        add_source(reading, "dataset", source | ({"text_field": text} if text else {}))
        for key in sorted(set(facts) - {"file_name", "columns", "formatting", "tags"}):
            reading.not_taken.append(
                FileKey(f"dataset_info.json: {name}.{key}", facts[key], "the file is read as it is")
            )
        if facts.get("formatting", "alpaca") == "alpaca" and values.get("stage") != "pt":
            reading.means.append(f"dataset {name}: instruction, input and output are joined by the chat template here")
