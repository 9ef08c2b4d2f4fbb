"""Precision: weights, gradients and their reduction stay fp32, unless the plan says otherwise.

Only compute has low precision. Replicated parameters compute under autocast, sharded ones under FSDP2's mixed-precision
policy. Outputs are cast to fp32 either way, so that a loss is never summed in 16 bits.

Weights of a plan with ``weights = "compute"`` or ``"masters"`` rest in bf16. Then no autocast is needed: inputs are
cast, as FSDP2 casts them, and what a model wants in fp32 it casts itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree

from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import stores_low

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision_policy(plan: Plan, *, is_root: bool) -> MixedPrecisionPolicy:
    """Build FSDP2's policy: cast parameters after gathering, reduce gradients in the plan's type.

    Only the root casts outputs back: between blocks they keep the compute dtype.
    """
    if plan.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision],
        reduce_dtype=torch.float32 if plan.reduce == "fp32" else DTYPES[plan.precision],
        output_dtype=torch.float32 if is_root else None,
    )


def apply_autocast(module: nn.Module, plan: Plan) -> None:
    """Make ``module`` compute in the plan's dtype, whatever its weights have. In place.

    Does nothing for fp32.
    """
    if plan.precision == "fp32":
        return
    module.forward = _Autocast(module.forward, plan.device, DTYPES[plan.precision], stores_low(plan))


class _Autocast:
    """In the place of a model's ``forward``; of a copy of the model, such as an average, it calls the copy's."""

    def __init__(self, inner: Callable[..., Any], device: str, dtype: torch.dtype, low: bool) -> None:
        self.inner, self.device, self.dtype, self.low = inner, device, dtype, low
        functools.update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.low:
            args, kwargs = _pytree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with torch.autocast(self.device, dtype=self.dtype, enabled=not self.low):
            outputs = self.inner(*args, **kwargs)
        return _pytree.tree_map_only(torch.Tensor, _to_fp32, outputs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def store_low(module: nn.Module, plan: Plan) -> None:
    """Cast parameters to the type in which the plan stores them, in place; buffers keep theirs."""
    for parameter in module.parameters() if stores_low(plan) else ():
        if parameter.dtype in (torch.float32, torch.float64):
            parameter.data = parameter.data.to(DTYPES[plan.precision])


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
