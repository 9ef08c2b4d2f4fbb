"""Tensor parallel: placement of each parameter, as data, and the matching forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.model.facts import ModelSpec
from shardwise.parallel.tensor_parallel.decide_layout import decide_layout
from shardwise.parallel.tensor_parallel.tensor_layout import TensorLayout, chunk
from shardwise.parallel.tensor_parallel.tp_forwards import TpForwards
from shardwise.plan.plan import Plan

__all__ = ["TensorLayout", "apply_tensor", "distribute", "tensor_layout"]


def tensor_layout(
    module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None, styles: dict[str, str] | None = None
) -> TensorLayout:
    """Decide the layout on the untouched module. No collective.

    Weights may be on the meta device.

    ``styles`` maps patterns of module names to ``colwise``, ``rowwise`` or ``replicate`` and takes precedence over
    the module's own styles (``module.tp_styles``, transformers' plan) and over its structure.

    Raises:
        ModelError: lists all obstacles, with what would work.
    """
    return decide_layout(module, spec, plan, sample, styles)


def apply_tensor(stage: nn.Module, layout: TensorLayout, mesh: DeviceMesh, plan: Plan) -> None:
    """Give the modules of ``stage`` the forwards of ``layout``; parameters are placed later."""
    TpForwards(stage, layout, mesh, sequence=plan.sequence_parallel).convert_all()


def distribute(name: str, full: torch.Tensor, layout: TensorLayout, mesh: DeviceMesh) -> torch.Tensor:
    """Distribute a full parameter over ``mesh`` as a DTensor (also if it is not sharded).

    No collective.
    """
    dim = layout.shard_dim.get(name)
    if dim is None:
        return DTensor.from_local(full, mesh, [Replicate()], run_check=False)
    first, end = chunk(full.shape[dim], mesh.size(), mesh.get_local_rank())
    local = full.narrow(dim, first, end - first).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=stride)
