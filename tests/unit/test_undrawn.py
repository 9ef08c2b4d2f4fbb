"""Initial values of meta tensors are not drawn; those of real ones are, as ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.model.undrawn import DRAWS, undrawn
from shardwise.parallel.materialize import build


class Counted(TorchDispatchMode):
    """Operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_only_draws_into_meta_tensors_are_left_out() -> None:
    with undrawn(), Counted() as counted:
        place = torch.empty(3, device="meta")
        assert place.normal_(0.0, 1.0) is place and place.uniform_() is place
    assert not [name for name in counted.seen if "normal" in name or "uniform" in name]
    wanted = torch.empty(5).normal_(1.0, 2.0, generator=torch.Generator().manual_seed(1))
    with undrawn(), undrawn():
        found = torch.empty(5).normal_(1.0, 2.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found, wanted)
    assert not DRAWS & vars(torch.Tensor).keys(), "torch is as it was"


def test_a_buffer_after_a_parameter_has_the_values_that_it_had() -> None:
    """No generator advances for a meta tensor, so what follows draws the same."""

    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("noise", torch.rand(4))

    found = build(Noisy, 7, real=False)
    assert found.weight.is_meta and not found.noise.is_meta
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        nn.init.kaiming_uniform_(torch.empty(4, 4, device="meta"))
        nn.init.uniform_(torch.empty(4, device="meta"))
        assert torch.equal(found.noise, torch.rand(4))


def test_a_draw_that_autograd_refuses_is_refused_for_a_meta_tensor_too() -> None:
    """Else rank 0 alone, whose weights are real, fails to build the model."""
    for real in (True, False):
        with pytest.raises(RuntimeError, match="a leaf Variable"):
            build(lambda: nn.Linear(2, 2).weight.normal_(), 7, real=real)  # type: ignore[arg-type, return-value]
