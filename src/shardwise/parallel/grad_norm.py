"""Gradient reductions over the model's own axes, and one global gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.parallel.ownership import StageOwnership

_LOW = (torch.bfloat16, torch.float16)


def finish_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients that are partial over tensor-parallel ranks, unless FSDP2 reduces them.

    One all-reduce for each mesh and dtype, whatever the number of parameters.
    """
    waiting: dict[tuple[DeviceMesh, torch.dtype], list[tuple[nn.Parameter, DTensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            waiting.setdefault((gradient.device_mesh, gradient.dtype), []).append((parameter, gradient))
    for group in waiting.values():
        mesh, placements = group[0][1].device_mesh, group[0][1].placements
        flat = torch.cat([gradient.to_local().flatten() for _, gradient in group])
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                with COMM_TIMER.part("exposed_tp"):
                    dist.all_reduce(flat, group=mesh.get_group(axis))
        for (parameter, gradient), part in zip(
            group, flat.split([g.to_local().numel() for _, g in group]), strict=True
        ):
            full = tuple(Replicate() if isinstance(p, Partial) else p for p in gradient.placements)
            local = part.view_as(gradient.to_local())
            parameter.grad = DTensor.from_local(
                local, mesh, full, run_check=False, shape=gradient.shape, stride=gradient.stride()
            )


def global_norm(
    named: Iterable[tuple[str, nn.Parameter]], ownership: StageOwnership | None, device: torch.device | str
) -> torch.Tensor:
    """Compute the 2-norm of the full model's gradient, 0-d, equal on every rank.

    One all-reduce of one number.

    Each element counts once: replicas of a shard count on the first of their ranks, and a parameter that
    another stage owns counts there. ``device`` is the device of collectives.
    """
    first = dist.get_rank() == (0 if ownership is None else ownership.ranks[0])
    mine: list[torch.Tensor] = []
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None or (ownership is not None and ownership.canonical(name) in ownership.shared_from_stage):
            continue
        if isinstance(gradient, DTensor):
            coordinate: list[int] = list(gradient.device_mesh.get_coordinate() or [])
            copies = zip(gradient.placements, coordinate, strict=False)
            if all(at == 0 for placement, at in copies if isinstance(placement, Replicate)):
                mine.append(gradient.to_local())
        elif first:
            mine.append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    if mine:
        norms = torch.stack(norms_of(mine))  # stacked: hundreds of numbers would be as many copies
        total += norms.to(total.device, torch.float64).square().sum()
    with COMM_TIMER.part("control"):
        dist.all_reduce(total)
    return total.sqrt()


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the 2-norm of each tensor, those of 16 bits in fp32: a norm of eight bits would clip wrongly."""
    low = all(tensor.dtype in _LOW for tensor in tensors)
    return list(torch._foreach_norm(tensors, 2.0, dtype=torch.float32 if low else None))


def full_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Compute the 2-norm of full gradients, 0-d."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype in _LOW for gradient in gradients):
        return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms_of(gradients)]))
    return torch.nn.utils.get_total_norm(gradients)


def scale_to(parameters: Iterable[nn.Parameter], largest: float, norm: torch.Tensor) -> None:
    """Scale gradients in place so that their norm, given as ``norm``, is at most ``largest``."""
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in local:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for dtype, tensors in groups.items():
        factor = factor.to(tensors[0].device, torch.float32 if dtype in _LOW else dtype)
        torch._foreach_mul_(tensors, factor)
