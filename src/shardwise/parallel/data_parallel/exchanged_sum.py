"""Reduce-scatter over gloo by exchange: half of the bytes of gloo's own, and behind the backward of the next unit.

gloo's reduce_scatter is an all-reduce of a copy, of which each rank keeps its piece: 2 (n - 1) / n of the gradients of
a unit leave each rank. Here ranks exchange the pieces (all-to-all, (n - 1) / n) and add them up themselves. FSDP2 waits
at once for a collective on CPUs, having no streams there; the exchange goes on while the backward of the next unit
computes, and its sum is taken when the next exchange begins, or the backward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from shardwise.distributed.comm_timer import COMM_TIMER, EXPOSED_DP
from shardwise.distributed.exchange import StandsFor, begin_exchange
from shardwise.errors import ModelError

DIVIDED_HERE = (torch.float32, torch.bfloat16)
"""Reduction types for which FSDP2 leaves the division by the number of ranks to the collective."""


class Pending:
    """The one exchange of a model that is on its way."""

    def __init__(self, *, reads_at_once: bool) -> None:
        self.reads_at_once = reads_at_once
        self._work: Any = None
        self._tensors: tuple[torch.Tensor, ...] = ()  # gloo's threads read and write them
        self._divisor = 1

    def begin(self, work: Any, pieces: torch.Tensor, sent: torch.Tensor, total: torch.Tensor, divisor: int) -> None:
        """Keep what is needed for `finish`."""
        self._work, self._tensors, self._divisor = work, (pieces, total, sent), divisor

    def finish(self) -> None:
        """Wait for the exchange, if there is one, and add up what came."""
        if self._work is None:
            return
        work, (pieces, total, _) = self._work, self._tensors
        self._work, self._tensors = None, ()
        with COMM_TIMER.part(EXPOSED_DP):
            work.wait()
        torch.sum(pieces, 0, out=total)
        if self._divisor > 1:
            total.div_(self._divisor)


class ExchangedSum(DefaultAllocMixin, ReduceScatter):
    """The reduce-scatter of one FSDP2 unit."""

    def __init__(self, unit: Any, pending: Pending) -> None:
        self._unit, self._pending = unit, pending

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Begin to sum the pieces of all ranks into ``output_tensor``; end at once what FSDP2 reads at once."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ModelError(
                "set_gradient_divide_factor is not run over gloo, which has no sum with a factor; divide the loss"
            )
        self._pending.finish()
        pieces = torch.empty_like(input_tensor)
        work = begin_exchange(StandsFor("reduce_scatter", input_tensor.nbytes), pieces, input_tensor, group)
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        self._pending.begin(work, pieces.view(group.size(), -1), input_tensor, output_tensor, divisor)
        if op == dist.ReduceOp.AVG and self._takes_views(input_tensor.dtype):  # a sum is divided at once
            output_tensor.fill_(torch.nan)  # for a hook that reads it before the backward has ended
        else:
            self._pending.finish()

    def _takes_views(self, dtype: torch.dtype) -> bool:
        """Whether FSDP2 takes views of the result, and neither divides, casts, adds, sums replicas nor calls hooks."""
        unit = self._unit
        return (
            not self._pending.reads_at_once
            and dtype in DIVIDED_HERE
            and unit._orig_dtype == dtype  # beside masters, another than its parameters'
            and not isinstance(unit.mesh_info, DDPMeshInfo)
            and unit._all_reduce_hook is None
            and all(
                one.sharded_param.grad is None
                and not one.offload_to_cpu
                and not one.sharded_param._post_accumulate_grad_hooks
                for one in unit.fsdp_params
            )
        )


def exchange_sums(root: nn.Module, *, pipelined: bool) -> None:
    """Let the units of ``root`` reduce by exchange.

    ``pipelined`` stages reduce outside of a backward, where nothing is left to compute meanwhile.
    """
    pending = Pending(reads_at_once=pipelined)
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if state._fsdp_param_group is not None:
            module.set_custom_reduce_scatter(ExchangedSum(state._fsdp_param_group, pending))
        ends = _then(state._root_post_backward_final_callback, pending)
        object.__setattr__(state, "_root_post_backward_final_callback", ends)


def _then(ends: Callable[[], None], pending: Pending) -> Callable[[], None]:
    def end() -> None:
        try:
            ends()
        finally:
            pending.finish()

    return end
