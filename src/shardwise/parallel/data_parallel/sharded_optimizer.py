"""ZeRO-1: PyTorch's ZeroRedundancyOptimizer, with small weights sent together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from shardwise.distributed.shared_memory import SharedMemory
from shardwise.plan.traffic import ZERO1_MESSAGE, ZERO1_TOGETHER

IN_FLIGHT = 1 << 24
"""Bytes of copies that exist at once, about."""


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Optimizer whose states are spread over the ranks by full parameters.

    PyTorch's sends each stepped weight in a broadcast of its own, hundreds for a large model, each of which waits for
    the link: a step of small weights took 1.3 times as long over a link of 1 ms, and 2.8 times over one of 10 ms. The
    weights are the same to the bit. Ranks that share ``memory`` send through it.
    """

    memory: SharedMemory | None = None

    def _sync_params(self) -> None:
        """Send each rank's stepped weights to all other ranks."""
        if self.memory is not None:
            self._share(self.memory)
            return
        sent: list[Callable[[], None]] = []
        copied = 0
        for rank in range(self.world_size):
            source = dist.get_global_rank(self.process_group, rank)
            for weights in self._messages(rank):
                sent.append(self._send(weights, source, own=rank == self.rank))
                copied += 0 if len(weights) == 1 else sum(w.nbytes for w in weights)
                if copied > IN_FLIGHT:
                    _finish(sent)
                    copied = 0
        _finish(sent)

    def _share(self, memory: SharedMemory) -> None:
        """Send all through ``memory``, in logical order: strides may differ between ranks."""
        weights = [self._weights(rank) for rank in range(self.world_size)]
        flat = [[weight.contiguous() for weight in of_rank] for of_rank in weights]
        memory.broadcast(flat)
        for weight, sent in zip(itertools.chain(*weights), itertools.chain(*flat), strict=True):
            if sent is not weight:
                weight.copy_(sent)

    def _weights(self, rank: int) -> list[torch.Tensor]:
        groups = self._partition_parameters()[rank]  # type: ignore[attr-defined]
        return [parameter.data for group in groups for parameter in group["params"]]

    def _messages(self, rank: int) -> Iterator[list[torch.Tensor]]:
        """Weights of one rank, those of each message: alike on all ranks."""
        together: list[torch.Tensor] = []
        for weight in self._weights(rank):
            if weight.nbytes > ZERO1_TOGETHER:
                yield [weight]
                continue
            full = sum(w.nbytes for w in together) + weight.nbytes > ZERO1_MESSAGE
            if together and (full or weight.dtype != together[0].dtype):  # a layer may be cast after `prepare`
                yield together
                together = []
            together.append(weight)
        if together:
            yield together

    def _send(self, weights: list[torch.Tensor], source: int, *, own: bool) -> Callable[[], None]:
        """Start a broadcast; the function that is returned waits for it and writes the weights."""
        if len(weights) == 1:
            flat = weights[0]
        elif own:
            flat = torch.cat([w.reshape(-1) for w in weights])  # in logical order: strides may differ between ranks
        else:
            flat = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device)
        work: Any = dist.broadcast(flat, src=source, group=self.process_group, async_op=True)

        def finish() -> None:
            work.wait()
            if len(weights) > 1 and not own:
                parts = flat.split([w.numel() for w in weights])
                torch._foreach_copy_(weights, [part.view(w.shape) for w, part in zip(weights, parts, strict=True)])

        return finish


def _finish(sent: list[Callable[[], None]]) -> None:
    for finish in sent:
        finish()
    sent.clear()
