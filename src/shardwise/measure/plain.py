"""The hand-written loops that Shardwise is measured against: what a careful user would write without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]


def plain_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP as the tutorials have it."""
    return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)


def plain_fsdp(model: nn.Module, device: torch.device, blocks: list[nn.Module], world_size: int) -> nn.Module:
    """FSDP2 as the tutorials have it: each block, then the root."""
    mesh = init_device_mesh(device.type, (world_size,))
    model.to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Callable[[Batch], float]:
    """A training step on one micro batch: forward, mean loss, backward, clip, step; returns the local loss."""

    def step(batch: Batch) -> float:
        inputs, labels = batch
        outputs: Any = model(inputs)
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
