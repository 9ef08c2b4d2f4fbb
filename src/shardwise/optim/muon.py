"""Muon for matrices of the blocks, and AdamW for all other parameters, in one optimizer.

A step is that of `torch.optim.Muon` (with Moonshot's ``match_rms_adamw``, so that one learning rate serves both) and of
`torch.optim.AdamW`. A matrix must be whole on the rank that steps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from torch.optim.adamw import adamw

from shardwise.distributed.local_tensor import local_of


class Muon(Optimizer):
    """Steps groups whose ``matrices`` is true by Muon, others by AdamW.

    A matrix keeps a ``momentum_buffer``, another parameter ``exp_avg`` and ``exp_avg_sq``; each counts its ``step``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        matrices: bool = False,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "matrices": matrices, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            keys = ("momentum_buffer",) if group["matrices"] else ("exp_avg", "exp_avg_sq")
            for parameter in trained:
                if not self.state[parameter]:
                    device = local_of(parameter).device
                    self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=device)
                    self.state[parameter] |= {key: torch.zeros_like(parameter) for key in keys}
            states = {key: [local_of(self.state[p][key]) for p in trained] for key in ("step", *keys)}
            weights, gradients = [local_of(p) for p in trained], [local_of(p.grad) for p in trained]
            (_step_matrices if group["matrices"] else _step_others)(weights, gradients, states, group)
        return loss


Tensors = list[torch.Tensor]


def _step_matrices(weights: Tensors, gradients: Tensors, states: dict[str, Tensors], group: dict[str, Any]) -> None:
    for step in states["step"]:
        step += 1
    muon(
        weights,
        gradients,
        states["momentum_buffer"],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        nesterov=True,
        ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C),
        ns_steps=DEFAULT_NS_STEPS,
        eps=EPS,
        adjust_lr_fn="match_rms_adamw",
        has_complex=False,
    )


def _step_others(weights: Tensors, gradients: Tensors, states: dict[str, Tensors], group: dict[str, Any]) -> None:
    adamw(
        weights,
        gradients,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],
        states["step"],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
