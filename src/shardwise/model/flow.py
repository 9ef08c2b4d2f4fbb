"""Trace data flow through linear layers, by one forward in which they return random numbers.

Everything between the linear layers (norms, attention, reshapes, activations) is computed, in float64, on one short
sample; the linear layers and the embeddings are not, so no weights are needed and a large model takes as little memory
as a small one. Autograd then gives the exact dependencies. The module is not changed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from shardwise.model.read import clean_name

SMALL = 1 << 20  # a parameter of three dims or more (experts) with more elements than this gets no values
LARGE = 1 << 25  # the limit for two dims, such as a table of positions or a bias of attention
LENGTH = 8
OFFSETS = 65521  # offset of a tensor in a pool of random numbers

Handler = Callable[["Product", torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Product:
    """Linear layer or embedding: its name, input size (rows of a lookup) and output size."""

    name: str
    is_lookup: bool
    inputs: int
    outputs: int
    weight: str
    bias: str | None
    outputs_first: bool = True


@dataclass(eq=False)
class Call:
    """Call of a product: its input, and its output (a leaf of autograd's graph)."""

    product: Product
    value: torch.Tensor
    leaf: torch.Tensor
    count: int


@dataclass
class Attention:
    """Attention call: query heads, key-value heads, and head dim."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(eq=False)
class BlockRun:
    """Call of a block: arguments, result, and the calls inside it.

    A block equal to an earlier one stores only that one's name (``like``). ``repeated``: it ran more than once;
    ``follows``: its input is the output of the previous block.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: tuple[str, int | str]
    hidden: torch.Tensor
    output: Any = None
    calls: list[Call] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    arguments: list[tuple[str, tuple[str, int | str], torch.Tensor]] = field(default_factory=list)
    like: str = ""
    repeated: bool = False
    follows: bool = False


def is_linear(module: nn.Module) -> bool:
    """Return whether it is a ``Linear`` or transformers' ``Conv1D`` (transposed weight)."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    weight, nf = module._parameters.get("weight"), getattr(module, "nf", None)
    return type(module).__name__ == "Conv1D" and weight is not None and weight.ndim == 2 and weight.shape[1] == nf


def products(module: nn.Module) -> dict[str, Product]:
    """Return linear layers and embeddings by name."""
    found = {}
    for path, part in module.named_modules():
        name, weight = clean_name(path), part._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            continue
        bias = f"{name}.bias" if part._parameters.get("bias") is not None else None
        if isinstance(part, nn.Embedding):
            found[path] = Product(name, True, part.num_embeddings, part.embedding_dim, f"{name}.weight", None)
        elif is_linear(part):
            first = isinstance(part, nn.Linear)
            outputs, inputs = weight.shape if first else (weight.shape[1], weight.shape[0])
            found[path] = Product(name, False, inputs, outputs, f"{name}.weight", bias, first)
    return found


class Flow:
    """Module whose products return random numbers, for the duration of the ``with``.

    ``parameters`` are those outside of products, by name; the small ones are random, and leaves of autograd's graph.
    ``passed`` are blocks (first) that pass another one (second) more than hidden states with a gradient. ``calls`` are
    the products outside the blocks, ``runs`` the blocks. ``external_params`` are modules (second) whose parameters
    are used by another module's forward (first).
    """

    def __init__(self, module: nn.Module, blocks: tuple[str, ...], dtype: torch.dtype = torch.float64) -> None:
        self.module, self.blocks, self.dtype = module, blocks, dtype
        self.products = products(module)
        self.parameters: dict[str, nn.Parameter] = {}
        self.counts: dict[str, int] = {}
        self.narrowed: dict[str, tuple[int, int]] = {}
        self.external_params: set[tuple[str, str]] = set()
        self.owners: dict[int, str] = {}
        self.running: list[str] = []
        self.handler: Handler | None = None
        self.calls: list[Call] = []
        self.runs: dict[str, BlockRun] = {}
        self.block: BlockRun | None = None
        self._pool = torch.empty(0)
        self.recording = True
        self.side: dict[int, tuple[str, torch.Tensor]] = {}
        self.passed: set[tuple[str, str]] = set()
        self._previous: torch.Tensor | None = None
        self._known: dict[Any, str] = {}

    def __enter__(self) -> Flow:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self._stack.enter_context(torch.random.fork_rng(devices=[]))
        self._stack.enter_context(torch.enable_grad())
        self._stack.enter_context(torch.device("cpu"))
        self._stack.enter_context(_swapped(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def given(self, product: Product, shape: torch.Size, count: int) -> torch.Tensor:
        """Return the output of a product's ``count``-th call: random numbers, reproducible.

        The first half of a sequence is positive, so that no activation function is zero everywhere.
        """
        found = self.numbers(f"{product.name}:{count}", shape).clone()
        if found.ndim > 1:
            half = found.narrow(-2, 0, (found.shape[-2] + 1) // 2)
            half.abs_().add_(0.1)
        return found

    def numbers(self, key: str, shape: torch.Size) -> torch.Tensor:
        """Return the random numbers of ``key``; not to be written to."""
        size = shape.numel()
        if self._pool.numel() < size + OFFSETS:
            generator = torch.Generator().manual_seed(0)
            self._pool = torch.randn(2 * size + OFFSETS, generator=generator, dtype=torch.float64).to(self.dtype)
        first = zlib.crc32(key.encode()) % OFFSETS
        return self._pool[first : first + size].view(shape)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the full forward; fills ``calls`` and ``runs``."""
        self.counts.clear()
        with _Quiet(self):
            return self.module(*args, **kwargs)

    @property
    def last(self) -> torch.Tensor | None:
        """Return the hidden states of the last block."""
        return self._previous

    def run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], narrowed: dict[str, tuple[int, int]]) -> Any:
        """Rerun the full forward with products limited to column ranges (from, to)."""
        self.recording, self.narrowed = False, narrowed
        try:
            return self.run(args, kwargs)
        finally:
            self.recording, self.narrowed = True, {}

    def run_block(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], handler: Handler) -> Any:
        """Rerun one block with its products computed by ``handler``."""
        self.counts.clear()
        self.handler = handler
        try:
            with _Quiet(None):
                return self.submodule(name)(*args, **kwargs)
        finally:
            self.handler = None

    def note_reads(self, given: tuple[Any, ...]) -> None:
        """Record parameters among ``given`` that belong to another module than the running one."""
        for value in given:
            owner = self.owners.get(id(value)) if isinstance(value, nn.Parameter) else None
            if owner is not None and self.running and self.running[-1] not in owner.split("|"):
                self.external_params.add((self.running[-1], owner.split("|")[0]))

    def submodule(self, name: str) -> nn.Module:
        """Return the submodule of this (clean) name."""
        found: nn.Module = next(part for path, part in self.module.named_modules() if clean_name(path) == name)
        return found

    def paths_of_products(self, block: str) -> set[str]:
        """Return the names, relative to the block, of its linear layers and embeddings."""
        prefix = f"{block}."
        return {p.name.removeprefix(prefix) for p in self.products.values() if p.name.startswith(prefix)}

    def product(self, product: Product, value: torch.Tensor) -> torch.Tensor:
        """Replace a product's forward."""
        if self.handler is not None:
            return self.handler(product, value)
        count = self.counts.get(product.name, 0)
        self.counts[product.name] = count + 1
        shape = torch.Size(
            (*value.shape, product.outputs) if product.is_lookup else (*value.shape[:-1], product.outputs)
        )
        if not product.is_lookup and value.shape[-1] != product.inputs:
            raise RuntimeError(f"{product.name} takes {product.inputs} inputs and was given {value.shape[-1]}")
        leaf = self.given(product, shape, count)
        if product.name in self.narrowed:
            first, end = self.narrowed[product.name]
            return leaf[..., first:end].clone()
        if self.recording:
            call = Call(product, value, leaf.requires_grad_(), count)
            (self.calls if self.block is None else self.block.calls).append(call)
        return leaf.clone()


