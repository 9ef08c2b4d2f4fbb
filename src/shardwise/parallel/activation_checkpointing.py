"""Recompute (activation checkpointing) of the repeated blocks.

``full`` keeps a block's inputs only. ``selective`` keeps the results of attention and of every second matrix
product, which are the dear ones to compute again, and recomputes the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardwise.distributed.comm_timer import WAITS
from shardwise.errors import ModelError
from shardwise.plan.plan import Recompute

_ATEN = torch.ops.aten
ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_fused_attention_overrideable.default,
}
MATMULS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
PACKED_MATMUL = "bitsandbytes::gemm_4bit"  # there once bitsandbytes is imported


def apply_recompute(
    module: nn.Module, mode: Recompute, blocks: Sequence[str], *, compiled: bool = False
) -> list[nn.Module]:
    """Wrap each block in place; returns the blocks as they stand in the module afterwards.

    What is done again counts as ``recompute`` in a step's time, but not in ``compiled`` blocks, where the compiler
    decides what is done when.

    Raises:
        ModelError: recompute is asked for, but the model has no repeated blocks.
    """
    if mode == "none":
        return [module.get_submodule(name) for name in blocks]
    if not blocks:
        raise ModelError(
            f"recompute '{mode}' needs repeated blocks (a ModuleList, ModuleDict or Sequential with two or more "
            "children of one type), and the model has none; set parallel.recompute to none"
        )
    options: dict[str, Any] = {"context_fn": _selective_contexts} if mode == "selective" else {}
    if not compiled:
        options = {"context_fn": _told_contexts if mode == "selective" else _plain_contexts}
    wrapped = []
    for name in blocks:
        parent, _, child = name.rpartition(".")
        block = checkpoint_wrapper(
            module.get_submodule(name), checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=True, **options
        )
        module.get_submodule(parent).register_module(child, block)
        wrapped.append(block)
    return wrapped


def _plain_contexts() -> tuple[Any, Any]:
    return nullcontext(), WAITS.part("recompute")


def _told_contexts() -> tuple[Any, Any]:
    first, again = _selective_contexts()
    return first, _Both(WAITS.part("recompute"), again)


class _Both(AbstractContextManager[None]):
    """One context inside of another, entered anew for each backward."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        found = self.inner.__exit__(*raised)
        self.outer.__exit__(None, None, None)
        return found


def _selective_contexts() -> tuple[Any, Any]:
    seen: dict[str, int] = defaultdict(int)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in MATMULS or op.name() == PACKED_MATMUL:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            return CheckpointPolicy.MUST_SAVE if seen[phase] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
