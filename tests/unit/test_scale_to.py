"""Clipping is PyTorch's, to the bit, and leaves alone what is small enough."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.parallel.grad_norm import full_norm, scale_to


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(size, 3, dtype=dtype)) for size in (4, 7, 1)]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return [*made, nn.Parameter(torch.zeros(2, dtype=dtype))]  # one without a gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.3, 0.999, 1.0, 1.001, 50.0])
def test_gradients_are_those_of_pytorch(dtype: torch.dtype, share: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    norm = full_norm(ours)
    before = [None if p.grad is None else p.grad._version for p in ours]
    scale_to(ours, share * float(norm), norm)
    torch.nn.utils.clip_grads_with_norm_(theirs, share * float(norm), norm)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True) if a.grad is not None)
    touched = [None if p.grad is None else p.grad._version for p in ours] != before
    assert touched == (share < 1.0001)


@pytest.mark.parametrize("norm", ["nan", "inf"])
def test_what_is_no_number_stays_none(norm: str) -> None:
    found = parameters(torch.float32)
    scale_to(found, 1.0, torch.tensor(float(norm)))
    assert not any(bool(p.grad.abs().sum() > 0) for p in found if p.grad is not None)
