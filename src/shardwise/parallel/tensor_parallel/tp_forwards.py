"""Module forwards under tensor parallel: plain local tensors in, plain local tensors out.

A module becomes a subclass of its own class with the same name. Its parameters stay DTensors (as FSDP2, the
optimizer and checkpoints see them); its forward reads their local part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.model.read import clean_name
from shardwise.parallel.tensor_parallel.tensor_layout import (
    ArgRef,
    GatheredArgument,
    ModuleShard,
    ParameterView,
    Slices,
    TensorLayout,
    chunk,
    set_numbers,
)
from shardwise.parallel.tensor_parallel.tp_collectives import (
    SEQUENCE,
    Rows,
    TpGroup,
    exchange,
    gather_from_sp,
    gather_from_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_to_sp,
    scatter_to_sp,
    share,
)

_READING = "_shardwise_reading"
_KINDS: dict[Any, type] = {}


class SharedInput:
    """Entry of a full or a sharded tensor into sharded work, once for all its readers.

    The last tensor that entered is kept until the last of its ``readers`` has it.
    """

    def __init__(self, group: TpGroup, readers: int, *, sequence: bool) -> None:
        self.group, self.readers, self.sequence = group, readers, sequence
        self.source: torch.Tensor | None = None
        self.entered: torch.Tensor | None = None
        self.left = 0

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` as the sharded work reads it."""
        found = self.entered if self.source is tensor else None
        if found is None:
            if self.sequence:
                found = gather_from_sp(_as_computed(tensor), self.group)
            else:
                found = share(_as_computed(tensor), self.group) if tensor.requires_grad else tensor
            self.source, self.entered, self.left = tensor, found, self.readers
        self.left -= 1
        if self.left <= 0:
            self.source = self.entered = None
        return found


