"""Keys of FSDP as Accelerate, Trainer and axolotl have them, and the strategy that they really run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.key_table import Reading, Rule, group, idle, left_out, part_of, refused

_PLAIN: dict[str, Rule] = {
    "version": part_of("strategy"),
    "reshard_after_forward": part_of("strategy"),
    "sharding_strategy": part_of("strategy"),
    "cpu_offload": part_of("strategy"),
    "offload_params": part_of("strategy"),
    "activation_checkpointing": part_of("recompute"),
    "auto_wrap_policy": part_of("sharded by the repeated blocks"),
    "transformer_layer_cls_to_wrap": part_of("sharded by the repeated blocks"),
    "mixed_precision_policy": left_out("gradients are reduced in fp32"),
    "activation_checkpointing_offload": refused("saved activations are not offloaded"),
    "ignored_modules": refused("all modules are sharded"),
    "xla": refused("runs on TPUs"),
    "xla_fsdp_v2": refused("runs on TPUs"),
    "xla_fsdp_grad_ckpt": refused("runs on TPUs"),
    "xla_fsdp_settings": refused("runs on TPUs"),
    "min_num_params": left_out("blocks are sharded whole, whatever their size"),
    **group(
        idle,
        {
            "how weights are loaded and saved, which Shardwise does sharded": "cpu_ram_efficient_loading "
            "sync_module_states state_dict_type final_state_dict_type",
            "of FSDP1 only; FSDP2 has it so": "use_orig_params limit_all_gathers backward_prefetch "
            "backward_prefetch_policy forward_prefetch",
            "how host memory is pinned": "cpu_offload_pin_memory",
        },
    ),
}
FSDP_OF_TRAINER: dict[str, Rule] = {**_PLAIN, **{f"fsdp_{key}": rule for key, rule in _PLAIN.items()}}
"""Trainer takes each key with and without ``fsdp_``."""
_SHARDING = {"1": "fsdp", "full_shard": "fsdp", "2": "zero2", "shard_grad_op": "zero2", "3": "ddp", "no_shard": "ddp"}
_SHARDING |= {"4": "hsdp", "hybrid_shard": "hsdp", "5": "hsdp", "hybrid_shard_zero2": "hsdp"}


def fsdp_strategy(reading: Reading, values: Mapping[str, Any], *, cpu: bool, default_version: int) -> None:
    """Set the strategy of FSDP's keys; on a CPU it is DDP."""
    options = {key.removeprefix("fsdp_"): value for key, value in values.items() if value is not None}
    version = int(options.get("version", default_version))
    if cpu:
        reading.plan["strategy"] = "ddp"
        reading.means.append(
            "FSDP on a CPU: the tool trains DDP without a word, so the strategy is ddp; fsdp shards here"
        )
        return
    strategy = _sharding(reading, options, version)
    if options.get("cpu_offload") or options.get("offload_params"):
        strategy += "+offload"
    if _true(options.get("activation_checkpointing")):
        reading.plan["recompute"] = "full"
    if version == 1:
        reading.means.append("version 1 is FSDP1, which is deprecated there; the strategy here is FSDP2")
    if reading.plan.get("precision", "fp32") != "fp32":
        reading.means.append(f"gradients are reduced in {reading.plan['precision']} there, and in fp32 here")
    reading.plan["strategy"] = strategy


def _sharding(reading: Reading, options: Mapping[str, Any], version: int) -> str:
    named = str(options.get("sharding_strategy", "")).lower()
    reshard = options.get("reshard_after_forward", True)
    if named and named not in _SHARDING:
        reading.refuse("sharding_strategy", named, f"must be one of {', '.join(k for k in _SHARDING if len(k) > 1)}")
        return "fsdp"
    if named and version == 1:
        return _SHARDING[named]
    if named:
        reading.not_taken.append(FileKey("sharding_strategy", named, "FSDP2 goes by reshard_after_forward alone"))
    if str(reshard).lower() in _SHARDING:
        return _SHARDING[str(reshard).lower()]
    return "fsdp" if _true(reshard) else "zero2"


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")
