"""Optimizers of a user's own, as they are usually written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Own(Optimizer):
    """Steps each parameter by what `direction` says."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, p.grad, self.state[p], group), alpha=-group["lr"])

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class LARS(Own):
    """With ``.item()``: of a shard, that is the shard's norm."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        trust, size, decay = 1.0, p.norm().item(), group["weight_decay"]
        if size > 0:
            trust = 0.1 * size / (grad.norm().item() + decay * size + 1e-8)
        return (grad + decay * p) * trust


class Clipping(Own):
    """SGD that clips each parameter's gradient, where it is large; of a shard, by the shard's norm."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return grad / max(1.0, grad.norm().item() / 20)


class LAMB(Own):
    """With norms that stay tensors: of a DTensor, those of the whole."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad.square(), 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6) + group["weight_decay"] * p
        return update * (p.norm() / update.norm())


class LocalLAMB(LAMB):
    """The same of what ``to_local`` gives."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        norm = (p.to_local() if hasattr(p, "to_local") else p).norm().item()
        return grad * norm


class Lion(Own):
    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        if not state:
            state["m"] = torch.zeros_like(p)
        update = (0.9 * state["m"] + 0.1 * grad).sign() + group["weight_decay"] * p
        state["m"].lerp_(grad, 0.01)
        return update


class Langevin(Own):
    """Draws at random: no two runs of it agree."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return grad + torch.randn_like(p)


class DAdaptation(Own):
    """A rate from sums over all parameters (D-Adaptation with SGD; Prodigy sums alike)."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, d: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.d, self.weighted = d, 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        squares = size = 0.0
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in held:
            state = self.state[p]
            if not state:
                state["s"] = torch.zeros_like(p)
            state["s"].add_(p.grad, alpha=self.d)
            squares += (p.grad * p.grad).sum().item()
            size += (state["s"] * state["s"]).sum().item()
        self.weighted += self.d * self.d * squares
        self.d = max(self.d, (size - self.weighted) / (2 * math.sqrt(size) + 1e-12))
        for p in held:
            p.add_(p.grad, alpha=-self.d * self.param_groups[0]["lr"] / math.sqrt(squares + 1e-12))


class Cached(LARS):
    """Keeps parameters in a list of its own, and takes arguments that are no options of its groups."""

    def __init__(self, model: torch.nn.Module, power: float) -> None:
        super().__init__(model.parameters())
        self.power = power
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad.abs().pow(self.power) * p.grad.sign(), alpha=self.param_groups[0]["lr"])


class Spoils(Own):
    """Leaves one weight that is no number, in a step whose loss and gradient are fine."""

    def direction(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        return torch.where(torch.arange(grad.numel()).view(grad.shape) == 1, torch.nan, grad)