def _as_computed(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype that matrix products under autocast use, before it is sent."""
    if torch.is_autocast_enabled(tensor.device.type) and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))
    return tensor


class Reader:
    """Read one parameter of a module as its forward needs it.

    ``size`` is that of the dim it is taken from.
    """

    def __init__(self, local: ParameterView, group: TpGroup, device: str, size: int) -> None:
        self.group, self.partial, self.dim = group, local.partial, local.uses_dim
        self.rows: Rows | None = None
        self.index: torch.Tensor | None = None
        if local.uses and local.dim is None:
            self.index = _indices(local.uses[group.rank], device)
        elif local.uses:
            self.rows = _rows(local.uses, size, group, device)

    def __call__(self, parameter: Any) -> Any:
        """Return the part of ``parameter`` that this rank computes with."""
        if not isinstance(parameter, DTensor):
            return parameter
        if self.index is not None:
            return parameter.to_local(grad_placements=(Partial(),)).index_select(self.dim, self.index)
        if self.rows is not None:
            return exchange(parameter.to_local().movedim(self.dim, 0), self.group, self.rows).movedim(0, self.dim)
        return parameter.to_local(grad_placements=(Partial(),) if self.partial else None)


def _rows(uses: Sequence[Slices], size: int, group: TpGroup, device: str) -> Rows:
    """Count local rows that each rank uses, and rows of the others that this rank uses."""
    borders = [chunk(size, group.size, at) for at in range(group.size)]
    first, end = borders[group.rank]
    sent = [[row - first for row in _within(slices, first, end)] for slices in uses]
    taken = [len(_within(uses[group.rank], start, stop)) for start, stop in borders]
    rows = torch.tensor([row for piece in sent for row in piece], dtype=torch.int64, device=device)
    return Rows(rows, [len(piece) for piece in sent], taken)


def _within(slices: Slices, first: int, end: int) -> list[int]:
    """List the rows of ``slices`` in ``[first, end)``."""
    return [row for start, stop in slices for row in range(max(start, first), min(stop, end))]


def _indices(slices: Slices, device: str) -> torch.Tensor:
    return torch.cat([torch.arange(first, end, device=device) for first, end in slices])


class TpForwards:
    """Convert the modules of one stage to their forwards."""

    def __init__(self, stage: nn.Module, layout: TensorLayout, mesh: DeviceMesh, *, sequence: bool) -> None:
        self.layout, self.mesh, self.sequence = layout, mesh, sequence
        self.modules = {clean_name(path): part for path, part in stage.named_modules()}
        self.group = TpGroup(mesh.get_group())
        self.ways: dict[str, SharedInput] = {}

    def way(self, name: str) -> SharedInput:
        """Return the input entry of a group; readers are counted by each request."""
        inside = name.startswith("block:")
        way = self.ways.setdefault(name, SharedInput(self.group, 0, sequence=self.sequence and inside))
        way.readers += 1
        return way

    def readers(self, module: nn.Module, shard: ModuleShard) -> dict[str, Reader]:
        """Return a reader for each of the module's parameters."""
        found = {}
        for key, local in shard.local.items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                size = parameter.shape[local.uses_dim] if parameter.ndim else 1
                found[key] = Reader(local, self.group, self.mesh.device_type, size)
        return found

    def convert_all(self) -> None:
        """Convert every module in the layout to its forward."""
        for name, module in self.modules.items():
            if any(True for _ in module.parameters()):  # a stage has modules of other stages as empty modules
                self.convert(module, name)
        head = next((name for name, shard in self.layout.modules.items() if shard.kind == "colwise_loss"), "")
        if head and head in self.modules and self.modules[head]._parameters.get("weight") is not None:
            self.outputs(self.modules[""])

    def convert(self, module: nn.Module, name: str) -> None:
        """Convert ``module`` to the forward that the layout has for its name."""
        set_numbers(module.__dict__, self.layout.attributes.get(name, {}))
        shard = self.layout.modules.get(name)
        if shard is not None and any(module._parameters.get(key) is not None for key in shard.local):
            if shard.kind in ("colwise", "rowwise", "colwise_gather", "colwise_loss"):
                self.linear(module, shard)
            elif isinstance(module, nn.Embedding) and shard.kind == "embedding":
                self.embedding(module, shard)
            else:
                _read(module, self.readers(module, shard))
        owners = [self.modules[owner] for owner in self.layout.external_params.get(name, ()) if owner in self.modules]
        if owners:
            _read_besides(module, owners)
        for entry in self.layout.entries.get(name, ()):
            _enter(module, entry, self.way(entry.group))
        if name and name == self.layout.first:
            _around(module, before=self._shard_hidden)
        if name and name == self.layout.last:
            _around(module, after=lambda output: _on_hidden(output, lambda x: gather_sequence(x, self.group)))

    def linear(self, module: nn.Module, shard: ModuleShard) -> None:
        """Convert a ``Linear`` (or transformers' ``Conv1D``) to local weights."""
        readers = self.readers(module, shard)
        weight, bias = readers["weight"], readers.get("bias")
        turned = not isinstance(module, nn.Linear)
        group, sequence = self.group, self.sequence
        kind = shard.kind
        way = self.way(shard.group) if shard.group else None
        widths = [end - first for first, end in (chunk(self.layout.vocab, group.size, r) for r in range(group.size))]

        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            own = self._parameters
            w = weight(own["weight"])
            b = None if bias is None else bias(own["bias"])
            if turned:
                w = w.t()
            if kind != "rowwise":
                found = functional.linear(x if way is None else way.enter(x), w, b)
                return gather_from_tp(found, group, widths) if kind == "colwise_gather" else found
            found = (reduce_scatter_to_sp if sequence else reduce_from_tp)(functional.linear(x, w), group)
            return found if b is None else found + b.to(found.dtype)

        _subclass(module, {"forward": forward})

    def embedding(self, module: nn.Embedding, shard: ModuleShard) -> None:
        """Look up in row-sharded weights: each rank returns its rows, and zeros elsewhere."""
        size, group = module.num_embeddings, self.group
        first, end = chunk(size, group.size, group.rank)
        if module.padding_idx is not None:
            here = first <= module.padding_idx < end
            module.padding_idx = module.padding_idx - first if here else None
        _read(module, self.readers(module, shard))

        def around(inner: Callable[..., Any], self: nn.Module, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            torch._assert_async(((ids >= 0) & (ids < size)).all(), f"token ids must be from 0 to {size - 1}")
            others = (ids < first) | (ids >= end)
            found = inner((ids - first).masked_fill(others, 0), *args, **kwargs)
            return reduce_from_tp(found.masked_fill(others.unsqueeze(-1), 0), group)

        _wrap(module, around)

    def _shard_hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = _at(self.layout.hidden, args, kwargs)
        ranks = self.group.size
        length = hidden.shape[SEQUENCE]
        if length % ranks:
            raise ModelError(
                f"sequence parallel shards the sequence over tp {ranks} ranks, and its length {length} is not a "
                "multiple "
                f"of {ranks}; pad it to {-(-length // ranks) * ranks} or set parallel.sequence_parallel to false"
            )
        return _put(self.layout.hidden, scatter_to_sp(hidden, self.group), args, kwargs)

    def outputs(self, stage: nn.Module) -> None:
        """Make the model return its logits as a DTensor that is sharded over the vocabulary."""
        place, vocab, mesh = self.layout.logits, self.layout.vocab, self.mesh
        if place is None:
            return

        def wrap(output: Any) -> Any:
            if place == "":
                return _as_logits(output, vocab, mesh)
            if isinstance(output, tuple):
                index = int(place)
                return (*output[:index], _as_logits(output[index], vocab, mesh), *output[index + 1 :])
            output[place] = _as_logits(output[place], vocab, mesh)
            return output

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if kwargs.get("labels") is not None:
                raise ModelError(
                    "loss_parallel leaves the logits sharded over the vocabulary, but the model computes its "
                    "own loss when labels are passed; remove labels from its inputs or set parallel.loss_parallel to "
                    "false"
                )
            return args, kwargs

        _around(stage, before=before, after=wrap)


def _as_logits(local: torch.Tensor, vocab: int, mesh: DeviceMesh) -> torch.Tensor:
    shape = torch.Size((*local.shape[:-1], vocab))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), mesh, [Shard(local.ndim - 1)], run_check=False, shape=shape, stride=stride
    )