class _Quiet(TorchFunctionMode):
    """Context that disables dropout and records attentions."""

    def __init__(self, flow: Flow | None) -> None:
        super().__init__()
        self.flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.flow is not None and name not in ("__get__", "size", "dim", "numel", "is_floating_point"):
            self.flow.note_reads((*args, *kwargs.values()))
        if "dropout" in name and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
            given = [*args[:3], *(kwargs[k] for k in ("query", "key", "value") if k in kwargs)]
            block = self.flow.block if self.flow is not None else None
            if block is not None and len(given) == 3 and given[0].ndim == 4:
                q, k, _ = given
                groups = q.shape[1] // max(1, k.shape[1])
                block.attentions.append(Attention(q.shape[1], q.shape[1] // max(1, groups), q.shape[3]))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _swapped(flow: Flow) -> Iterator[None]:
    """Replace the module's tensors and products and add hooks; restores everything."""
    undo: list[Callable[[], None]] = []
    made: dict[int, Any] = {}

    def put(place: dict[str, Any], key: str, value: Any) -> None:
        missing = key not in place
        before = place.get(key)
        undo.append(lambda: place.pop(key, None) if missing else place.__setitem__(key, before))
        place[key] = value

    try:
        for path, part in flow.module.named_modules():
            put(part.__dict__, "training", True)
            if part.__dict__.get("gradient_checkpointing") is True:
                put(part.__dict__, "gradient_checkpointing", False)
            product = flow.products.get(path)
            for key, parameter in part._parameters.items():
                if parameter is None:
                    continue
                name = clean_name(f"{path}.{key}" if path else key)
                if id(parameter) not in made:
                    made[id(parameter)] = _stand_in(flow, name, parameter, is_product=product is not None)
                put(part._parameters, key, made[id(parameter)])
                known = flow.owners.get(id(made[id(parameter)]))
                flow.owners[id(made[id(parameter)])] = (
                    clean_name(path) if known is None else f"{known}|{clean_name(path)}"
                )
                if product is None:
                    flow.parameters.setdefault(name, made[id(parameter)])
            for place in (part._buffers, part.__dict__):
                for key, value in list(place.items()):
                    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                        made.setdefault(id(value), _like_buffer(value, flow.dtype))
                        put(place, key, made[id(value)])
            if product is not None:
                put(part.__dict__, "forward", _answer(flow, product))
            config = getattr(part, "config", None)
            if getattr(config, "use_cache", False) is True:
                put(config.__dict__, "use_cache", False)
        undo += _hooks(flow)
        yield
    finally:
        for back in reversed(undo):
            back()


def _answer(flow: Flow, product: Product) -> Callable[..., torch.Tensor]:
    def forward(value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return flow.product(product, value)

    return forward


def _stand_in(flow: Flow, name: str, parameter: nn.Parameter, *, is_product: bool) -> nn.Parameter:
    if not parameter.is_floating_point():
        return nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype), requires_grad=False)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not is_product and parameter.numel() <= (SMALL if parameter.ndim > 2 else LARGE):
        found = 1.0 + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return nn.Parameter(found.to(flow.dtype))
    shape = parameter.shape  # expanded rows: the right shape and distinct rows, without the memory
    strides = [*itertools.accumulate([7] * (len(shape) - 1), lambda above, step: above * step + step), 1]
    strides = [*reversed(strides[:-1]), 1] if len(shape) > 1 else [1]
    size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    values = torch.randn(size, generator=generator, dtype=torch.float64) / max(1, shape[-1]) ** 0.5
    return nn.Parameter(values.to(flow.dtype).as_strided(shape, strides), requires_grad=False)


def _like_buffer(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = value.dtype in (torch.bfloat16, torch.float16)  # anything wider is left unchanged
    if value.device.type == "meta":
        if value.dtype in (torch.int64, torch.int32) and value.ndim:  # positions, most likely
            return torch.arange(value.shape[-1], dtype=value.dtype).expand(value.shape).clone()
        return torch.ones(value.shape, dtype=dtype if narrow else value.dtype)
    return value.detach().to("cpu", dtype if narrow else value.dtype, copy=True)


def _hooks(flow: Flow) -> list[Callable[[], None]]:
    handles = []
    for path, part in flow.module.named_modules():
        name = clean_name(path)
        if name in flow.blocks:
            handles.append(part.register_forward_pre_hook(_before(flow, name), with_kwargs=True))
        handles.append(part.register_forward_pre_hook(_begin(flow, name), with_kwargs=True))
        handles.append(part.register_forward_hook(_end(flow, name), always_call=True))
    return [handle.remove for handle in handles]


def _before(flow: Flow, name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if flow.handler is not None:
            return None
        found = next(((place, value) for place, value in _tensors(args, kwargs) if value.is_floating_point()), None)
        if found is None:
            return None
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if id(leaf) in flow.side and leaf is not found[1]:
                flow.passed.add((flow.side[id(leaf)][0], name))
        place, value = found
        hidden = value.detach().clone().requires_grad_()
        args, kwargs = put(place, hidden, args, kwargs)
        flow.block = BlockRun(name, args, kwargs, place, hidden, follows=value is flow._previous)
        # a block may modify its input in place: it gets a non-leaf tensor
        return put(place, hidden.clone(), args, kwargs)

    return hook


def _begin(flow: Flow, name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flow.running.append(name)
        if flow.handler is None and flow.block is not None and name != flow.block.name:
            flow.block.arguments += [(name, place, value) for place, value in _tensors(args, kwargs)]

    return hook


def _end(flow: Flow, name: str) -> Callable[..., Any]:
    def hook(module: nn.Module, _: Any, output: Any) -> None:
        flow.running.pop()
        run = flow.block
        if flow.handler is not None or run is None or name != run.name:
            return
        run.output, flow.block = output, None
        if not flow.recording:
            return
        if name in flow.runs:
            flow.runs[name].repeated = True
            return
        given = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        main = flow._previous = main_output(output, run.hidden)
        flow.side |= {id(leaf): (name, leaf) for leaf in given if leaf is not main and leaf.requires_grad}
        first = flow._known.setdefault(_signature(module, run), name)
        if first != name:
            run = BlockRun(name, (), {}, run.place, run.hidden.detach(), like=first, follows=run.follows)
        flow.runs[name] = run

    return hook


def main_output(output: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return the hidden states from a block's output."""
    leaves = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return next((leaf for leaf in leaves if leaf.shape == hidden.shape), None)


def _signature(module: nn.Module, run: BlockRun) -> Any:
    """Return the facts that make two blocks equal for sharding."""
    facts: list[Any] = [run.place, tuple(run.hidden.shape), sorted(run.kwargs)]
    for path, part in module.named_modules():
        own = {k: _fact(v) for k, v in vars(part).items() if not _is_index(k)}
        shapes = tuple((key, tuple(p.shape)) for key, p in part._parameters.items() if p is not None)
        buffers = tuple((key, _digest(b)) for key, b in part._buffers.items() if b is not None)
        facts.append((clean_name(path), type(part).__qualname__, tuple(sorted(own.items())), shapes, buffers))
    inputs: dict[int, int] = {}
    for call in run.calls:
        index = inputs.setdefault(id(call.value), len(inputs))
        facts.append((call.product.name.removeprefix(f"{run.name}."), index))
    facts += [(a.heads, a.kv_heads, a.head_dim) for a in run.attentions]
    return repr(facts)


def _fact(value: Any) -> str:
    """Describe an attribute: numbers, texts, function names, or the type of anything else."""
    if value is None or isinstance(value, int | bool | str | float | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, tuple | list) and len(value) < 100:
        return f"[{', '.join(_fact(item) for item in value)}]"
    if isinstance(value, functools.partial):
        return f"{_fact(value.func)}({_fact(value.args)}, {sorted((k, _fact(v)) for k, v in value.keywords.items())})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _digest(value: torch.Tensor) -> tuple[Any, ...]:
    if value.device.type == "meta" or value.numel() > SMALL or not value.numel():
        return (tuple(value.shape),)
    return tuple(value.shape), zlib.crc32(value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)


def _is_index(key: str) -> bool:
    return key.startswith("_") or any(part in key for part in ("idx", "index", "layer_id", "layer_number"))


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[str, int | str], torch.Tensor]]:
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield ("args", index), value
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield ("kwargs", key), value


def put(
    place: tuple[str, int | str], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the argument at ``place`` by ``value``."""
    if place[0] == "args":
        index = int(place[1])
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, str(place[1]): value}


def short_sample(
    sample: Any, multiple: int, dtype: torch.dtype = torch.float64
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Shorten ``sample``: one sample, with a number of tokens divisible by ``multiple``.

    Token ids [1, length] where ``sample`` is ``None``. Inputs that are not tokens keep all sizes but the first.
    """
    length = -(-LENGTH // multiple) * multiple
    if sample is None:
        sample = torch.zeros(1, length, dtype=torch.int64)
    leaves = [leaf for leaf in _pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
    ids = next((leaf for leaf in leaves if leaf.ndim == 2 and not leaf.is_floating_point()), None)
    batch = leaves[0].shape[0] if leaves and leaves[0].ndim else 1
    tokens = ids.shape[1] if ids is not None else 0
    if 0 < tokens < length:
        length = tokens // multiple * multiple or tokens

    def shrink(leaf: torch.Tensor) -> torch.Tensor:
        found = leaf.detach()
        for dim, size in enumerate(leaf.shape):
            if dim == 0 and size == batch:
                found = found.narrow(0, 0, 1)
            elif tokens and size == tokens:
                found = found.narrow(dim, 0, length)
        if found.device.type == "meta":
            found = torch.ones(found.shape, dtype=found.dtype) * int(found.dtype == torch.bool)
        found = found.to("cpu", copy=True)
        return found.to(dtype) if found.is_floating_point() else found

    short = _pytree.tree_map_only(torch.Tensor, shrink, sample)
    if isinstance(short, dict) or hasattr(short, "keys"):
        named = dict(short)
        if isinstance(named.get("attention_mask"), torch.Tensor):
            named["attention_mask"] = torch.ones_like(named["attention_mask"])
        return (), named
    return (tuple(short) if isinstance(short, list | tuple) else (short,)), {}
