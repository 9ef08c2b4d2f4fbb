"""Tensor parallel: which parameter lies how over the ranks, as data, and the forwards that go with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec


@dataclass(frozen=True)
class TensorLayout:
    """How a model is cut over the tensor-parallel ranks. ``shard_dim`` names only parameters that are cut."""

    shard_dim: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tensor_layout(
    module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None, styles: dict[str, str] | None = None
) -> TensorLayout:
    """Decide on the untouched module; no collective.

    Raises:
        ModelError: everything that is in the way, with what would work.
    """
    raise NotImplementedError


def apply_tensor(stage: nn.Module, layout: TensorLayout, mesh: DeviceMesh, plan: Plan) -> None:
    """Give the modules of ``stage`` the forwards that go with ``layout``; parameters are placed later."""
    raise NotImplementedError


def distribute(name: str, whole: torch.Tensor, layout: TensorLayout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole parameter, as a DTensor over ``mesh`` (also of one that is not cut). No collective."""
    raise NotImplementedError
