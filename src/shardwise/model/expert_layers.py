"""Layers of experts in a module: stacked weights that the router's choice is called with (transformers' interface)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.model.read import clean_name

_INDEX, _WEIGHTS = ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights")


@dataclass(frozen=True)
class ExpertLayer:
    """Layer of experts: ``name`` of the module with the stacked weights [experts, ...], and of its ``router``.

    The module's forward takes tokens [tokens, width], the experts of each [tokens, k] and their weights [tokens, k].
    ``router`` is its sibling with a weight [experts, width]; ``None`` where there is no such one. ``parameters`` are
    the names of the stacked weights in the whole model.
    """

    name: str
    module: Any
    router: str | None
    num_experts: int
    parameters: tuple[str, ...]


def expert_layers(module: nn.Module) -> tuple[ExpertLayer, ...]:
    """Return the layers of experts of ``module``, in its order."""
    found = []
    for prefix, parent in module.named_modules():
        for key, child in parent.named_children():
            number = _stacked(child)
            if number is not None:
                name = clean_name(f"{prefix}.{key}." if prefix else f"{key}.").rstrip(".")
                own = tuple(f"{name}.{key}" for key, _ in child.named_parameters(recurse=False))
                found.append(ExpertLayer(name, child, _router(name, parent, child, number), number, own))
    return tuple({id(layer.module): layer for layer in found}.values())


def _stacked(module: nn.Module) -> int | None:
    """Return the number of experts of a module whose own weights are stacked; ``None`` for any other."""
    own = list(module.parameters(recurse=False))
    if any(map(is_lazy, own)):  # without shapes; `check_initialized` refuses the model in its own words
        return None
    sizes = {p.shape[0] for p in own if p.ndim}
    if len(sizes) != 1 or not any(p.ndim == 3 for p in own) or len(own) < len([*module.parameters()]):
        return None
    known = [p.name for p in inspect.signature(module.forward).parameters.values()][:3]
    if len(known) < 3 or known[1] not in _INDEX or known[2] not in _WEIGHTS:
        return None
    return int(sizes.pop())


def _router(name: str, parent: nn.Module, experts: nn.Module, number: int) -> str | None:
    for key, child in parent.named_children():
        weight = getattr(child, "weight", None)
        if child is not experts and isinstance(weight, torch.Tensor) and weight.ndim == 2 and len(weight) == number:
            return f"{name.rpartition('.')[0]}.{key}".lstrip(".")
    return None


def compute_experts_one_by_one(module: nn.Module) -> None:
    """Let transformers' experts run as plain products: its grouped ones know no float64."""
    owners: list[Any] = [module, *(layer.module for layer in expert_layers(module))]
    for owner in owners:
        config: Any = getattr(owner, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


@contextmanager
def without_router_outputs(module: nn.Module) -> Iterator[None]:
    """Let a transformers model return no routers' logits: training adds their loss without them."""
    config: Any = getattr(module, "config", None)
    was = getattr(config, "output_router_logits", False) and bool(expert_layers(module))
    if was:
        config.output_router_logits = False
    try:
        yield
    finally:
        if was:
            config.output_router_logits = True


@contextmanager
def dense_experts(module: nn.Module) -> Iterator[None]:
    """Let every token take the first experts: the shapes and operations of any choice, without reading values.

    For a forward on fake tensors, in which the experts that tokens choose are unknown.
    """
    changed = [layer.module for layer in expert_layers(module)]
    for part in changed:
        part.__dict__["forward"] = _dense(part)
    try:
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]


def _dense(module: nn.Module) -> Any:
    transposed = bool(getattr(module, "is_transposed", False))

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for slot in range(weights.shape[-1]):
            x = hidden
            for parameter in module.parameters(recurse=False):
                x = _through(x, parameter[0], transposed=transposed)
            out = out + x * weights[..., slot : slot + 1].to(x.dtype)
        return out

    return forward


def _through(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """Multiply by a matrix, or add a bias; a gated product is halved where the next matrix takes half of it."""
    if weight.ndim == 1:
        return x + weight
    matrix = weight if transposed else weight.T
    return x[..., : matrix.shape[0]] @ matrix
