"""Tokens to the ranks that have their experts, and the results back: differentiable, dropless, over one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from shardwise.distributed.comm_timer import COMM_TIMER

PART = "exposed_ep"


class RowExchange(Function):
    """All-to-all of rows: ``sends`` rows to each rank, ``receives`` rows from each; the backward goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Send the rows."""
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Send the gradients back."""
        return _exchanged(grad, ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    found = rows.new_empty((sum(receives), *rows.shape[1:]))
    with COMM_TIMER.part(PART):
        dist.all_to_all_single(found, rows.contiguous(), list(receives), list(sends), group=group)
    return found


def counts_from(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return how many rows each rank sends for each expert of this rank, given those that this rank sends to each."""
    ranks = dist.get_world_size(group)
    sent = counts.reshape(ranks, -1).contiguous()
    found = torch.empty_like(sent)
    with COMM_TIMER.part(PART):
        dist.all_to_all_single(found, sent, group=group)
    return found


class Share(Function):
    """This rank's rows of a tensor that all ranks of ``group`` have; its gradient is gathered, so all have that too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, first: int, end: int, group: dist.ProcessGroup) -> torch.Tensor:
        """Take the rows of this rank."""
        ctx.place, ctx.group = (first, end, len(rows)), group
        return rows[first:end].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gather the gradients of all ranks' rows."""
        first, end, number = ctx.place
        return _gathered(grad, first, end, number, ctx.group), None, None, None


class Whole(Function):
    """All rows, of which each rank of ``group`` has its share; the gradient is the same on all ranks, and split."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, first: int, end: int, number: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Gather the rows of all ranks."""
        ctx.place = first, end
        return _gathered(rows, first, end, number, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Take the gradient of this rank's rows."""
        first, end = ctx.place
        return grad[first:end].contiguous(), None, None, None, None


def _gathered(rows: torch.Tensor, first: int, end: int, number: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Add each rank's rows in their place to zeros: shares may differ by a row."""
    found = rows.new_zeros((number, *rows.shape[1:]))
    found[first:end] = rows
    with COMM_TIMER.part(PART):
        dist.all_reduce(found, group=group)
    return found


class ScaledGradient(Function):
    """A tensor whose gradient is multiplied by ``scale``."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the tensor."""
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Scale its gradient."""
        return grad * ctx.scale, None


class Untouched(Function):
    """Rows as they are, none; the gradient of ``weights`` is zero, not missing: ranks reduce the same tensors."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        ctx.save_for_backward(*weights)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return zeros for the weights."""
        return grad, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)
