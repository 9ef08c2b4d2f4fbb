"""What the ranks of a tensor-parallel group send each other in forward and in backward, each pair as one function.

Activations are [samples, length, ...] and are cut along dim 1. Everything here works on plain local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

SEQUENCE = 1


class Group:
    """The ranks of one tensor-parallel group, and where this one stands among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        # gloo's reduce-scatter sends as much as an all-reduce does; pieces sent apart and added here cost half of it
        self.sums_pieces = dist.get_backend(group) == "gloo"


def all_reduce(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, in place."""
    dist.all_reduce(tensor, group=group.group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group, dim: int = SEQUENCE) -> torch.Tensor:
    """The equal parts of all ranks side by side along ``dim``."""
    tensor = tensor.contiguous()
    found = tensor.new_empty((group.size, *tensor.shape))
    dist.all_gather_single(found, tensor.unsqueeze(0), group=group.group)
    return _joined(found, dim)


def reduce_scatter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part, along the sequence, of the sum over the group."""
    shape = list(tensor.shape)
    shape[SEQUENCE : SEQUENCE + 1] = [group.size, shape[SEQUENCE] // group.size]
    pieces = tensor.reshape(shape).movedim(SEQUENCE, 0).contiguous()
    if group.sums_pieces:
        others = torch.empty_like(pieces)
        dist.all_to_all_single(others, pieces, group=group.group)
        return others.sum(0)
    found = pieces.new_empty(pieces.shape[1:])
    dist.reduce_scatter_single(found, pieces.flatten(0, 1), group=group.group)
    return found


def part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part along the sequence, contiguous."""
    length = tensor.shape[SEQUENCE] // group.size
    return tensor.narrow(SEQUENCE, group.rank * length, length).contiguous()


def _joined(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    dim %= stacked.ndim - 1
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


class Share(Function):
    """Forward as it is, backward summed: a whole tensor goes into work that is shared out."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class Sum(Function):
    """Forward summed, backward as it is: parts of a sum become a whole tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class GatherIn(Function):
    """Forward gathered along the sequence, backward summed and cut: a cut tensor goes into work that is shared out."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return reduce_scatter(grad, ctx.group), None


class SumOut(Function):
    """Forward summed and cut along the sequence, backward gathered: parts of a sum become a cut tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.group), None


class CutSequence(Function):
    """Forward cut along the sequence, backward gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return part(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.group), None


class JoinSequence(Function):
    """Forward gathered along the sequence, backward cut: what comes after is the same work on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return part(grad, ctx.group), None


class JoinLast(Function):
    """Forward gathered along the last dim, whose parts may be uneven (``widths``); backward cut."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, widths: Sequence[int]) -> torch.Tensor:
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


class Exchange(Function):
    """Rows of a tensor that lies over the ranks by rows: each gets those that it uses, in ascending order.

    ``rows[r][s]`` are the rows that rank r uses of those that rank s has, counted from the first that s has. Backward
    adds up, where the row lies, what all its users have.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Group, rows: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        ctx.group, ctx.rows, ctx.shape = group, rows, local.shape
        sent = torch.cat([local[rows[to][group.rank]] for to in range(group.size)])
        there = [len(rows[to][group.rank]) for to in range(group.size)]
        here = [len(piece) for piece in rows[group.rank]]
        found = local.new_empty((sum(here), *local.shape[1:]))
        dist.all_to_all_single(found, sent, here, there, group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, rows = ctx.group, ctx.rows
        there = [len(rows[to][group.rank]) for to in range(group.size)]
        here = [len(piece) for piece in rows[group.rank]]
        found = grad.new_empty((sum(there), *grad.shape[1:]))
        dist.all_to_all_single(found, grad.contiguous(), there, here, group=group.group)
        whole = grad.new_zeros(ctx.shape)
        for to, piece in enumerate(found.split(there)):
            whole.index_add_(0, rows[to][group.rank], piece)
        return whole, None, None
