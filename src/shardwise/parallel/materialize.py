"""From the meta device to real weights, the same ones whatever the strategy and the world size.

Rank 0 builds the model for real, exactly as one process would; every other rank builds its parameters on the meta
device and its buffers for real. Weights then travel unit by unit, each sharded before the next one is made, so no
rank but 0 ever holds a whole model that is to be sharded. Why not initialise shard by shard: see docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every new ``nn.Parameter`` that a module registers lands on the meta device; buffers stay real.

    Buffers must be real because many (rotary frequencies, masks) exist only as the constructor's code.
    """
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # one that is registered under two names (tied by hand) must stay one

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if param not in made:
                kind = type(param) if nn.Parameter in type(param).__mro__ else nn.Parameter  # a fake one is a plain one
                made[param] = kind(param.detach().to("meta"), requires_grad=param.requires_grad)
            param = made[param]
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(factory: Callable[[], nn.Module], seed: int, *, real: bool) -> nn.Module:
    """Call ``factory`` under a seed: with real weights, or with its parameters on the meta device.

    The CPU random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if real:
            return factory()
        with parameters_on_meta():
            module = factory()
    return module


Fill = Callable[[nn.Module], None]
"""Gives a unit, whose parameters have memory, its frozen weights."""


def settle(unit: nn.Module, device: torch.device, fill: Fill | None, *, broadcast: bool = True) -> None:
    """`materialize` for a unit with adapters or without: its base is filled and packed before anything is cut."""
    from shardwise.parallel.adapters import set_magnitudes

    materialize(unit, device, broadcast=broadcast or fill is not None, frozen=fill is None)
    if fill is not None:
        fill(unit)
    if any(hasattr(child, "weight_options") for child in unit.modules()):
        from shardwise.parallel.quantise import pack

        pack(unit)
    if any(hasattr(child, "lora_magnitude_vector") for child in unit.modules()):
        set_magnitudes(unit)


def materialize(unit: nn.Module, device: torch.device, *, broadcast: bool, frozen: bool = True) -> None:
    """Give every plain parameter and buffer of ``unit`` memory on ``device``; ties inside the unit are kept.

    A parameter on the meta device gets uninitialised memory. With ``broadcast`` all ranks then take rank 0's values,
    without ``frozen`` only those of parameters that are trained.
    Parameters that are sharded already (DTensors) are left alone.
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
                dist.broadcast(parameter.detach(), src=0)


def _placed(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.device == device:
        return parameter
    if parameter.device.type == "meta":
        data = torch.empty_like(parameter.data, device=device)
    else:
        data = parameter.data.to(device)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Put every buffer on ``device``; one that several modules share stays one."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def broadcast_buffers(module: nn.Module) -> None:
    """Every rank takes rank 0's buffers, also those that are no part of the state dict."""
    if dist.get_world_size() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer.detach(), src=0)
