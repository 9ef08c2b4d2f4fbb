"""Whole parameters on every rank: DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.spec.model import ModelSpec


def apply_replicate(module: nn.Module, spec: ModelSpec, world_size: int, device: torch.device) -> nn.Module:
    """Wrap ``module`` in DDP; one rank needs no wrapper and gets none.

    Gradients live in the reduction buckets; what ``no_sync`` accumulates before the last micro batch is a second copy
    beside them (seen in the dry run, and counted by the estimate). Buffers are broadcast before each forward only where
    there is batch norm, whose running statistics would drift apart otherwise.
    """
    if world_size == 1:
        return module
    return Replicated(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **_buffer_option(sync=bool(spec.batch_norms)),
    )


class Replicated(DistributedDataParallel):
    """DDP through which the user's own attributes (``model.config``, ``model.generate``) can still be reached."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _buffer_option(*, sync: bool) -> dict[str, Any]:
    """DDP's switch for buffers under the name that this PyTorch gives it (renamed in 2.13)."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": sync}
