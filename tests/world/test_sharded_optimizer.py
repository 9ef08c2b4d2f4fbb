"""zero1's own messages: the weights of PyTorch's ZeroRedundancyOptimizer to the bit, in fewer broadcasts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from shardwise.parallel.data_parallel.ddp import shard_optimizer
from shardwise.plan.traffic import ZERO1_MESSAGE, ZERO1_TOGETHER
from tests.worlds import run_world

SMALL = ZERO1_TOGETHER // 4  # elements of fp32: sent together
LARGE = SMALL + 1
STEPS = 3


def weights() -> list[nn.Parameter]:
    """Large and small ones, one that is not contiguous, one without elements."""
    generator = torch.Generator().manual_seed(0)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    parts = [one(LARGE), *(one(SMALL) for _ in range(2 * 3 * ZERO1_MESSAGE // ZERO1_TOGETHER))]
    parts += [one(5, 8).t(), one(0, 4), one(), *(one(7) for _ in range(18))]
    return [nn.Parameter(part) for part in parts]


def stepped(in_flight: int) -> tuple[bool, int, int]:
    """Whether all weights are those of PyTorch's after some steps; how many broadcasts both made in the last."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # more than a second

    from shardwise.parallel.data_parallel import sharded_optimizer

    ours, theirs = weights(), weights()
    with mock.patch.object(sharded_optimizer, "IN_FLIGHT", in_flight):
        groups = [{"params": ours[::2], "lr": 0.1}, {"params": ours[1::2], "lr": 0.2}]
        mine = shard_optimizer(torch.optim.AdamW(groups))
        others = [{"params": theirs[::2], "lr": 0.1}, {"params": theirs[1::2], "lr": 0.2}]
        plain = ZeroRedundancyOptimizer(others, torch.optim.AdamW)
        counts = []
        for step in range(STEPS):
            counts = [_broadcasts(optimizer, kept, step) for optimizer, kept in ((mine, ours), (plain, theirs))]
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    moved = all(not torch.equal(a, b) for a, b in zip(ours, weights(), strict=True) if a.numel())
    return same and moved, *counts


def _broadcasts(optimizer: Any, kept: list[nn.Parameter], step: int) -> int:
    """The broadcasts of a step; a rank that is not sent another's weights keeps the old ones."""
    generator = torch.Generator().manual_seed(step)
    for parameter in kept:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        optimizer.step()
    return int(sent.call_count)


def changed() -> tuple[bool, bool]:
    """Whether weights are those of one process where layers were cast, and where one rank's memory order differs."""
    same = []
    for case in ("cast", "order"):
        ours = [nn.Parameter(torch.ones(2, 3)) for _ in range(16)]
        optimizer = shard_optimizer(torch.optim.SGD(ours, lr=0.5))
        for place, weight in enumerate(ours):
            if case == "cast" and place % 8 < 4:  # a rank's first ones
                weight.data = weight.data.bfloat16()
            if case == "order" and dist.get_rank() == 1:
                weight.data = weight.data.t().contiguous().t()
            weight.grad = torch.arange(6.0).view(2, 3).to(weight.dtype) + place
        optimizer.step()
        wanted = [1 - 0.5 * (torch.arange(6.0).view(2, 3) + place) for place in range(16)]
        same.append(all(torch.equal(a.float(), b) for a, b in zip(ours, wanted, strict=True)))
    return same[0], same[1]


def cases() -> list[tuple[bool, int, int]]:
    return [stepped(in_flight) for in_flight in (1 << 24, 0)]


def test_weights_are_those_of_pytorchs_to_the_bit_in_fewer_messages() -> None:
    for rank in run_world(cases, 3):
        for same, ours, theirs in rank:
            assert same
            assert theirs == len(weights())
            assert ours < theirs / 2, "those below the limit are sent together"


def test_weights_of_other_types_and_memory_orders_arrive_whole() -> None:
    assert run_world(changed, 2) == [(True, True)] * 2
