"""Assign each element of the model and optimizer state to exactly one rank that writes it."""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.format import AVERAGE, ParamGroup
from shardwise.checkpoint.layout import (
    Box,
    Slot,
    box_of,
    copies_of,
    engine_of,
    local_of,
    part_of,
    plain,
    ranks_of,
    slots_of,
)
from shardwise.checkpoint.shard_files import code_of
from shardwise.errors import CheckpointError
from shardwise.parallel.ownership import StageOwnership

SPLIT = 1 << 22  # a replicated tensor of at least this many bytes is split, one part per replica
TINY = 1 << 12  # bytes up to which replicated tensors of many ranks lie in one file: a reader opens it once


@dataclass(frozen=True)
class ShardWrite:
    """Box of a tensor that this rank writes.

    ``tensor`` is the live memory of the box, in any strides, and ``owner`` the tensor through which it is changed (a
    DTensor counts its changes by itself). It is ``steady`` where only the optimizer's step writes to it, so that it
    can be read until then.
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    owner: torch.Tensor
    steady: bool


@dataclass
class SavePlan:
    """Save plan of one rank: its tensors by name, and its non-tensor state.

    ``others`` are tensors that other ranks write (name to dtype and shape), listed to detect missing ones. ``groups``
    are those of the optimizer on this rank's stage, reported by the first of its ranks and ``None`` elsewhere.
    """

    pieces: dict[str, ShardWrite] = field(default_factory=dict)
    others: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[ParamGroup] | None = None
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(piece.tensor.nbytes for piece in self.pieces.values())


@dataclass
class LocalState:
    """Tensors that a rank could write: unique to it, or replicated (with groups of replicas).

    ``ranks`` have the same part of the model as this one. ``buffers`` are plain buffers, which other stages may have
    too.
    """

    ranks: tuple[int, ...] = ()
    buffers: list[str] = field(default_factory=list)
    _layouts: dict[int, tuple[list[list[int]], bool, bool]] = field(default_factory=dict)
    mine: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    shared: dict[str, tuple[torch.Tensor, bool, list[list[int]]]] = field(default_factory=dict)
    share: SavePlan = field(default_factory=SavePlan)

    @property
    def own_bytes(self) -> int:
        """Bytes that only this rank has."""
        return sum(local_of(tensor).nbytes for tensor, _ in self.mine.values())

    @property
    def mark(self) -> int:
        """Hash of names, shapes and dtypes, which must be equal on all of ``ranks``."""
        alike = [n for n, (_, _, copies) in self.shared.items() if self.everywhere(copies)]
        lines = [f"{n} {tuple(self.shared[n][0].shape)} {self.shared[n][0].dtype}\n" for n in sorted(alike)]
        return zlib.crc32("".join(lines).encode())

    def everywhere(self, copies: list[list[int]]) -> bool:
        """Return whether every rank with this part of the model has some of these replicas."""
        return self._seen(copies)[2]

    def _seen(self, copies: list[list[int]]) -> tuple[list[list[int]], bool, bool]:
        """Return the replicas, whether the first is here, and whether all ranks have some; once for each layout."""
        found = self._layouts.get(id(copies))
        if found is None:
            found = copies, exchange.rank() in copies[0], sum(map(len, copies)) == len(self.ranks)
            self._layouts[id(copies)] = found
        return found

    def leave(self, owners: Mapping[str, int]) -> None:
        """Drop the buffers that another part of the model, on the ``owners``' ranks, writes."""
        here = exchange.rank()
        self.mine = {name: averaged for name, averaged in self.mine.items() if owners.get(name, here) == here}

    def add(self, name: str, tensor: torch.Tensor, copies: list[list[int]], *, steady: bool = True) -> None:
        """Register a tensor under the ranks that may write it.

        ``copies`` are the groups of ranks that each have all of it.
        """
        if len(copies) > 1:
            self.shared[name] = (tensor, steady, copies)
        elif self._seen(copies)[1]:
            self.mine[name] = (tensor, steady)


Average = Mapping[int, torch.Tensor]
"""Averages of weights, by the id of the weight and in its layout."""


