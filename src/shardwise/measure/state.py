"""What a rank really holds: read off live tensors, not off the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.spec.read import dtype_name


class Measurement(BaseModel):
    """Observed bytes on this rank, by the categories of an estimate; ``None`` where nothing can measure it here.

    ``device_peak`` is the allocator's own peak since the run began (GPU only); ``process_peak`` is the largest
    resident size of this process so far, interpreter and libraries included.
    """

    model_config = ConfigDict(frozen=True)

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None
    logits: int | None = None
    buffers: int | None = None
    device_peak: int | None = None
    process_peak: int | None = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that lives on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizer_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor in the optimizer's state on this rank (of a ZeRO-1 optimizer: its own share)."""
    inner = getattr(optimizer, "optim", optimizer)
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that ``tensors`` take on this rank."""
    return sum(local(t).numel() * local(t).element_size() for t in tensors)


def local_elements(tensors: Iterable[torch.Tensor]) -> int:
    """Elements of ``tensors`` on this rank."""
    return sum(local(t).numel() for t in tensors)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """The gradients that are there."""
    return [p.grad for p in module.parameters() if p.grad is not None]


def dtypes(tensors: Iterable[torch.Tensor]) -> str:
    """The dtypes of ``tensors``, sorted and joined."""
    return ", ".join(sorted({dtype_name(t.dtype) for t in tensors})) or "none"


def devices(tensors: Iterable[torch.Tensor]) -> str:
    """The device types of ``tensors``, sorted and joined."""
    return ", ".join(sorted({local(t).device.type for t in tensors})) or "none"


def measure_state(module: nn.Module, optimizer: Optimizer, device: torch.device) -> Measurement:
    """Bytes at rest on this rank, while gradients are there; peaks where the machine can tell them."""
    return Measurement(
        parameters=local_bytes(module.parameters()),
        gradients=local_bytes(gradients(module)),
        optimizer=local_bytes(optimizer_tensors(optimizer)),
        device_peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        process_peak=_process_peak(),
    )


def _process_peak() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
