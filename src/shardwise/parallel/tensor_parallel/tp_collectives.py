"""What the ranks of a tensor-parallel group send each other in forward and in backward, each pair as one function.

Activations are [samples, length, ...] and are cut along dim 1. Everything here works on plain local tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from shardwise.distributed.comm_timer import WAITS

SEQUENCE = 1
PART = "exposed_tp"


class TpGroup:
    """The ranks of one tensor-parallel group, and where this one stands among them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        # gloo's reduce-scatter sends as much as an all-reduce does; pieces sent apart and added here cost half of it
        self.sums_pieces = dist.get_backend(group) == "gloo"


def all_reduce(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Sum over the group, in place."""
    with WAITS.part(PART):
        dist.all_reduce(tensor, group=group.group)
    return tensor


def all_gather(tensor: torch.Tensor, group: TpGroup, dim: int = SEQUENCE) -> torch.Tensor:
    """The equal parts of all ranks side by side along ``dim``."""
    tensor = tensor.contiguous()
    found = tensor.new_empty((group.size, *tensor.shape))
    with WAITS.part(PART):
        dist.all_gather_single(found, tensor.unsqueeze(0), group=group.group)
    return _joined(found, dim)


def reduce_scatter(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """This rank's part, along the sequence, of the sum over the group."""
    shape = list(tensor.shape)
    shape[SEQUENCE : SEQUENCE + 1] = [group.size, shape[SEQUENCE] // group.size]
    pieces = tensor.reshape(shape).movedim(SEQUENCE, 0).contiguous()
    if group.sums_pieces:
        others = torch.empty_like(pieces)
        with WAITS.part(PART):
            dist.all_to_all_single(others, pieces, group=group.group)
        return others.sum(0)
    found = pieces.new_empty(pieces.shape[1:])
    with WAITS.part(PART):
        dist.reduce_scatter_single(found, pieces.flatten(0, 1), group=group.group)
    return found


def part(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """This rank's part along the sequence, contiguous."""
    length = tensor.shape[SEQUENCE] // group.size
    return tensor.narrow(SEQUENCE, group.rank * length, length).contiguous()


def _joined(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    dim %= stacked.ndim - 1
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


def share(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Forward as it is, backward summed: a whole tensor goes into work that is shared out."""
    found: torch.Tensor = _Share.apply(tensor, group)
    return found


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def add_up(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Forward summed, backward as it is: parts of a sum become a whole tensor."""
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


def gather_in(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Forward gathered along the sequence, backward summed and cut: a cut tensor goes into work that is shared out."""
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


def add_up_cut(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Forward summed and cut along the sequence, backward gathered: parts of a sum become a cut tensor."""
    found: torch.Tensor = _SumOut.apply(tensor, group)
    return found


class _CutSequence(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return part(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.group), None


def cut_sequence(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Forward cut along the sequence, backward gathered."""
    found: torch.Tensor = _CutSequence.apply(tensor, group)
    return found


class _JoinSequence(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return part(grad, ctx.group), None


def join_sequence(tensor: torch.Tensor, group: TpGroup) -> torch.Tensor:
    """Forward gathered along the sequence, backward cut: what comes after is the same work on every rank."""
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


def join_last(tensor: torch.Tensor, group: TpGroup, widths: Sequence[int]) -> torch.Tensor:
    """Forward gathered along the last dim, whose parts may be uneven (``widths``); backward cut."""
    found: torch.Tensor = _JoinLast.apply(tensor, group, widths)
    return found


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor that lies over the ranks by rows are used where.

    ``sent`` are rows that this rank has, one user after the other; ``there`` and ``here`` say how many each other rank
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
        with WAITS.part(PART):
            dist.all_to_all_single(found, sent, rows.here, rows.there, group=group.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows: Rows = ctx.rows
        found = grad.new_empty((sum(rows.there), *grad.shape[1:]))
        with WAITS.part(PART):
            dist.all_to_all_single(found, grad.contiguous(), rows.there, rows.here, group=ctx.group.group)
        return grad.new_zeros(ctx.shape).index_add_(0, rows.sent, found), None, None


def exchange(local: torch.Tensor, group: TpGroup, rows: Rows) -> torch.Tensor:
    """Rows of a tensor that lies over the ranks by rows: each gets those that it uses, in ascending order.

    Backward adds up, where a row lies, what all its users have.
    """
    found: torch.Tensor = _Exchange.apply(local, group, rows)
    return found