def holdings_of(
    model: nn.Module, optimizer: Optimizer, rng: dict[str, torch.Tensor] | None, average: Average | None = None
) -> LocalState:
    """List everything this rank has of a model, its optimizer, its RNG states (uint8) and its averages.

    Not a collective.

    Raises:
        CheckpointError: a value cannot be stored.
        ModelError: as `slots_of`.
    """
    slots, ownership = slots_of(model), part_of(model)
    found = LocalState(ranks_of(ownership))
    first = found.ranks[0]
    for slot in slots:
        name = f"model/{slot.name}"
        if ownership is not None and slot.name in ownership.shared_from_stage:
            continue
        is_plain_buffer = slot.is_buffer and not isinstance(slot.tensor, DTensor)
        copies = [[first]] if is_plain_buffer else copies_of(slot.tensor, found.ranks)
        found.add(name, slot.tensor, copies, steady=not slot.is_buffer)
        if average is not None and (averaged := average.get(id(slot.tensor))) is not None:
            found.add(f"{AVERAGE}{slot.name}", averaged, copies)
        if is_plain_buffer and exchange.rank() == first:
            found.buffers.append(name)
        found.share.aliases |= {f"model/{alias}": name for alias in slot.aliases}
    if ownership is not None:  # all of them: rank 0 reports for the other stages too
        found.share.aliases = {f"model/{alias}": f"model/{name}" for alias, name in ownership.aliases.items()}
    _add_optimizer(found, optimizer, slots, ownership)
    for name, generator in (rng or {}).items():
        if generator.dtype != torch.uint8:
            raise CheckpointError(f"rng '{name}' is {generator.dtype}; give generator states as uint8 tensors")
        found.mine[f"rng/{exchange.rank()}/{name}"] = (generator, False)
    return found


def deal(local_state: LocalState, own_bytes: list[int], marks: list[int], *, spread: bool = False) -> SavePlan:
    """Build this rank's save plan from the bytes that only each rank has.

    Deterministic on all ranks. Large replicated tensors are split along their first dimension, one part per replica;
    small ones go to the replica with the least bytes, but tiny ones, if many ranks save (``spread``), to one of them.
    Tensors replicated on some ranks only (a tensor-parallel rank's own replicas) are assigned without regard to the
    rest, which only those ranks know. Ranks of another pipeline stage do not count.

    ``marks`` are every rank's `Holdings.mark`, or -1 of a rank whose inspection failed.

    Raises:
        CheckpointError: a mark differs from that of the first rank of this stage.
    """
    first = local_state.ranks[0]
    odd = [str(rank) for rank in local_state.ranks if marks[rank] != marks[first]]
    if odd and -1 not in marks:
        raise CheckpointError(
            f"ranks {', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''} have other unsharded tensors than rank "
            f"{first}: model and optimizer state that are not sharded must have the same names and shapes on every rank"
        )
    here = exchange.rank()
    all_loads: dict[str, list[int]] = defaultdict(lambda: list(own_bytes))
    dealers: dict[int, _Dealer] = {}
    share = local_state.share
    for name, (tensor, steady) in local_state.mine.items():
        share.pieces[name] = _piece(tensor, steady)
    for name in sorted(local_state.shared, key=lambda n: (-_all_bytes(local_state.shared[n][0]), n)):
        tensor, steady, copies = local_state.shared[name]
        if id(copies) not in dealers:
            loads = all_loads["" if local_state.everywhere(copies) else str(copies)]
            dealers[id(copies)] = _Dealer(copies, loads)
        dealer = dealers[id(copies)]
        if here == copies[0][0]:
            share.others[name] = (code_of(tensor), tuple(tensor.shape))
        parts = len(copies)
        rows = tensor.shape[0] // max(1, len(copies[0])) if tensor.dim() else 0
        if _all_bytes(tensor) >= SPLIT * parts and rows >= parts:
            mine = next((number for number, ranks in enumerate(copies) if here in ranks), None)
            if mine is not None:
                share.pieces[name] = _piece(tensor, steady, part=mine, parts=parts)
            for ranks in copies:
                for rank in ranks:
                    dealer.loads[rank] += _all_bytes(tensor) // (parts * len(ranks))
            continue
        chosen = dealer.choose(_all_bytes(tensor), together=spread and _all_bytes(tensor) <= TINY)
        if here in chosen:
            share.pieces[name] = _piece(tensor, steady)
    return share


