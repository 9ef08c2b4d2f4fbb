"""Export adapters as a peft folder: one safetensors file and its configuration."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpoint.convert.merge_lora import MAGNITUDE, SavedAdapters
from shardwise.checkpoint.matching import MODEL, Selection, TargetTensor
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.shardwise_reader import OwnSource

_WRAPPED = "base_model.model."  # prefix that peft's wrapper adds to the model's names


def peft_selection(source: OwnSource, saved: SavedAdapters, dtype: torch.dtype | None) -> Selection:
    """Select the adapters under peft's names, in ``dtype`` or unchanged."""
    items = []
    for name in (name for layer in saved.targets for name in saved.names(layer)):
        info = source.tensors[name]
        inner = name.removeprefix(MODEL)
        if inner.endswith(MAGNITUDE):
            inner = inner.removesuffix(".weight")
        items.append(TargetTensor(f"{MODEL}{_WRAPPED}{inner}", name, TensorInfo(dtype or info.dtype, info.shape)))
    return Selection(tuple(items), {}, {}, (), ())


def peft_config(saved: SavedAdapters, *, transposed: bool, causal: bool) -> dict[str, Any]:
    """Build ``adapter_config.json``.

    ``transposed`` where layers store [inputs, outputs], ``causal`` for a language model.
    """
    options = saved.options
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": saved.base,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "use_dora": options.dora,
        "target_modules": list(saved.targets),
        "fan_in_fan_out": transposed,
        "bias": "none",
    }
