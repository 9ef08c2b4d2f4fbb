"""Tensors of a live model and optimizer: names, local boxes, and the ranks with replicas."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.boxes import Box as Box
from shardwise.distributed.local_tensor import local_of as local_of
from shardwise.errors import CheckpointError, ModelError
from shardwise.model.read import clean_name
from shardwise.parallel.lora.adapters import adapters_of
from shardwise.parallel.ownership import StageOwnership, ownership_of

_COMPILED_PART = "_orig_mod."


@dataclass(frozen=True)
class Slot:
    """Parameter or persistent buffer with all its names in the full model."""

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool

    @property
    def names(self) -> tuple[str, ...]:
        """First name and aliases."""
        return (self.name, *self.aliases)


def inner_model(model: nn.Module) -> nn.Module:
    """Unwrap ``DistributedDataParallel`` and ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, _COMPILED_PART.rstrip("."), None), nn.Module):
            model = compiled
        else:
            return model


def part_of(model: nn.Module) -> StageOwnership | None:
    """Return the record of the local part of the model; ``None`` where no rank has a part only."""
    return ownership_of(inner_model(model))


def ranks_of(ownership: StageOwnership | None) -> tuple[int, ...]:
    """Return the ranks that have the same plain tensors as this one, in ascending order."""
    return tuple(range(exchange.world_size())) if ownership is None else ownership.ranks


