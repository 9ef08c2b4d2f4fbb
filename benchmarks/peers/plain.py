"""The hand-written loops that Shardwise is measured against: what a careful user would write without it.

``+tp`` and ``+pp`` are written for the Llama of transformers, as PyTorch's tutorials and torchtitan write them for
theirs: `plain_tensor` and `plain_pipeline` hold what is special about them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shardwise.bench.step.step_bench import Batch, TrainStep
from shardwise.errors import UserError
from shardwise.plan.plan import Plan

BASES = ("ddp", "fsdp")


def check_plain(plan: Plan, model: nn.Module) -> None:
    """Whether there is a hand-written loop for ``plan``.

    Raises:
        UserError: there is none; with what there is.
    """
    strategy, problems = plan.parsed, []
    if strategy.base not in BASES or strategy.cp > 1 or strategy.offload:
        problems.append(
            f"strategy '{plan.strategy}': bench step has loops by hand for {' and '.join(BASES)}, each with any of "
            "+tp2 and +pp2; use one of those"
        )
    if strategy.tp * strategy.pp > 1 and not is_llama(model):
        problems.append(
            f"strategy '{plan.strategy}': the hand-written loops with +tp and +pp are for transformers' Llama, and the "
            f"model is a {type(model).__name__}; use model.config=examples/llama-2m, or leave +tp and +pp out"
        )
    if problems:
        raise UserError(*problems)


def is_llama(model: nn.Module) -> bool:
    """True for the model that the loops with ``+tp`` and ``+pp`` are written for."""
    return type(model).__name__ == "LlamaForCausalLM"


def plain_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP as the tutorials have it."""
    return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)


def plain_fsdp(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """FSDP2 as the tutorials have it: each block, then the root."""
    from shardwise.model.read import find_blocks

    mesh = init_device_mesh(device.type, (world_size,))  # whose device fully_shard moves each block to
    for name in find_blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def plain_zero1(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` with its state sharded over the ranks, as PyTorch's recipe has it; its groups say how to step."""
    return ZeroRedundancyOptimizer(optimizer.param_groups, optimizer_class=type(optimizer))


def data_parallel(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, plan: Plan) -> None:
    """Data parallel around a model (or a stage) that is cut already, on the ``dp`` axis of ``mesh`` if it has one."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        return
    wrap: Any = replicate if plan.parsed.base == "ddp" else fully_shard
    for block in blocks:
        wrap(block, mesh=mesh["dp"])
    wrap(model, mesh=mesh["dp"])


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None, plan: Plan | None = None
) -> TrainStep:
    """A training step: forward, mean loss and backward of each micro batch, clip, step; returns this rank's loss.

    Gradients are reduced by the last backward. With a ``plan`` that has ``+tp``, positions are given, because the model
    would count those of its part of the sequence only, and the loss takes logits that are cut over the vocabulary.
    """
    is_split = plan is not None and plan.dims.tp > 1

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        places = {"position_ids": torch.arange(inputs.shape[1], device=inputs.device)[None]} if is_split else {}
        outputs: Any = model(inputs, **places)
        return outputs if isinstance(outputs, torch.Tensor) else outputs.logits

    def step(micros: Sequence[Batch]) -> float:
        total = torch.zeros((), device=micros[0][0].device)
        for index, (inputs, labels) in enumerate(micros):
            is_last = index == len(micros) - 1
            with no_sync(model, is_last), loss_context(plan):
                loss = functional.cross_entropy(forward(inputs).flatten(0, -2), labels.flatten()) / len(micros)
                loss.backward()
            total += (loss.to_local() if isinstance(loss, DTensor) else loss).detach()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def loss_context(plan: Plan | None) -> contextlib.AbstractContextManager[None]:
    """Torch's loss parallel where the plan has it."""
    from torch.distributed.tensor.parallel import loss_parallel

    is_split = plan is not None and plan.dims.tp > 1 and plan.loss_parallel
    return loss_parallel() if is_split else contextlib.nullcontext()


def no_sync(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients add up on this rank until the last micro batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        quiet: contextlib.AbstractContextManager[None] = model.no_sync()
        return quiet
    return contextlib.nullcontext()


def total_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of the gradients that this rank has a part of, whole over their own mesh; 0-d."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def sum_of_squares(norm: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """One norm over parts of the model that lie on different ranks."""
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()
