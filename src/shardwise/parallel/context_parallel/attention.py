"""Context parallel: tokens sharded over ranks, attention on full sequences of some heads.

Each rank has a contiguous chunk of every sequence. Outside of attention a model treats each token independently,
so a chunk is enough, given the position where the chunk begins. See `context_exchange` for attention, and
`context_look` for the check that a model is of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from shardwise.errors import DataError, ModelError
from shardwise.model.facts import ModelSpec
from shardwise.parallel.context_parallel.inspect_attention import POSITIONS, ContextLayout, inspect_context
from shardwise.parallel.context_parallel.ulysses import Exchange, exchange_in, exchange_of
from shardwise.plan.plan import Plan


def check_context(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> ContextLayout:
    """Find where ``module`` computes attention, and check that context parallel supports it.

    No collective, nothing is changed, weights may be on the meta device. ``sample`` is the model's input for one
    micro batch; default: token ids [1, length].

    Raises:
        ModelError: all obstacles, with what would work.
    """
    return inspect_context(module, spec, plan, sample)


def apply_context(
    module: nn.Module, layout: ContextLayout, mesh: DeviceMesh, exchange: Exchange | None = None
) -> Exchange:
    """Make attention in ``module`` exchange tokens for heads, and pass the chunk's start.

    ``module`` is the model, or a stage with some of its blocks under the user's names; ``exchange`` is the result of an
    earlier call for another stage.
    """
    exchange = exchange or Exchange(mesh.get_group().group_name, mesh.size())
    parts = dict(module.named_modules())
    for name in layout.sites:
        if name in parts:
            exchange_in(parts[name], exchange, name)
    module.register_forward_pre_hook(_Positions(mesh.get_local_rank(), mesh.size(), layout), with_kwargs=True)
    return exchange


def exchanged_calls(module: nn.Module) -> int:
    """Count attention calls on exchanged heads so far, including recomputed ones; 0 without +cp."""
    found = {id(e): e.calls for e in _exchanges(module)}
    return sum(found.values())


def _exchanges(module: nn.Module) -> Iterator[Exchange]:
    for part in module.modules():
        exchange = exchange_of(part)
        if exchange is not None:
            yield exchange


class _Positions:
    """Forward pre-hook that passes the positions of this rank's chunk if the caller gave none."""

    def __init__(self, index: int, ranks: int, layout: ContextLayout) -> None:
        self.index = index
        self.ranks = ranks
        self.layout = layout
        self.known: torch.Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("labels") is not None:
            raise ModelError(
                "the model computes its own loss when labels are passed, which under context parallel would omit "
                "the label after each chunk; remove labels from its inputs and compute the loss from its outputs"
            )
        if kwargs.get(POSITIONS) is not None or len(args) > self.layout.positions:
            return args, kwargs
        tensor = first_sequence([*args, *kwargs.values()])
        if tensor is None:
            raise ModelError("context parallel found no tensor [samples, length, ...] in the model's inputs to count")
        return args, {**kwargs, POSITIONS: self._of(tensor)}

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        number, window = tensor.shape[1], self.layout.window
        if self.known is None or self.known.shape[1] != number or self.known.device != tensor.device:
            if window is not None and number * self.ranks >= window:
                raise ModelError(
                    f"the model attends to a window of {window} tokens, and samples have {number * self.ranks}: it "
                    "cannot "
                    "apply the window within a chunk; use shorter samples, a longer window, or a strategy without +cp"
                )
            start = self.index * number
            self.known = torch.arange(start, start + number, device=tensor.device)[None]
        return self.known


def first_sequence(tree: Any) -> torch.Tensor | None:
    """Return the first tensor [samples, length, ...], preferring integers (token ids)."""
    found = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2]
    ids = [leaf for leaf in found if not leaf.is_floating_point()]
    return next(iter([*ids, *found]), None)


def sequence_share(
    batch: tuple[Any, Any], plan: Plan, index: int, count: Callable[[Any], int] | None = None
) -> tuple[Any, Any]:
    """Shard one micro batch by tokens for rank ``index`` of its context-parallel group.

    Each tensor [samples, length, ...] is sharded along the length; others stay full. ``count`` is the number of loss
    terms that labels stand for; the counts of all chunks must add up to the count of the full labels.

    Raises:
        DataError: there is no such tensor, its length does not divide, or labels cannot be counted chunk by chunk.
    """
    tokens, cp = first_sequence(batch), plan.dims.cp
    tp = plan.dims.tp if plan.sequence_parallel else 1
    if tokens is None:
        raise DataError(
            f"{plan.strategy} shards tensors [samples, length, ...], and the micro batch has none; "
            "use a strategy without +cp"
        )
    samples, length = tokens.shape[:2]
    if length % (cp * tp) or not length:
        rule = f"cp {cp}" + (f" × tp {tp} (sequence parallel) = {cp * tp}" if tp > 1 else "")
        below, above = length // (cp * tp) * cp * tp, (length // (cp * tp) + 1) * cp * tp
        nearest = f"{below} or {above}" if below else str(above)
        raise DataError(
            f"a micro batch has samples of {length} tokens, which is not a multiple of {rule}; "
            f"make them {nearest} tokens long (pad them with labels of -100)"
        )
    size = length // cp

    def share(tree: Any, at: int) -> Any:
        def shard(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim < 2 or tensor.shape[0] not in (1, samples) or tensor.shape[1] != length:
                return tensor
            return tensor[:, at * size : (at + 1) * size].contiguous()

        return _pytree.tree_map_only(torch.Tensor, shard, tree)

    inputs, labels = batch
    if count is not None:
        full, parts = count(labels), [count(share(labels, at)) for at in range(cp)]
        if sum(parts) != full:
            raise DataError(
                f"{plan.strategy} gives each rank part of the labels: they count {full} loss terms in full and "
                f"{' + '.join(map(str, parts))} in parts; use integer labels [samples, length], or a count=... for "
                "session.steps that adds up, or a strategy without +cp"
            )
    return share(inputs, index), share(labels, index)
