"""Turn meta-device models into real weights, equal for every strategy and world size.

Rank 0 builds the model for real, exactly as one process would; every other rank builds its parameters on the meta
device and its buffers for real. Weights are then sent unit by unit, each sharded before the next one is created, so
only rank 0 ever has a full model to be sharded. Why not initialise shard by shard: see docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.distributed.process_group import is_sent_by_ddp, send
from shardwise.parallel.meta_parameters import parameters_on_meta


def build(factory: Callable[[], nn.Module], seed: int, *, real: bool) -> nn.Module:
    """Call ``factory`` under a seed, with real weights or with parameters on the meta device.

    The CPU random state is restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if real:
            return factory()
        with parameters_on_meta():
            module = factory()
    return module


Fill = Callable[[nn.Module], None]
"""Function that fills a unit, whose parameters have memory, with its frozen weights."""


def materialize_unit(unit: nn.Module, device: torch.device, fill: Fill | None, *, broadcast: bool = True) -> None:
    """Materialize a unit with or without adapters; quantize its base before sharding."""
    from shardwise.parallel.lora.adapters import set_magnitudes

    materialize(unit, device, broadcast=broadcast or fill is not None, frozen=fill is None)
    if fill is not None:
        fill(unit)
    if any(hasattr(child, "weight_options") for child in unit.modules()):
        from shardwise.parallel.lora.quantize import pack

        pack(unit)
    if any(hasattr(child, "lora_magnitude_vector") for child in unit.modules()):
        set_magnitudes(unit)


def materialize(unit: nn.Module, device: torch.device, *, broadcast: bool, frozen: bool = True) -> None:
    """Allocate every plain parameter and buffer of ``unit`` on ``device``.

    Ties inside the unit are kept.

    A parameter on the meta device gets uninitialised memory. With ``broadcast`` all ranks then receive rank 0's values,
    without ``frozen`` only those of trained parameters.
    Parameters that are sharded already (DTensors) are left unchanged.
    """
    made: dict[int, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _placed(parameter, device)
            module._parameters[name] = made[id(parameter)]
    move_buffers(unit, device)
    if broadcast and dist.get_world_size() > 1:
        for parameter in made.values():
            if frozen or parameter.requires_grad:
                send(parameter)


def _placed(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.device == device:
        return parameter
    if parameter.device.type == "meta":
        data = torch.empty_like(parameter.data, device=device)
    else:
        data = parameter.data.to(device)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def make_contiguous(module: nn.Module, *, gaps_only: bool = False) -> None:
    """Make each parameter contiguous: FSDP2 takes no other.

    ``channels_last`` changes only the memory order.

    With ``gaps_only`` just those whose memory interleaves with other elements, which a broadcast would overwrite.
    """
    for parameter in module.parameters():
        wanted = torch.empty_like(parameter, device="meta") if gaps_only else None  # keeps any order without gaps
        if not parameter.is_contiguous() and (wanted is None or wanted.stride() != parameter.stride()):
            parameter.data = parameter.data.contiguous()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move every buffer to ``device``; shared buffers stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast rank 0's buffers to every rank, also non-persistent ones."""
    _send_buffers(module, lambda buffer: True)


def send_what_ddp_cannot(module: nn.Module) -> None:
    """Broadcast rank 0's buffers and frozen parameters that DDP cannot send and ignores."""
    left = _send_buffers(module, lambda buffer: not is_sent_by_ddp(buffer))
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and not is_sent_by_ddp(parameter):
            left.append(name)
            if dist.get_world_size() > 1:
                send(parameter)
    if left:
        left += getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, left)


def _send_buffers(module: nn.Module, chosen: Callable[[torch.Tensor], bool]) -> list[str]:
    """Broadcast the ``chosen`` buffers and return their names; shared buffers stay shared."""
    sent: dict[int, torch.Tensor] = {}
    names: list[str] = []
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or not chosen(buffer):
                continue
            names.append(f"{prefix}.{name}" if prefix else name)
            if dist.get_world_size() > 1:
                if id(buffer) not in sent:
                    sent[id(buffer)] = send(buffer)
                part._buffers[name] = sent[id(buffer)]
    return names
