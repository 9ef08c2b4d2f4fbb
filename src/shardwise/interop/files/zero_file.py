"""The strategy of a DeepSpeed configuration that another tool's file names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError
from shardwise.interop.deepspeed.import_config import read_document
from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.key_table import Reading

_OF_STAGE = {0: "ddp", 1: "deepspeed-zero1", 2: "deepspeed-zero2", 3: "deepspeed-zero3"}


def zero_strategy(reading: Reading, key: str, value: Any) -> None:
    """Set the strategy from a DeepSpeed configuration, a table or the path of one; its other keys are named."""
    document: Any = value
    if isinstance(value, str):
        try:
            document = read_document(Path(value))
        except PlanError as error:
            reading.problems += [f"{key}: {problem}" for problem in error.problems]
            return
    if not isinstance(document, Mapping):
        reading.refuse(key, value, "must be a table, or the path of one")
        return
    zero = document.get("zero_optimization", {})
    set_zero(reading, zero.get("stage", 0), zero.get("offload_optimizer", {}), zero.get("offload_param", {}))
    others = sorted(set(document) - {"zero_optimization"}) + sorted(
        f"zero_optimization.{name}" for name in set(zero) - {"stage", "offload_optimizer", "offload_param"}
    )
    if others:
        why = "the stage and offloading are taken; import the DeepSpeed file by itself for its other keys"
        reading.not_taken.append(FileKey(key, others, why))


def set_zero(reading: Reading, stage: Any, optimizer: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Set the strategy of a ZeRO stage with its devices of offloading."""
    if stage not in _OF_STAGE:
        reading.refuse("zero stage", stage, "must be 0, 1, 2 or 3")
        return
    devices = {optimizer.get("device", "none"), parameters.get("device", "none") if stage == 3 else "none"}
    strategy = _OF_STAGE[stage]
    if "nvme" in devices:
        reading.refuse("offload device", "nvme", "give the folder of the drive: import the DeepSpeed file by itself")
    elif "cpu" in devices and stage:
        if stage == 3 and len(devices) > 1 and optimizer.get("device") != parameters.get("device"):
            reading.refuse("offload devices", sorted(devices), "with stage 3 both are offloaded, or none")
        strategy += "+offload"
    reading.plan["strategy"] = strategy