def _at(place: ArgRef, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[int(place[1])] if place[0] == "args" else kwargs[str(place[1])]


def _put(
    place: ArgRef, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if place[0] == "args":
        index = int(place[1])
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, str(place[1]): value}


def _on_hidden(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)


def _enter(module: nn.Module, entry: GatheredArgument, way: SharedInput) -> None:
    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _put(entry.place, way.enter(_at(entry.place, args, kwargs)), args, kwargs)

    _around(module, before=before)


def _around(
    module: nn.Module, before: Callable[..., Any] | None = None, after: Callable[[Any], Any] | None = None
) -> None:
    def around(inner: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args, kwargs = before(args, kwargs)
        output = inner(*args, **kwargs)
        return output if after is None else after(output)

    _wrap(module, around)


def _read(module: nn.Module, readers: dict[str, Reader]) -> None:
    """Read ``module``'s parameters through ``readers`` during its forward.

    At other times they are unchanged.
    """

    def reading(key: str, reader: Reader) -> property:
        def get(self: nn.Module) -> Any:
            local = self._parameters[key]
            return reader(local) if self.__dict__.get(_READING) else local

        return property(get)

    _subclass(module, {key: reading(key, reader) for key, reader in readers.items()})
    _read_besides(module, [module])


def _read_besides(module: nn.Module, owners: list[nn.Module]) -> None:
    """Read the parameters of ``owners`` as in a forward, while ``module``'s forward runs."""

    def around(inner: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [owner.__dict__.get(_READING, False) for owner in owners]
        for owner in owners:
            owner.__dict__[_READING] = True
        try:
            return inner(*args, **kwargs)
        finally:
            for owner, value in zip(owners, before, strict=True):
                owner.__dict__[_READING] = value

    _wrap(module, around)


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make ``around(inner, module, *args, **kwargs)`` the forward.

    ``inner`` is the previous one.
    """
    above = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(lambda *a, **k: above.forward(self, *a, **k), self, *args, **kwargs)

    _subclass(module, {"forward": forward})


def _subclass(module: nn.Module, namespace: dict[str, Any]) -> None:
    """Share one subclass among equal modules, so that equal blocks compile once.

    What differs (readers, entries) is in closures, which are attributes of the module.
    """
    kind = type(module)
    codes = tuple((key, getattr(value, "fget", value).__code__) for key, value in namespace.items())
    for key, value in namespace.items():
        module.__dict__[_slot(kind, key)] = getattr(value, "fget", value)
    if (kind, codes) not in _KINDS:
        facts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        members = {key: _delegate(_slot(kind, key), value) for key, value in namespace.items()}
        _KINDS[kind, codes] = type(kind.__name__, (kind,), {**facts, **members})
    module.__class__ = _KINDS[kind, codes]


def _slot(kind: type, key: str) -> str:
    return f"_shardwise_{len(kind.__mro__)}_{key}"


def _delegate(slot: str, value: Any) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, slot)(self, *args, **kwargs)

    return property(call) if isinstance(value, property) else call
