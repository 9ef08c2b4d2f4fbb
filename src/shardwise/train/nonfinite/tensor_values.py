"""Values of a tensor: what of it is not finite, in which samples, and how large the rest is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from shardwise.distributed.local_tensor import local_of

OVERFLOWS = 64.0
"""A finite value of fp16 within this factor of the largest shows that its neighbours have overflowed."""
WIDE = 1e30
"""The same for bf16, fp32 and float64, whose exponents are wide: nothing in a healthy model is as large."""


@dataclass(frozen=True)
class NonFinite:
    """What of a tensor is not finite. ``kind`` is ``nan``, ``inf``, ``-inf`` or ``nan and inf``.

    ``rows`` are the samples of the micro batch that it is in, ``None`` if no dimension is the batch. ``largest`` is the
    largest finite magnitude, ``None`` if nothing is finite.
    """

    kind: str
    dtype: str
    rows: tuple[int, ...] | None
    largest: float | None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point and complex tensors in any container, of sharded ones the local part."""
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            part = local_of(leaf)
            if part.layout == torch.strided and (part.is_floating_point() or part.is_complex()) and part.numel():
                yield part
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in(list(vars(leaf).values()))


@torch.no_grad()
def non_finite(tensor: torch.Tensor, batch: int | None = None, *, exact: bool = False) -> NonFinite | None:
    """Return what is not finite in a local tensor; ``None`` if all is. Waits for the device.

    ``batch`` is the number of samples of the micro batch; with ``exact`` only a first dimension of that size is one.
    """
    part = _real(tensor)
    least, most = part.aminmax()
    if bool(least.isfinite() & most.isfinite()):
        return None
    nan, plus, minus = bool(part.isnan().any()), bool(part.isposinf().any()), bool(part.isneginf().any())
    kind = ("nan and inf" if plus or minus else "nan") if nan else "inf" if plus else "-inf"
    rows = _rows(~part.isfinite(), batch, exact=exact)
    return NonFinite(kind, str(tensor.dtype).removeprefix("torch."), rows, largest(tensor))


@torch.no_grad()
def largest(tensor: torch.Tensor) -> float | None:
    """Return the largest finite magnitude of a local tensor; ``None`` if nothing in it is finite."""
    part = _real(tensor)
    finite = part[part.isfinite()]
    return float(finite.abs().max()) if finite.numel() else None


def is_overflow(found: NonFinite, largest_input: float | None) -> bool:
    """Return whether finite values beside what is not finite are as large as the type allows, or the inputs' product.

    A difference of two infinities inside of a module is no infinity: it is told by the inputs alone.
    """
    limit = torch.finfo(getattr(torch, found.dtype)).max
    narrow = limit < WIDE
    product = largest_input is not None and largest_input**2 >= (limit if narrow else WIDE)
    beside = found.largest is not None and found.largest >= (limit / OVERFLOWS if narrow else WIDE)
    return product or (beside and "inf" in found.kind)


def batch_of(inputs: Any) -> int | None:
    """Return the samples of a micro batch: the first dimension of its first tensor."""
    tensors = (leaf for leaf in _pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((tensor.shape[0] for tensor in tensors), None)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    part = local_of(tensor)
    part = torch.view_as_real(part) if part.is_complex() else part
    return part if part.element_size() > 1 else part.float()


def _rows(bad: torch.Tensor, batch: int | None, *, exact: bool) -> tuple[int, ...] | None:
    """Return the samples that ``bad`` marks: along the batch dimension, first or second, or rows flattened into it."""
    if not batch or not bad.ndim:
        return None
    if bad.shape[0] != batch:
        if exact:
            return None
        if bad.ndim > 1 and bad.shape[1] == batch:
            bad = bad.transpose(0, 1)
        elif bad.shape[0] % batch:
            return None
    marked = bad.reshape(batch, -1).any(1)
    return tuple(int(row) for row in marked.nonzero().flatten())
