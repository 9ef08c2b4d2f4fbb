"""Context parallel: one sample's tokens over several ranks, whole sequences for each rank's heads inside attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec


def check_context(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> None:
    """Whether ``module`` can run under the plan's context parallel; no collective, nothing is changed.

    Raises:
        ModelError: everything that is in the way, with what would work.
    """


def apply_context(
    module: nn.Module,
    spec: ModelSpec,
    plan: Plan,
    mesh: DeviceMesh,
    sample: Any = None,
    blocks: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Let the attention of ``blocks`` (all of them if left out) exchange tokens for heads; returns what to say aloud."""
    raise NotImplementedError


def sequence_share(tree: Any, cp: int, index: int) -> Any:
    """This rank's tokens of one micro batch: each tensor [samples, length, ...] cut along the length."""
    raise NotImplementedError
