"""Apply recompute (activation checkpointing) to the repeated blocks.

``full`` saves only a block's inputs. ``selective`` saves the results of attention and of every second matrix
product, which are the most expensive to recompute, and recomputes the rest.
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

from shardwise.distributed.comm_timer import COMM_TIMER
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
PACKED_MATMUL = "bitsandbytes::gemm_4bit"  # registered once bitsandbytes is imported


def apply_recompute(
    module: nn.Module, mode: Recompute, blocks: Sequence[str], *, compiled: bool = False, layers: int | None = None
) -> list[nn.Module]:
    """Wrap the first ``layers`` blocks (all for ``None``) in place; return the blocks that are in the module then.

    Recomputation counts as ``recompute`` in a step's time, except in ``compiled`` blocks, where the compiler
    decides what runs when.

    Raises:
        ModelError: recompute is requested, but the model has no repeated blocks.
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
    for name in blocks[:layers]:
        parent, _, child = name.rpartition(".")
        block = checkpoint_wrapper(
            module.get_submodule(name), checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=True, **options
        )
        module.get_submodule(parent).register_module(child, block)
        wrapped.append(block)
    return wrapped + [module.get_submodule(name) for name in blocks[len(wrapped) :]]


def _plain_contexts() -> tuple[Any, Any]:
    return nullcontext(), COMM_TIMER.part("recompute")


def _told_contexts() -> tuple[Any, Any]:
    first, again = _selective_contexts()
    return first, _Both(COMM_TIMER.part("recompute"), again)


class _Both(AbstractContextManager[None]):
    """Nest one context inside another; both are re-entered for each backward."""

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
