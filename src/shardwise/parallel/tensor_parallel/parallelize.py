"""Tensor parallel: which parameter lies how over the ranks, as data, and the forwards that go with it."""

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
    """Decide on the untouched module; no collective, nothing is changed, weights may be on the meta device.

    ``styles`` maps patterns of module names to ``colwise``, ``rowwise`` or ``replicate`` and is taken in place of what
    the module publishes (``module.tp_styles``, transformers' plan) or of what its structure says.

    Raises:
        ModelError: everything that is in the way, with what would work.
    """
    return decide_layout(module, spec, plan, sample, styles)


def apply_tensor(stage: nn.Module, layout: TensorLayout, mesh: DeviceMesh, plan: Plan) -> None:
    """Give the modules of ``stage`` the forwards that go with ``layout``; parameters are placed later."""
    TpForwards(stage, layout, mesh, sequence=plan.sequence_parallel).convert_all()


def distribute(name: str, whole: torch.Tensor, layout: TensorLayout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole parameter, as a DTensor over ``mesh`` (of one that is not cut too). No collective."""
    dim = layout.shard_dim.get(name)
    if dim is None:
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    first, end = chunk(whole.shape[dim], mesh.size(), mesh.get_local_rank())
    local = whole.narrow(dim, first, end - first).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=stride)
