"""A forward or a backward that raises: weights of before an update are not used after it, nor are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, UserError
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.models import decoder, ragged_batches
from tests.worlds import run_world

STEPS = 4
Weights = dict[str, torch.Tensor]


class Cut(Exception):
    """What the model's owner throws."""


class Raises(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise Cut


def throws(*_: Any) -> None:
    raise Cut


def cut(model: nn.Module, ids: torch.Tensor) -> None:
    """A forward of which only the first block's output is wanted, and then one that fails inside of the second."""
    first, second = model.blocks[0], model.blocks[1]
    for hook in (first.register_forward_hook(throws), second.norm.register_forward_pre_hook(throws)):
        with torch.no_grad(), pytest.raises(Cut):
            model(ids)
        hook.remove()


def trained(strategy: str, kind: str) -> Weights:
    session = start(strategy, receipts=False)
    model = decoder()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = ragged_batches(2 * STEPS)
    if kind == "backward":
        with pytest.raises(Cut):
            for step in session.steps(batches):
                hook = model.blocks[1].register_forward_hook(lambda module, args, out: Raises.apply(out))
                step.run(model, token_loss_sum)
        hook.remove()
        with pytest.raises(UserError, match="the backward before this forward raised"):
            model(batches[0][0])
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        if kind == "forward":
            cut(model, batches[0][0])
        step.update(optimizer)
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in session.module.named_parameters()}
    session.close()
    return {name: value.detach().clone() for name, value in found.items()}


def all_trained() -> dict[str, dict[str, Weights]]:
    return {
        strategy: {kind: trained(strategy, kind) for kind in ("none", "forward", "backward")}
        for strategy in ("fsdp", "zero2")
    }


def test_training_goes_on_as_if_nothing_had_been() -> None:
    for rank in run_world(all_trained, 2):
        for strategy, found in rank.items():
            for kind in ("forward", "backward"):
                for name, value in found["none"].items():
                    assert torch.equal(found[kind][name], value), (strategy, kind, name)


def early() -> tuple[bool, str]:
    """Gradients that a module's hook reads while they are summed, and a factor that gloo has not."""
    session = start("fsdp", receipts=False)
    model = decoder().float()
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids, _ = ragged_batches(2)[dist.get_rank()]
    seen: list[torch.Tensor] = []

    def reads(*_: Any) -> None:
        seen.extend(p.grad.to_local().clone() for p in model.blocks[1].parameters() if p.grad is not None)

    model.blocks[0].register_full_backward_hook(reads)
    model(ids).sum().backward()
    unread = bool(seen) and all(bool(one.isnan().all()) for one in seen if one.numel())
    summed = all(bool(p.grad.to_local().isfinite().all()) for p in model.parameters() if p.grad is not None)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(4.0)
    with pytest.raises(ModelError) as said:
        model(ids).sum().backward()
    return unread and summed, str(said.value)


def test_a_gradient_on_its_way_is_not_a_number_and_no_other_sum_is_run() -> None:
    for unread, said in run_world(early, 2):
        assert unread
        assert said.startswith("set_gradient_divide_factor is not run over gloo")
