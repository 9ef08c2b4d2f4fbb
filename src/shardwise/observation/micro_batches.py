"""Record the calls of a loss closure: arguments as they were, random numbers, the loss and its weight in the loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.observation.plain_copy import Memo, whole

_MEAN, _SUM = 1, 2  # of aten's reductions
_CROSS_ENTROPIES = ("nll_loss_forward", "nll_loss2d_forward")


_MOST_BYTES = 64 * 2**20  # of buffers that are kept for each micro batch


@dataclass
class MicroBatch:
    """Call of the closure. ``weight`` is the gradient that the loop's backward gave the loss; ``None`` without one.

    ``buffers`` are the model's before the call, by id: spectral norm and moving averages change them in a forward.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: torch.Tensor
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    dtypes: set[str] = field(default_factory=set)


class CountedLabels(TorchDispatchMode):
    """Mode that counts the labels of each cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet is not None and packet.__name__ in _CROSS_ENTROPIES:
            _, target, weight, reduction, ignored = args[:5]
            if reduction == _MEAN:
                self.counts.append(float(made[1]))  # the sum of weights, by which it divides
            elif weight is None:
                self.counts.append(float((target != ignored).sum()))
        return made


def loss_of(result: Any) -> torch.Tensor | None:
    """Return the scalar loss of what a closure returns: the loss, a tuple, a mapping, or an object that has it."""
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        result = getattr(result, "loss", None)
    return result if isinstance(result, torch.Tensor) and result.numel() == 1 else None


def on_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` of each tensor and module in its containers."""
    if isinstance(value, (torch.Tensor, nn.Module)):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_tensors(one, change) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(on_tensors(one, change) for one in value)
    if isinstance(value, Mapping) or (hasattr(value, "__setitem__") and hasattr(value, "keys")):
        made = copy.copy(value)
        for key in list(value.keys()):
            made[key] = on_tensors(value[key], change)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for one in dataclasses.fields(value):
            object.__setattr__(made, one.name, on_tensors(getattr(value, one.name), change))
        return made
    return value


def kept(one: Any) -> Any:
    """Return a copy of a tensor on the CPU, as the loop may write into it; a module is kept itself."""
    return one.detach().to("cpu", copy=True) if isinstance(one, torch.Tensor) else one


def kept_buffers(root: nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of the buffers; none where they are large, as masks are, which no forward changes."""
    buffers = [b for b in root.buffers() if b.layout == torch.strided and b.device.type != "meta"]
    if sum(b.numel() * b.element_size() for b in buffers) > _MOST_BYTES:
        return {}
    return {id(b): whole(b) for b in buffers}


def in_copy(memo: Memo) -> Callable[[Any], Any]:
    """Return what puts a recorded argument into the float64 copy: its modules in place of the live ones."""

    def change(one: Any) -> Any:
        if isinstance(one, nn.Module):
            return memo.get(id(one), one)
        return one.clone().to(torch.float64) if one.is_floating_point() else one.clone()

    return change


def row_of(number: int, rows: int) -> Callable[[Any], Any]:
    """Return what takes one row out of each tensor that has ``rows``."""

    def change(one: Any) -> Any:
        if isinstance(one, torch.Tensor) and one.ndim and one.shape[0] == rows:
            return one[number : number + 1]
        return one

    return change


def rows_of(batch: MicroBatch) -> int:
    """Return the length of the first tensor; 1 where there is none."""
    found: list[int] = []

    def see(one: Any) -> Any:
        if isinstance(one, torch.Tensor) and one.ndim:
            found.append(one.shape[0])
        return one

    on_tensors((batch.args, batch.kwargs), see)
    return found[0] if found else 1
