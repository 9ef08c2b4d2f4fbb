"""Check before launch that blocks compile: trace one of each kind on tensors without data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.errors import ModelError
from shardwise.model.facts import ModelSpec
from shardwise.parallel.compile import why_not
from shardwise.parallel.fake_forward import inputs_of, run_forward
from shardwise.plan.plan import Plan

_FIX = "set parallel.compile to false"


def check_compile(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> None:
    """Check that each kind of block traces into one graph. No collective.

    Weights may be on the meta device.

    Raises:
        ModelError: there are no blocks, or PyTorch cannot trace one; names the line that prevents it.
    """
    if not spec.blocks:
        raise ModelError(f"compile is for repeated blocks, and the model has none; {_FIX}")
    kinds = {type(module.get_submodule(name)): name for name in reversed(spec.blocks)}
    entered: dict[str, tuple[Any, Any]] = {}

    def keep(name: str) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            entered.setdefault(name, _pytree.tree_map_only(torch.Tensor, _without_data, (args, kwargs)))

        return hook

    handles = [
        module.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in kinds.values()
    ]
    try:
        failure = run_forward(module, *inputs_of(sample, plan.seq_len))[1]
    finally:
        for handle in handles:
            handle.remove()
    if failure:
        raise ModelError(f"compile: the model's forward cannot be traced under fake tensors ({failure}); {_FIX}")
    problems = []
    for kind, name in kinds.items():
        if name in entered:
            why = _untraceable(module.get_submodule(name), *entered[name])
            problems += [f"'{name}' ({kind.__name__}) cannot be compiled as one graph: {why}; {_FIX}"] if why else []
    if problems:
        raise ModelError(*problems)


def _untraceable(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return why ``block`` does not trace into one graph; empty if it does."""
    state = {name: _without_data(tensor) for name, tensor in (*block.named_parameters(), *block.named_buffers())}
    traced = _Traced(block)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            torch.func.functional_call(traced, {f"block.{n}": t for n, t in state.items()}, tuple(args), kwargs)
        except Exception as error:  # the tracer may raise anything for the user's code
            return why_not(error)
    return ""


class _Traced(nn.Module):
    """Run ``block``'s forward through the tracer only; no kernel is built."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.run = torch.compile(type(block).forward, fullgraph=True, backend="eager")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.block, *args, **kwargs)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
