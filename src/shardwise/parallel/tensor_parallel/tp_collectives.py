"""Collectives of a tensor-parallel group, each paired with its backward in one function.

Activations are [samples, length, ...] and are sharded along dim 1. Everything here works on plain local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from shardwise.distributed.comm_timer import COMM_TIMER

SEQUENCE = 1
PART = "exposed_tp"


class TpGroup:
    """Ranks of one tensor-parallel group, and this rank's index in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        # gloo's reduce-scatter sends as much as an all-reduce does; separate sends and a local sum cost half of it
        self.sums_pieces = dist.get_backend(group) == "gloo"


def all_reduce(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Sum over the group, in place."""
    with COMM_TIMER.part(PART):
        dist.all_reduce(tensor, group=group.group)
    return tensor


def all_gather(tensor: torch.Tensor, group: TpGroup, dim: int = SEQUENCE) -> torch.Tensor:
    """Concatenate the equal parts of all ranks along ``dim``."""
    tensor = tensor.contiguous()
    found = tensor.new_empty((group.size, *tensor.shape))
    with COMM_TIMER.part(PART):
        dist.all_gather_single(found, tensor.unsqueeze(0), group=group.group)
    return _joined(found, dim)


def reduce_scatter(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Return this rank's part, along the sequence, of the sum over the group."""
    shape = list(tensor.shape)
    shape[SEQUENCE : SEQUENCE + 1] = [group.size, shape[SEQUENCE] // group.size]
    pieces = tensor.reshape(shape).movedim(SEQUENCE, 0).contiguous()
    if group.sums_pieces:
        others = torch.empty_like(pieces)
        with COMM_TIMER.part(PART):
            dist.all_to_all_single(others, pieces, group=group.group)
        return others.sum(0)
    found = pieces.new_empty(pieces.shape[1:])
    with COMM_TIMER.part(PART):
        dist.reduce_scatter_single(found, pieces.flatten(0, 1), group=group.group)
    return found


def part(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Return this rank's part along the sequence, contiguous."""
    length = tensor.shape[SEQUENCE] // group.size
    return tensor.narrow(SEQUENCE, group.rank * length, length).contiguous()


def _joined(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    dim %= stacked.ndim - 1
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


class _CopyToTp(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


def share(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Identity in forward, all-reduce in backward: a replicated tensor enters sharded work."""
    found: torch.Tensor = _CopyToTp.apply(tensor, group)
    return found


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def reduce_from_tp(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """All-reduce in forward, identity in backward: partial sums become a replicated tensor."""
    found: torch.Tensor = _Sum.apply(tensor, group)
    return found


class _GatherIn(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return reduce_scatter(grad, ctx.group), None


def gather_from_sp(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """All-gather along the sequence in forward, reduce-scatter in backward: enters sharded work."""
    found: torch.Tensor = _GatherIn.apply(tensor, group)
    return found


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.group), None


def reduce_scatter_to_sp(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Reduce-scatter along the sequence in forward, all-gather in backward."""
    found: torch.Tensor = _SumOut.apply(tensor, group)
    return found


class _ScatterToSp(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return part(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.group), None


def scatter_to_sp(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Split along the sequence in forward, all-gather in backward."""
    found: torch.Tensor = _ScatterToSp.apply(tensor, group)
    return found


class _JoinSequence(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return part(grad, ctx.group), None


def gather_sequence(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """All-gather along the sequence in forward, split in backward: replicated work follows."""
    found: torch.Tensor = _JoinSequence.apply(tensor, group)
    return found


class _JoinLast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup, widths: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.widths = group, widths
        most = max(widths)
        if min(widths) == most:
            return all_gather(tensor, group, -1)
        padded = torch.nn.functional.pad(tensor, (0, most - tensor.shape[-1]))
        found = all_gather(padded, group, -1).split(most, dim=-1)
        return torch.cat([piece.narrow(-1, 0, width) for piece, width in zip(found, widths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rank, widths = ctx.group.rank, ctx.widths
        return grad.narrow(-1, sum(widths[:rank]), widths[rank]).contiguous(), None, None


def gather_from_tp(tensor: torch.Tensor, group: TpGroup, widths: Sequence[int]) -> torch.Tensor:
    """All-gather along the last dim in forward (uneven ``widths`` allowed), split in backward."""
    found: torch.Tensor = _JoinLast.apply(tensor, group, widths)
    return found


@dataclass(frozen=True)
class Rows:
    """Rows of a row-sharded tensor that each rank sends and receives.

    ``sent`` are local rows, grouped by receiver; ``there`` and ``here`` count the rows that each other rank
    uses of this one's, and this one of each other's.
    """

    sent: torch.Tensor
    there: list[int]
    here: list[int]


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: TpGroup, rows: Rows) -> torch.Tensor:
        ctx.group, ctx.rows, ctx.shape = group, rows, local.shape
        sent = local.index_select(0, rows.sent)
        found = local.new_empty((sum(rows.here), *local.shape[1:]))
        with COMM_TIMER.part(PART):
            dist.all_to_all_single(found, sent, rows.here, rows.there, group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows: Rows = ctx.rows
        found = grad.new_empty((sum(rows.there), *grad.shape[1:]))
        with COMM_TIMER.part(PART):
            dist.all_to_all_single(found, grad.contiguous(), rows.there, rows.here, group=ctx.group.group)
        return grad.new_zeros(ctx.shape).index_add_(0, rows.sent, found), None, None


def exchange(local: torch.Tensor, group: TpGroup, rows: Rows) -> torch.Tensor:
    """Exchange rows of a row-sharded tensor: each rank gets those it uses, ascending.

    Backward sums the gradients of all users on the rank that has the row.
    """
    found: torch.Tensor = _Exchange.apply(local, group, rows)
    return found
