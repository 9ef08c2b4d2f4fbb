"""Precision: weights, gradients and their reduction stay fp32.

Only compute has low precision.

Replicated parameters compute under autocast, sharded ones under FSDP2's mixed-precision policy. Outputs are cast to
fp32 either way, so that a loss is never summed in 16 bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree

from shardwise.plan.plan import Plan

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision_policy(plan: Plan, *, is_root: bool) -> MixedPrecisionPolicy:
    """Build FSDP2's policy: cast parameters after gathering, reduce gradients in fp32.

    Only the root casts outputs back: between blocks they keep the compute dtype.
    """
    if plan.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision],
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if is_root else None,
    )


def apply_autocast(module: nn.Module, plan: Plan) -> None:
    """Make ``module`` compute in the plan's dtype with its fp32 weights. In place.

    Does nothing for fp32.
    """
    if plan.precision == "fp32":
        return
    inner, dtype = module.forward, DTYPES[plan.precision]

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(plan.device, dtype=dtype):
            outputs = inner(*args, **kwargs)
        return _pytree.tree_map_only(torch.Tensor, _to_fp32, outputs)

    module.forward = forward


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def grad_scaler(plan: Plan) -> torch.amp.GradScaler | None:
    """Build the gradient scaler that fp16 needs; ``None`` for other precisions.

    It checks sharded gradients through DTensor, which shares one rank's overflow with every rank. If ranks have
    different parts of the model, too, the result is reduced over all of them.
    """
    if plan.precision != "fp16":
        return None
    if plan.dims.tp * plan.dims.pp == 1:
        return torch.amp.GradScaler(plan.device)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(plan.device)
