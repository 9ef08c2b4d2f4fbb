"""Inspect one fake forward: where the model computes attention, and what else mixes tokens.

The forward runs twice. Once at the training length, because masks depend on it; and once at a prime length that
divides no size of the model, so that a dim whose size it divides is a token dim, and an operation that reduces,
slices, transposes or convolves such a dim is detected.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from shardwise.errors import ModelError
from shardwise.model.facts import ModelSpec
from shardwise.parallel.context_parallel.token_mixing import Mixing
from shardwise.parallel.context_parallel.ulysses import attention_problem, kv_repeats
from shardwise.parallel.fake_forward import inputs_of, run_forward
from shardwise.plan.plan import Plan

POSITIONS = "position_ids"
_LONGEST = 8192  # the mask is really computed
_PRIMES = (13, 11, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
_WITHOUT = "use a strategy without +cp"


@dataclass(frozen=True)
class ContextLayout:
    """Locations where a model computes attention.

    ``sites`` are modules, by name, whose forward calls it; ``positions`` is the index of ``position_ids`` among the
    arguments of the model's forward. Configurations state the length from which the model attends to a ``window``
    of tokens only; in a chunk it would not see that length.
    """

    sites: tuple[str, ...]
    positions: int
    window: int | None = None


@dataclass
class _Look(TorchFunctionMode):
    """Record the attention calls of one forward instead of computing them."""

    running: list[str] = field(default_factory=list)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attention(*args, **(kwargs or {}))

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *_: Any, **__: Any
    ) -> torch.Tensor:
        site = self.running[-1]
        problem = attention_problem(site, query, key, attn_mask)
        if problem:
            self.problems[site] = problem
        elif site not in self.heads:
            self.heads[site] = (query.shape[1], key.shape[1])
        shape = (*query.shape[:-1], value.shape[-1])
        if len(shape) != 4:
            return query.new_empty(shape)
        return query.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)


def inspect_context(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any) -> ContextLayout:
    """Find where ``module`` computes attention, and check that nothing else mixes tokens.

    Raises:
        ModelError: all operations that need more than a chunk of the tokens, and all other obstacles.
    """
    args, kwargs = inputs_of(sample, plan.seq_len)
    place, problems = _position_argument(module)
    samples, length = _form(args, kwargs)
    known = min(length, _LONGEST)
    seen, _, failure = _forward(module, *_resized((args, kwargs), samples, length, known), None)
    if failure:
        problems.append(f"the model's forward cannot be traced under fake tensors ({failure}); {_WITHOUT}")
    problems += _summed(list(seen.problems.values()))
    if not failure:
        problems += _mixing_problems(module, spec, plan, (args, kwargs), place)
        sites = tuple(dict.fromkeys([*seen.heads, *seen.problems]))
        problems += _site_problems(spec, sites)
        problems += _head_problems(plan, seen.heads)
    window = _window(module)
    if window is not None and length > known and length >= window:
        problems.append(f"the model attends to a window of {window} tokens, and samples have {length}; {_WITHOUT}")
    if problems:
        raise ModelError(*dict.fromkeys(f"{plan.strategy}: {problem}" for problem in problems))
    return ContextLayout(_outermost(sites), place, window)


def _mixing_problems(module: nn.Module, spec: ModelSpec, plan: Plan, inputs: tuple[Any, Any], place: int) -> list[str]:
    """List operations that mix tokens outside of attention, at a length that marks their dim."""
    samples, length = _form(*inputs)
    sizes = {size for tensor in [*module.parameters(), *module.buffers()] for size in tensor.shape}
    prime = next((p for p in _PRIMES if all(size % p for size in sizes)), _PRIMES[-1])
    args, kwargs = _resized(inputs, samples, length, prime)
    positions, own = None, Mixing(prime, None)
    if place >= 0 and len(args) <= place and POSITIONS not in kwargs:
        _forward(module, args, kwargs, own)
        positions = torch.arange(prime)[None]
        kwargs = {**kwargs, POSITIONS: positions}
    seen = Mixing(prime, positions)
    _, outputs, failure = _forward(module, args, kwargs, seen)
    if failure:
        return [f"the model's forward does not run on {prime} tokens ({failure}); {_WITHOUT}"]
    problems = [
        f"'{site or 'the model'}' mixes tokens outside of attention ({what}), and context parallel shards "
        f"the sequence; {_WITHOUT}"
        for site, what in list(seen.found.items())[:3]
    ]
    if positions is not None and not seen.positions_read:
        problems.append(
            f"the model takes {POSITIONS} and does not use them: a rank whose tokens begin later needs them"
        )
    elif positions is not None and own.known - seen.known:
        problems.append(
            f"the model does not number tokens 0, 1, 2, ... by itself, as each rank will pass in {POSITIONS} (it "
            f"counts from a padding index, or leaves padding out): put {POSITIONS} into each batch, or {_WITHOUT}"
        )
    for leaf in _pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs):
        if isinstance(leaf, torch.Tensor) and (leaf.ndim < 2 or leaf.shape[1] != prime):
            form = ["length" if size == prime else size for size in leaf.shape]
            problems.append(
                f"the model returns {form} where [samples, length, ...] is needed: a result of the full sequence "
                f"does not fit on one rank; {_WITHOUT}"
            )
    return problems


def _forward(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], mixing: Mixing | None
) -> tuple[_Look, Any, str]:
    look = _Look()
    contexts: list[AbstractContextManager[Any]] = [_names(module, look.running), look]
    if mixing is not None:
        mixing.running = look.running
        contexts.append(mixing)
    return look, *run_forward(module, args, kwargs, *contexts)


@contextmanager
def _names(module: nn.Module, running: list[str]) -> Iterator[None]:
    """Track the names of the modules whose forward runs in ``running``, innermost last."""

    def enter(name: str) -> Any:
        return lambda *_: running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _form(args: Any, kwargs: Any) -> tuple[int, int]:
    """Return the number of samples and their length."""
    found = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
    ids = [leaf for leaf in found if not leaf.is_floating_point()]
    if not found:
        raise ModelError("context parallel shards tensors [samples, length, ...], and the sample has none")
    shape = (ids or found)[0].shape
    return shape[0], shape[1]


def _resized(inputs: tuple[Any, Any], samples: int, length: int, wanted: int) -> tuple[Any, Any]:
    """Resize the inputs to one sample of ``wanted`` tokens."""
    index = torch.arange(wanted) % length

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2 or tensor.shape[0] not in (1, samples) or tensor.shape[1] != length:
            return tensor
        return tensor[:1, index]

    found: tuple[Any, Any] = _pytree.tree_map_only(torch.Tensor, resize, inputs)
    return found


def _position_argument(module: nn.Module) -> tuple[int, list[str]]:
    """Find the index of ``position_ids`` in the model's forward.

    Also return the problem if it is missing.
    """
    known = inspect.signature(module.forward).parameters
    if POSITIONS in known:
        return list(known).index(POSITIONS), []
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return len(known), []
    return -1, [
        f"the model's forward has no argument {POSITIONS}, through which a rank passes where its tokens begin: "
        f"add `{POSITIONS}: torch.Tensor | None = None` [1, length] and use it for every position"
    ]


def _site_problems(spec: ModelSpec, sites: Sequence[str]) -> list[str]:
    missing = [block for block in spec.blocks or ("the model",) if not any(_inside(site, block) for site in sites)]
    missing = [] if sites and not spec.blocks else missing
    problems = []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problems.append(
            f"'{missing[0]}'{more} never calls scaled_dot_product_attention, which is what is exchanged (transformers: "
            f'attn_implementation="sdpa"); {_WITHOUT}'
        )
    around = [site for site in sites if any(_inside(block, site) and block != site for block in spec.blocks)]
    problems += [f"'{site or 'the model'}' computes attention around its blocks; move it into one" for site in around]
    return problems


def _head_problems(plan: Plan, heads: dict[str, tuple[int, int]]) -> list[str]:
    """List attention whose heads do not divide, one line for each number of heads."""
    cp, tp = plan.dims.cp, plan.dims.tp
    problems: dict[int, str] = {}
    for site, (queries, keys) in heads.items():
        local, local_keys = queries // tp, max(1, keys // tp)
        if queries % tp or local % cp or local % (local_keys * kv_repeats(local_keys, cp)):
            works = [n for n in range(2, local + 1) if local % n == 0]
            fix = f"use cp {' or '.join(map(str, works))}" if works else _WITHOUT
            each = f" ({queries} over tp {tp})" if tp > 1 else ""
            rule = f"which do not divide by cp {cp}: a head is computed on one rank"
            problems.setdefault(local, f"'{site}' has {local} heads{each}, {rule}; {fix}")
    return list(problems.values())


def _outermost(sites: Sequence[str]) -> tuple[str, ...]:
    return tuple(s for s in sites if not any(_inside(s, other) and other != s for other in sites))


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _window(module: nn.Module) -> int | None:
    """Return the shortest attention window in the model's configurations."""
    config = getattr(module, "config", None)
    places = [config, getattr(config, "text_config", None)]
    found = [getattr(place, name, None) for place in places for name in _WINDOWS]
    return min((value for value in found if isinstance(value, int) and value > 0), default=None)


def _summed(problems: list[str]) -> list[str]:
    """Merge problems that differ only in the layer: keep the first of each."""
    more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
    return [problems[0] + more] if problems else []
