"""`warm_up`: what PyTorch does the first time that it is asked, done once in the fork server and not in each rank.

The first step of an optimizer over cut weights costs a third of a second: for each operation and shape, DTensor asks a
fake tensor what comes out. The answers are kept by shape and know nothing of ranks or groups.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.receipts.receipt import Receipt
from shardwise.report.terminal import print_receipt
from tests.models import byte_decoder, decoder, ragged_batches


def warm_up() -> None:
    """Train the tests' own decoders in a group that has no ranks beside this one, starts no thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    luck = torch.get_rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for make, dtype in itertools.product((decoder, byte_decoder), (torch.float64, torch.float32)):
            for optimizer in OPTIMIZERS:
                _train(make().to(dtype), optimizer)
        print_receipt(Receipt(title="", lines=()), Console(file=io.StringIO()))
    finally:
        dist.destroy_process_group()
        _forget_groups()
        torch.set_rng_state(luck)
        torch.set_num_threads(threads)


OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    partial(torch.optim.AdamW, fused=True),
    torch.optim.SGD,
)


def _train(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for parameter in model.parameters():
        get_gradient_edge(parameter)  # each step asks for each one's place in the backward
        parameter.full_tensor()
    steps = optimizer(model.parameters(), lr=1e-3)
    for source, target in ragged_batches(2):
        loss: Any = cross_entropy(model(source).flatten(0, 1), target.flatten(), reduction="sum")
        loss.backward()
        steps.step()


def _forget_groups() -> None:
    """Answers of DTensor name the mesh that they are for; those of fake tensors, which stay, do not."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
