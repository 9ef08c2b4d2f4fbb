"""Exchange tokens for heads around one attention call, and back (Ulysses).

Outside of attention a rank has a chunk of every sequence, ``[samples, heads, length / cp, width]``; inside it has
full sequences of ``heads / cp`` heads. One all-to-all exchanges queries, keys and values together, one returns the
result, and backward does the same in reverse. Tensors are copied once in each direction: queries, keys and
values as they are packed to be sent (received data is used in place), the result as its heads are joined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.errors import ModelError


@dataclass
class Exchange:
    """Exchange of one rank.

    ``calls`` counts attention calls that used it, including recomputed ones.

    Compiled blocks are counted outside the graph, by their forwards.
    """

    group: str
    degree: int
    calls: int = 0
    kinds: dict[type, type] = field(default_factory=dict)


class ExchangeMode(TorchFunctionMode):
    """Mode that runs each ``scaled_dot_product_attention`` on full sequences of some heads."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self.exchange = exchange
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _attend(self.exchange, self.name, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def exchange_in(module: nn.Module, exchange: Exchange, name: str) -> None:
    """Run ``module``'s forward under the mode: its type becomes a subclass of the same name.

    Modules of one type share one subclass, so that equal blocks are still compiled once.
    """
    kind = type(module)
    known = exchange.kinds.get(kind)
    if known is None:
        mode = ExchangeMode(exchange, name)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with mode:
                return kind.forward(self, *args, **kwargs)

        members = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        known = type(kind.__name__, (kind,), {**members, "_shardwise_exchange": exchange})
        exchange.kinds[kind] = known
    module.__class__ = known


def exchange_of(module: nn.Module) -> Exchange | None:
    """Return the exchange that `exchange_in` attached to a module's forward."""
    return getattr(type(module), "_shardwise_exchange", None)


def _attend(
    exchange: Exchange,
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend over full sequences, given chunks [samples, heads, length / cp, width]."""
    problem = attention_problem(name, query, key, attn_mask)
    if problem:
        raise ModelError(problem)
    degree = exchange.degree
    if not torch.compiler.is_compiling():
        exchange.calls += 1
    repeats = kv_repeats(key.shape[1], degree)
    if repeats > 1:
        key, value = (_repeated(part, repeats) for part in (key, value))
    if torch.is_autocast_enabled(query.device.type):  # as attention itself would cast; halves the bytes sent
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = (p.to(narrow) if p.dtype == torch.float32 else p for p in (query, key, value))
    query, key, value = _to_heads((query, key, value), exchange)
    found = scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, **options)
    return _to_tokens(found, exchange)


def attention_problem(name: str, query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None) -> str | None:
    """Return why the arguments of an attention call cannot be exchanged; ``None`` if they can."""
    if attn_mask is not None:
        return (
            f"'{name}' calls attention with an explicit mask {list(attn_mask.shape)} (padding, packed documents, a "
            "sliding window or a bias), which context parallel does not shard: leave attention_mask and "
            "position_ids out "
            "of the batch (causal attention sees no padding on the right; labels of -100 leave it out), use a window "
            "no shorter than the sequence, or a strategy without +cp"
        )
    if query.ndim != 4:
        return (
            f"'{name}' calls attention with queries {list(query.shape)}; context parallel needs [samples, heads, "
            "length, width] to exchange heads: keep heads in a dim of their own, or use a strategy without +cp"
        )
    if query.shape[2] != key.shape[2] or query.shape[0] != key.shape[0]:
        return (
            f"'{name}' calls attention with queries {list(query.shape)} and keys {list(key.shape)}; context parallel "
            "needs as many keys as queries (no cache, no cross attention); use a strategy without +cp"
        )
    return None


def kv_repeats(heads: int, degree: int) -> int:
    """Return the smallest repeat count of key-value heads that ``degree`` divides."""
    return degree // math.gcd(heads, degree)


def _repeated(part: torch.Tensor, repeats: int) -> torch.Tensor:
    samples, heads, length, width = part.shape
    return part[:, :, None].expand(samples, heads, repeats, length, width).flatten(1, 2)


def _to_heads(parts: tuple[torch.Tensor, ...], exchange: Exchange) -> list[torch.Tensor]:
    """Exchange chunks of all heads for full sequences of some heads.

    One all-to-all for all ``parts``.
    """
    degree = exchange.degree
    samples, _, length, _ = parts[0].shape
    sizes = [(part.shape[1] // degree, part.shape[3]) for part in parts]
    # rows for one rank are adjacent and begin with the token, so that data from all ranks forms one sequence
    rows = [part.unflatten(1, (degree, -1)).permute(1, 3, 0, 2, 4) for part in parts]
    if len({width for _, width in sizes}) == 1:
        packed = torch.cat(rows, dim=3)
    else:
        packed = torch.cat([row.flatten(3) for row in rows], dim=3)
    arrived: torch.Tensor = _AllToAll.apply(packed.reshape(degree * length, samples, -1), exchange.group, degree)
    full = arrived.split([heads * width for heads, width in sizes], dim=-1)
    return [part.unflatten(-1, size).permute(1, 2, 0, 3) for part, size in zip(full, sizes, strict=True)]


def _to_tokens(found: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Exchange one tensor back to chunks.

    Tokens precede heads in memory, as models transpose them next.
    """
    degree = exchange.degree
    samples, heads, length, width = found.shape
    arrived: torch.Tensor = _AllToAll.apply(found.permute(2, 0, 1, 3), exchange.group, degree)
    chunks = arrived.view(degree, length // degree, samples, heads, width).permute(2, 1, 0, 3, 4)
    return chunks.reshape(samples, length // degree, degree * heads, width).transpose(1, 2)


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts of the first dim, in rank order.

    The backward is the same operation.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str, degree: int) -> torch.Tensor:
        ctx.group, ctx.degree = group, degree
        return _exchanged(tensor, group, degree)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchanged(gradient, ctx.group, ctx.degree), None, None


def _exchanged(tensor: torch.Tensor, group: str, degree: int) -> torch.Tensor:
    sizes = [tensor.shape[0] // degree] * degree
    tensor = tensor.contiguous()
    with COMM_TIMER.part("exposed_cp"):
        sent = torch.ops._c10d_functional.all_to_all_single(tensor, sizes, sizes, group)
        arrived: torch.Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return arrived
