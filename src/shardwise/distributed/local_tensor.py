"""Local part of a tensor, and tensors with the placement of another one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local elements, sharing storage with ``tensor``."""
    with torch.no_grad():
        return stored(tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach())


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of a local ``tensor``: torchao's have it inside, as their first part."""
    if not type(tensor).__module__.startswith("torchao."):
        return tensor
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: torch.Tensor = getattr(tensor, names[0])
    return inner


def empty_beside(parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of the full ``shape`` that belongs to ``parameter``.

    It is sharded by rows like the parameter if it has as many rows; otherwise it is replicated.
    """
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            return torch.empty(tuple(shape), dtype=dtype, device=parameter.device)
        here = parameter.to_local()
        as_rows = len(shape) == parameter.dim() > 0 and shape[0] == parameter.shape[0]
        placements = [p if as_rows and p == Shard(0) else Replicate() for p in parameter.placements]
        sharded = any(isinstance(p, Shard) for p in placements)
        lengths = (here.shape[0], *shape[1:]) if sharded else tuple(shape)
        return DTensor.from_local(
            torch.empty(lengths, dtype=dtype, device=here.device),
            parameter.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))),
        )