class _Dealer:
    """Choice among the replicas of tensors that are laid out alike; ``loads`` are the bytes of each rank so far."""

    def __init__(self, copies: list[list[int]], loads: list[int]) -> None:
        self.loads = loads
        self._heap = [(max(loads[rank] for rank in group), group) for group in copies]
        heapq.heapify(self._heap)
        self._tiny: list[int] | None = None

    def choose(self, num_bytes: int, *, together: bool) -> list[int]:
        """Return the group of ranks with the least, which gets ``num_bytes``; ``together``: always the same."""
        if together and self._tiny is not None:
            return self._tiny
        heap, loads = self._heap, self.loads
        while (now := max(loads[rank] for rank in heap[0][1])) != heap[0][0]:  # loads only grow
            heapq.heapreplace(heap, (now, heap[0][1]))
        chosen = heap[0][1]
        for rank in chosen:
            loads[rank] += -(-num_bytes // len(chosen))
        if together:
            self._tiny = chosen
        return chosen


def _piece(tensor: torch.Tensor, steady: bool, part: int = 0, parts: int = 1) -> ShardWrite:
    """Return the local shard, or the ``part``-th of ``parts`` runs of its rows."""
    box, local = box_of(tensor), local_of(tensor)
    if parts > 1 and box.numel:
        begin, end = box.lengths[0] * part // parts, box.lengths[0] * (part + 1) // parts
        box = Box((box.offsets[0] + begin, *box.offsets[1:]), (end - begin, *box.lengths[1:]))
        local = local[begin:end]
    return ShardWrite(code_of(tensor), tuple(tensor.shape), box, local, tensor, steady)


def _add_optimizer(
    found: LocalState, optimizer: Optimizer, slots: list[Slot], ownership: StageOwnership | None
) -> None:
    names = {id(slot.tensor): slot.name for slot in slots}
    shared_from_stage = frozenset() if ownership is None else ownership.shared_from_stage
    groups: list[ParamGroup] = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = sum(id(parameter) not in names for parameter in group["params"])
        if unknown:
            raise CheckpointError(
                f"parameter group {number} of the optimizer has {unknown} parameters that the model does not; "
                "build the optimizer from the model's parameters after it is sharded"
            )
        options = {key: plain(value, f"optimizer option {key}") for key, value in group.items() if key != "params"}
        own = tuple(name for p in group["params"] if (name := names[id(p)]) not in shared_from_stage)
        groups.append(ParamGroup(params=own, options=options))
    found.share.groups = groups if exchange.rank() == found.ranks[0] else None
    engine = engine_of(optimizer)
    for group in engine.param_groups:
        for parameter in group["params"]:
            if names[id(parameter)] not in shared_from_stage:
                _add_state(found, names[id(parameter)], parameter, engine, spread=engine is not optimizer)


def _add_state(found: LocalState, of: str, parameter: torch.Tensor, engine: Optimizer, *, spread: bool) -> None:
    """Register the state of one parameter; ``spread``: only this rank has it."""
    for key, value in engine.state.get(parameter, {}).items():
        name = f"optimizer/{of}/{key}"
        if "/" in key:
            raise CheckpointError(f"{name}: a state key with a slash cannot be stored")
        if isinstance(value, torch.Tensor):
            _refuse_local(name, value, parameter)
            found.add(name, value, [[exchange.rank()]] if spread else copies_of(value, found.ranks))
        else:
            found.share.scalars.setdefault(of, {})[key] = plain(value, name)


def _refuse_local(name: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    """Reject a plain tensor with a shard's shape.

    It differs between ranks, and stored as one tensor it would be lost.
    """
    here, full = local_of(parameter).shape, parameter.shape
    is_plain = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    if is_plain and value.dim() and value.shape == here != full:
        raise CheckpointError(f"{name} is a plain tensor with the shape of the local shard; make it a DTensor")


def _all_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