def slots_of(model: nn.Module) -> list[Slot]:
    """List parameters, then persistent buffers, tied ones once.

    The model is put in its sharded state first. Of a model with adapters the frozen base is left out: it is not part of
    a checkpoint. Of a model split over ranks (pipeline stages), only the local ones are listed.

    Raises:
        ModelError: a tensor has no data yet, or a module keeps extra state that safetensors cannot store.
    """
    model = inner_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left unsharded parameters, which the optimizer does not know
    extra = [n for n, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    if extra:
        raise ModelError(f"modules with get_extra_state cannot be checkpointed: {', '.join(extra)}; use buffers")
    slots: list[Slot] = []
    names_of, adapted = _Names(ownership_of(model)), adapters_of(model) is not None
    parameters = model.named_parameters(remove_duplicate=False)
    for is_buffer, named in ((False, parameters), (True, _persistent_buffers(model))):
        names: dict[int, list[str]] = defaultdict(list)
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in named:
            if is_buffer or not adapted or tensor.requires_grad:
                names[id(tensor)].append(clean_name(name).replace(_COMPILED_PART, ""))
                tensors[id(tensor)] = tensor
        slots += [Slot(*names_of(names[key]), t, is_buffer) for key, t in tensors.items()]
    empty = [slot.name for slot in slots if slot.tensor.device.type == "meta"]
    if empty:
        raise ModelError(f"{empty[0]} is on the meta device; give the model storage first: model.to_empty(device=...)")
    return slots


class _Names:
    """Map the local names of a tensor to its stored name and aliases."""

    def __init__(self, ownership: StageOwnership | None) -> None:
        self.ownership = ownership
        self.others: dict[str, list[str]] = defaultdict(list)
        for alias, name in {} if ownership is None else ownership.aliases.items():
            self.others[name].append(alias)

    def __call__(self, here: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        if self.ownership is None:
            return here[0], tuple(here[1:])
        name = self.ownership.canonical(here[0])
        return name, tuple(self.others.get(name, ()))


def transient_names(model: nn.Module) -> set[str]:
    """Return names of the full model's buffers that are not saved (``persistent=False``)."""
    model = inner_model(model)
    ownership = ownership_of(model)
    kept = {name for name, _ in _persistent_buffers(model)}
    return ({*ownership.transient} if ownership is not None else set()) | {
        clean_name(name).replace(_COMPILED_PART, "")
        for name, _ in model.named_buffers(remove_duplicate=False)
        if name not in kept
    }


def engine_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that stores this rank's state: the inner one where state is sharded."""
    module = sys.modules.get(
        "torch.distributed.optim"
    )  # its import is slow and warns; if it is in use, it is already imported
    spread: Any = getattr(module, "ZeroRedundancyOptimizer", ())
    inner: Optimizer | None = getattr(optimizer, "optim", None)
    return inner if isinstance(optimizer, spread) and inner is not None else optimizer


def box_of(tensor: torch.Tensor) -> Box:
    """Return the box of the local elements in the full tensor.

    Raises:
        CheckpointError: the layout is not made of ``Shard`` and ``Replicate``, or the local elements are not a box.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box((0,) * len(shape), shape)
    if not math.prod(shape):  # FSDP2 does not shard empty tensors as their layout declares
        return Box((0,) * len(shape), tuple(local_of(tensor).shape))
    kinds = {type(placement) for placement in tensor.placements}
    if not kinds <= {Shard, Replicate, _StridedShard}:
        raise CheckpointError(f"a tensor laid out as {tensor.placements} cannot be checkpointed by this version")
    if _StridedShard in kinds:
        box = _strided_box(tensor)
    else:
        box = _split_box(tensor.shape, tensor.device_mesh, tensor.placements, exchange.rank())
    if box.lengths != tuple(local_of(tensor).shape):
        raise CheckpointError(f"the local shape {tuple(local_of(tensor).shape)} is not {box.lengths} as laid out")
    return box


@lru_cache(maxsize=1 << 14)  # optimizer state is laid out as its parameters, and the next save finds all of it again
def _split_box(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int) -> Box:
    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(lengths))


def _strided_box(tensor: DTensor) -> Box:
    """Return the box of a strided layout (FSDP2 over tensor parallel).

    A strided axis shards what the axes to its right have left of a dimension. Torch's
     own arithmetic takes the axes from left to right and gives wrong offsets where the rows do not divide.
    """
    offsets, lengths = [0] * tensor.dim(), list(tensor.shape)
    coordinate, sizes = tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape
    if coordinate is None:
        raise CheckpointError("this rank is not in the mesh of a tensor that it has")
    splits = [(axis, p) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard | _StridedShard)]
    for axis, placement in sorted(splits, key=lambda split: isinstance(split[1], _StridedShard)):
        if isinstance(placement, _StridedShard):
            right = math.prod(sizes[other] for other, p in splits if other > axis and p.dim == placement.dim)
            if placement.split_factor != right:
                raise CheckpointError(
                    f"a tensor laid out as {tensor.placements} cannot be checkpointed: its local shard is not a box"
                )
        full = lengths[placement.dim]
        each = -(-full // sizes[axis])
        begin = min(full, each * coordinate[axis])
        offsets[placement.dim] += begin
        lengths[placement.dim] = min(full, begin + each) - begin
    return Box(tuple(offsets), tuple(lengths))


def copies_of(tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[list[int]]:
    """Return groups of ranks, each storing one full copy of ``tensor``; the same list for tensors laid out alike.

    The same on all ``ranks``. ``ranks`` are those with the same plain tensors; see `ranks_of`.
    """
    if not isinstance(tensor, DTensor):
        return _each(ranks)
    replicated = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    return _copies(tensor.device_mesh, tuple(replicated))


@lru_cache(maxsize=16)
def _each(ranks: tuple[int, ...]) -> list[list[int]]:
    return [[rank] for rank in ranks]


@lru_cache(maxsize=256)  # torch recomputes the ranks of a mesh each time
def _copies(device_mesh: DeviceMesh, replicated: tuple[int, ...]) -> list[list[int]]:
    mesh = device_mesh.mesh
    sharded = [axis for axis in range(mesh.ndim) if axis not in replicated]
    copies = math.prod(mesh.shape[axis] for axis in replicated)
    return mesh.permute([*replicated, *sharded]).reshape(copies, -1).tolist()


def plain(value: Any, where: str) -> Any:
    """Convert ``value`` to JSON: a 0-d tensor becomes a number, a tuple a list.

    Raises:
        CheckpointError: it contains a value that JSON cannot represent.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which JSON cannot represent; give numbers, text, lists"
    )


def like(live: Any, saved: Any) -> Any:
    """Convert a JSON value to the type of ``live``: tensors are filled in place, tuples kept."""
    if isinstance(live, torch.Tensor):
        return live.fill_(saved)
    if isinstance(live, tuple) and isinstance(saved, list) and len(live) == len(saved):
        return tuple(like(a, b) for a, b in zip(live, saved, strict=True))
    return tuple(saved) if isinstance(live, tuple) and isinstance(saved, list) else saved


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
