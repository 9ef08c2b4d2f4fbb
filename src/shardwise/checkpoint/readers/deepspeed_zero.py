"""Locate tensors in the flat partitions of DeepSpeed's ZeRO, and read boxes of them.

Stages 1 and 2 concatenate the parameters of a group and split the result into one partition per rank, with the padding
at the end. Stage 3 shards each parameter separately: every rank has an equal part of it, the last of them padded, and a
partition concatenates one rank's parts. Optimizer state is laid out as the partitions.

Every rank also records the offsets of parameters in its partitions (``param_slice_mappings``). They are not used:
DeepSpeed 0.19.8 records wrong offsets with ``round_robin_gradients``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.restricted import StoredTensor
from shardwise.checkpoint.readers.torch_file import TorchFile
from shardwise.checkpoint.storage.local_storage import CHUNK
from shardwise.errors import CheckpointError

ALIGNMENT = 2  # stages 1 and 2: the length of a group is a multiple of this many elements per rank
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PartitionRange:
    """Range of ``length`` elements from ``begin`` in partition ``flat`` of ``rank``."""

    rank: int
    flat: int
    begin: int
    length: int


@dataclass(frozen=True)
class TensorRange:
    """Range of ``length`` elements from ``begin`` in a 1-d stored tensor."""

    file: TorchFile
    stored: StoredTensor
    begin: int
    length: int


@dataclass(frozen=True)
class Flat:
    """Tensor whose elements, row after row, are the concatenated ``runs``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: tuple[TensorRange, ...]

    @property
    def info(self) -> TensorInfo:
        """Dtype and shape."""
        return TensorInfo(self.dtype, self.shape)

    def read(self, box: Box) -> torch.Tensor:
        """See `Source.read`.

        If the box is split along a later dimension, full rows are read, some at a time.
        """
        found = torch.empty(box.lengths, dtype=self.dtype)
        if found.numel() == 0:
            return found
        row = math.prod(self.shape[1:])
        if box.lengths[1:] == self.shape[1:]:
            self._fill(found.view(-1), box.offsets[0] * row if self.shape else 0)
            return found
        inner = tuple(slice(o, o + n) for o, n in zip(box.offsets[1:], box.lengths[1:], strict=True))
        step = max(1, CHUNK // (row * self.dtype.itemsize))
        rows = torch.empty((min(step, box.lengths[0]), *self.shape[1:]), dtype=self.dtype)
        for begin in range(0, box.lengths[0], step):
            some = rows[: box.lengths[0] - begin]
            self._fill(some.view(-1), (box.offsets[0] + begin) * row)
            found[begin : begin + len(some)] = some[(slice(None), *inner)]
        return found

    def _fill(self, target: torch.Tensor, begin: int) -> None:
        """Copy the elements from ``begin`` into ``target``, at most `CHUNK` at a time."""
        place, end = 0, begin + target.numel()
        step = CHUNK // self.dtype.itemsize
        for run in self.runs:
            low, high = max(place, begin), min(place + run.length, end)
            for at in range(low, high, step):
                count = min(step, high - at)
                piece = Box((run.begin + at - place,), (count,))
                target[at - begin : at - begin + count] = run.file.read(run.stored, piece)
            place += run.length


@dataclass(frozen=True)
class Partition:
    """Contents of one rank's optimizer file.

    ``masters`` and ``states`` have an entry for each flat partition, ``groups`` one for each parameter group: its
    options (empty where the file has none) and how many flat partitions belong to it. ``step`` counts the optimizer's
    steps; ``None`` where it does not.
    """

    file: TorchFile
    name: str
    masters: tuple[StoredTensor, ...]
    states: tuple[Mapping[str, Any], ...]
    groups: tuple[tuple[Mapping[str, Any], int], ...]
    step: float | None


def read_partition(file: TorchFile, name: str) -> Partition:
    """Parse the content of an ``…_optim_states.pt``.

    Raises:
        CheckpointError: it is not in DeepSpeed's format.
    """
    content = file.content.get("optimizer_state_dict") if isinstance(file.content, dict) else None
    if not isinstance(content, dict):
        raise CheckpointError(f"'{name}' has no 'optimizer_state_dict'; DeepSpeed did not write it")
    masters = content.get("fp32_flat_groups", content.get("single_partition_of_fp32_groups"))
    if not isinstance(masters, list) or not all(map(is_flat, masters)):
        raise CheckpointError(f"'{name}' has no flat fp32 weights; it was written by a DeepSpeed that is too old")
    states, groups = _base(content, name, len(masters))
    step = read_number(file, states[0].get("step")) if states else None
    return Partition(file, name, tuple(masters), states, groups, step)


def read_number(file: TorchFile, value: Any) -> float | int | None:
    """Return a number, or that of a one-element tensor; ``None`` for anything else."""
    if isinstance(value, StoredTensor) and value.numel == 1:
        number: float | int = file.read(value, Box((0,) * len(value.shape), value.shape)).item()
        return number
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_flat(value: Any) -> bool:
    """Return whether it is a contiguous stored tensor of one dimension."""
    return isinstance(value, StoredTensor) and len(value.shape) == 1 and (value.stride == (1,) or value.shape[0] < 2)


def _base(
    content: Mapping[str, Any], name: str, flats: int
) -> tuple[tuple[Mapping[str, Any], ...], tuple[tuple[Mapping[str, Any], int], ...]]:
    """Return the state by flat partition, and the groups.

    Older versions count steps by group and not in the state.
    """
    base = content.get("base_optimizer_state", content.get("optimizer_state_dict"))
    if isinstance(base, list) and len(base) == flats and all(isinstance(state, dict) for state in base):
        steps = [content.get("base_optimizer_state_step")] * flats
        groups: list[tuple[Mapping[str, Any], int]] = [({}, 1)] * flats  # stages 1 and 2 have one partition for each
        states = base
    elif isinstance(base, dict) and isinstance(base.get("state"), dict) and isinstance(base.get("param_groups"), list):
        groups = [(group, len(group["params"])) for group in base["param_groups"]]
        steps = [group.get("step") for group, count in groups for _ in range(count)]
        states = [base["state"].get(number) or {} for group, _ in groups for number in group["params"]]
    else:
        steps, states, groups = [], [], []
    if len(states) != flats:
        raise CheckpointError(f"'{name}' holds {flats} flat partitions, and {len(states)} states of the optimizer")
    full = ({"step": step, **state} if state else state for state, step in zip(states, steps, strict=True))
    return tuple(full), tuple(groups)


def spans_of(
    stage: int, shapes: Sequence[Shapes], paddings: Sequence[Sequence[int]] | None, partitions: Sequence[Partition]
) -> dict[str, list[PartitionRange]]:
    """Locate each parameter's elements; ``shapes`` are in the order of each flat partition.

    ``paddings`` are the unused elements after each parameter (stages 1 and 2).

    Raises:
        CheckpointError: the lengths of the partitions do not match the shapes,
    """
    for partition in partitions:
        if len(partition.masters) != len(shapes):
            raise CheckpointError(
                f"'{partition.name}' holds {len(partition.masters)} flat partitions, the model's file describes "
                f"{len(shapes)}; the files are of different checkpoints"
            )
    found: dict[str, list[PartitionRange]] = {}
    for flat, parameters in enumerate(shapes):
        if stage == 3:
            found |= _split_by_parameter(flat, parameters, partitions)
        else:
            free = list(paddings[flat]) if paddings is not None else [0] * len(parameters)
            found |= _split_as_one(flat, parameters, free, partitions)
    return found


def _split_as_one(
    flat: int, parameters: Shapes, free: Sequence[int], partitions: Sequence[Partition]
) -> dict[str, list[PartitionRange]]:
    lengths = [partition.masters[flat].shape[0] for partition in partitions]
    total = sum(map(math.prod, parameters.values())) + sum(free[:-1])
    last = max((rank for rank, length in enumerate(lengths) if length), default=0)
    uneven = [rank for rank in range(last) if lengths[rank] != lengths[0]]
    if (
        len(free) != len(parameters)
        or min(free, default=0) < 0
        or uneven
        or not 0 <= sum(lengths) - total < ALIGNMENT * len(partitions)
    ):
        raise _wrong_length(flat, partitions, f"{total} together, split evenly,")
    starts = [lengths[0] * rank for rank in range(len(partitions))]
    found: dict[str, list[PartitionRange]] = {}
    place = 0
    for (name, shape), gap in zip(parameters.items(), free, strict=True):
        end = place + math.prod(shape)
        found[name] = [
            PartitionRange(rank, flat, max(place, start) - start, min(end, start + length) - max(place, start))
            for rank, (start, length) in enumerate(zip(starts, lengths, strict=True))
            if max(place, start) < min(end, start + length)
        ]
        place = end + gap
    return found


def _split_by_parameter(
    flat: int, parameters: Shapes, partitions: Sequence[Partition]
) -> dict[str, list[PartitionRange]]:
    world = len(partitions)
    parts = {name: -(-math.prod(shape) // world) for name, shape in parameters.items()}
    if any(partition.masters[flat].shape[0] != sum(parts.values()) for partition in partitions):
        raise _wrong_length(flat, partitions, f"{sum(parts.values())} each")
    found: dict[str, list[PartitionRange]] = {}
    place = 0
    for name, shape in parameters.items():
        found[name] = spans_of_parts(flat, place, math.prod(shape), world)
        place += parts[name]
    return found


def spans_of_parts(flat: int, begin: int, numel: int, world: int) -> list[PartitionRange]:
    """Split one parameter into equal parts at one offset on every rank, without padding."""
    part = -(-numel // world)
    ranges = [(rank, min(part, numel - rank * part)) for rank in range(world)]
    return [PartitionRange(rank, flat, begin, length) for rank, length in ranges if length > 0]


def _wrong_length(flat: int, partitions: Sequence[Partition], needed: str) -> CheckpointError:
    ranges = ", ".join(f"{partition.masters[flat].shape[0]} in '{partition.name}'" for partition in partitions[:4])
    more = f" and {len(partitions) - 4} more" if len(partitions) > 4 else ""
    return CheckpointError(
        f"flat partition {flat} has {ranges}{more} elements; the parameters of the model's file need {needed} for "
        f"{len(partitions)} ranks; the files are of different checkpoints, or DeepSpeed laid them out in another way"
    )


def flat_tensor(
    shape: tuple[int, ...], spans: Sequence[PartitionRange], files: Sequence[tuple[TorchFile, Any]]
) -> Flat | None:
    """Build a tensor of ``spans`` from each rank's partition; ``None`` if one is not flat.

    A partition may be longer than the spans (padding).
    """
    dtype = getattr(files[0][1], "dtype", None)
    if sum(span.length for span in spans) != math.prod(shape):
        return None
    for span in spans:
        stored = files[span.rank][1]
        if not is_flat(stored) or stored.dtype != dtype or stored.shape[0] < span.begin + span.length:
            return None
    runs = (TensorRange(*files[span.rank], span.begin, span.length) for span in spans)
    return Flat(dtype, shape, tuple(runs)) if dtype is not None else None
