"""`load_weights`: fill a live, possibly sharded model from any supported checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import messages as exchange
from shardwise.checkpoint.engine_state import shadow_of
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.layout import Box, Slot, box_of, local_of, part_of, slots_of, transient_names
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.shard_files import BUFFER, in_threads
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.errors import ModelError, did_you_mean
from shardwise.model.read import clean_name
from shardwise.parallel.fp8 import forget_scales
from shardwise.parallel.lora.adapters import adapters_of

_PREFIX = "model/"


def load_weights(
    model: nn.Module, source: str | Folder | Source, *, verify: bool = True, collective: bool = False
) -> None:
    """Fill parameters and persistent buffers of ``model`` in place, cast to the model's dtypes.

    ``source`` is anything that `open_source` knows: Hugging Face safetensors, a Shardwise checkpoint, PyTorch DCP,
    Accelerate, DeepSpeed, Lightning or a plain ``.pt``. Each rank reads only its local slices; there is no
    communication, unless the model is an engine's. Of tied tensors one name is enough. Keys of the model's
    non-persistent buffers are skipped. Nothing is changed before all names and shapes were found to match. With
    ``verify`` the hashes of a Shardwise checkpoint are compared first, which reads it twice; other formats have none.
    If all ranks call it (``collective``) they share the work, and all raise what one finds.

    Raises:
        ModelError: a key is missing, unexpected or has another shape (the first are listed).
        UserError: there are no such weights.
        CheckpointError: a file is damaged, or asks for code to be run.
    """
    shadow = shadow_of(model, filled=False)
    if shadow is not None:  # of an engine: its rows are filled, then written to it
        load_weights(shadow.model, source, verify=verify, collective=collective)
        shadow.put_back(states=False)
        return
    with nullcontext(source) if isinstance(source, Source) else open_source(source) as opened:
        jobs = _match(model, opened)
        if verify:
            check_hashes(opened, collective=collective)

        def fill(job: tuple[Slot, str]) -> None:
            _fill(job[0].tensor, job[1], opened)

        in_threads(fill, jobs)
    forget_scales(model)


def check_hashes(source: Source, *, collective: bool) -> None:
    """Compare the weights of a Shardwise checkpoint with their saved hashes.

    Raises:
        CheckpointError: they differ; names files and tensors.
    """
    source = getattr(source, "inner", source)
    if not isinstance(source, OwnSource):
        return
    if collective:
        rank, ranks = exchange.rank(), exchange.world_size()
        exchange.together(lambda: source.check(prefix=_PREFIX, rank=rank, ranks=ranks))
    else:
        source.check(prefix=_PREFIX)


def _match(model: nn.Module, source: Source) -> list[tuple[Slot, str]]:
    """Match each slot to its name in the source."""
    ownership = part_of(model)
    others = set() if ownership is None else {*ownership.names, *ownership.aliases}
    return _matched(slots_of(model), source, transient_names(model), others)


def _matched(slots: list[Slot], source: Source, skipped: set[str], others: set[str]) -> list[tuple[Slot, str]]:
    where = {name.removeprefix(_PREFIX): name for name in source.tensors if name.startswith(_PREFIX)}
    where |= {name.removeprefix(_PREFIX): kept for name, kept in source.aliases.items() if name.startswith(_PREFIX)}
    known = others | {name for slot in slots for name in slot.names}
    missing: list[str] = []
    reshaped: list[str] = []
    jobs: list[tuple[Slot, str]] = []
    for slot in slots:
        present = [name for name in slot.names if name in where]
        if not present:
            tied = f" (nor its tied names {', '.join(slot.aliases)})" if slot.aliases else ""
            missing.append(f"{slot.name}{tied}: not in '{source.place}'{did_you_mean(slot.name, set(where) - known)}")
        for name in present:
            shape = source.tensors[where[name]].shape
            if shape != tuple(slot.tensor.shape):
                reshaped.append(f"{name}: {shape} in '{source.place}', {tuple(slot.tensor.shape)} in the model")
        if present:
            jobs.append((slot, where[present[0]]))
    unexpected = [f"{n}: in '{source.place}', not in the model" for n in where if n not in known and n not in skipped]
    # ten of each kind: many missing ones must not hide a shape or a name that tells whose weights these are
    problems = [
        line for kind in (reshaped, missing, unexpected) if kind for line in short_list(kind).strip().split("\n  ")
    ]
    if problems:
        raise ModelError(
            f"'{source.place}' is not of this model; give other weights, or the model that these were saved from: "
            f"{short_list(problems, len(problems))}"
        )
    return jobs


def _fill(tensor: torch.Tensor, name: str, source: Source) -> None:
    """Copy the local elements, a few rows at a time."""
    here, local = box_of(tensor), local_of(tensor)
    if not here.numel:
        return
    with torch.no_grad():
        for part, rows in row_blocks(here, source.tensors[name].dtype.itemsize):
            local[rows].copy_(source.read(name, part))


def row_blocks(box: Box, itemsize: int) -> Iterator[tuple[Box, slice | tuple[()]]]:
    """Split a box along its first dimension into blocks of about 64 MiB.

    Each with its slice of the box's rows.
    """
    if not box.lengths:
        yield box, ()
        return
    row_bytes = box.numel // box.lengths[0] * itemsize
    rows = max(1, BUFFER // max(1, row_bytes))
    for begin in range(0, box.lengths[0], rows):
        count = min(rows, box.lengths[0] - begin)
        part = Box((box.offsets[0] + begin, *box.offsets[1:]), (count, *box.lengths[1:]))
        yield part, slice(begin, begin + count)


class BaseWeights:
    """Load the frozen base weights unit by unit, as full tensors, from any supported checkpoint.

    For a base that is quantized or sharded right after. All names and shapes are matched at once, while the model is on
    the meta device; adapters are not touched, and what is trained in full beside them begins with its weights.
    ``verify`` and ``collective`` are those of `load_weights`.

    Raises:
        ModelError, UserError, CheckpointError: as `load_weights`.
    """

    def __init__(
        self, model: nn.Module, source: str | Folder | Source, *, verify: bool = True, collective: bool = False
    ) -> None:
        self._open = ExitStack()
        opened = source if isinstance(source, Source) else open_source(source)
        self._source = self._open.enter_context(opened)
        self._places: dict[tuple[int, str], str] = {}
        names: dict[int, list[str]] = defaultdict(list)
        where: dict[int, list[tuple[int, str]]] = defaultdict(list)
        slots: dict[int, torch.Tensor] = {}
        adapters = adapters_of(model)
        ids = {id(p) for name, p in model.named_parameters() if adapters and clean_name(name) in adapters.in_full}
        for owner_name, owner in model.named_modules():
            kept = {k: b for k, b in owner._buffers.items() if k not in owner._non_persistent_buffers_set}
            tensors = {k: p for k, p in owner._parameters.items() if p is not None}
            base = {k: p for k, p in tensors.items() if not p.requires_grad or id(p) in ids}
            for local, tensor in (*base.items(), *kept.items()):
                if tensor is not None:
                    names[id(tensor)].append(clean_name(f"{owner_name}.{local}" if owner_name else local))
                    where[id(tensor)].append((id(owner), local))
                    slots[id(tensor)] = tensor
        listed = [Slot(found[0], tuple(found[1:]), slots[key], False) for key, found in names.items()]
        try:
            jobs = _matched(listed, self._source, transient_names(model), set())
            if verify:
                check_hashes(self._source, collective=collective)
        except BaseException:
            self._open.close()
            raise
        for slot, name in jobs:
            self._places.update(dict.fromkeys(where[id(slot.tensor)], name))
        self.digest = base_digest(self._source, [name for _, name in jobs])

    def __call__(self, unit: nn.Module) -> None:
        """Fill the frozen, unsharded tensors of ``unit``."""
        jobs = []
        for owner in unit.modules():
            for tensors in (owner._parameters, owner._buffers):
                for local, tensor in tensors.items():
                    name = self._places.pop((id(owner), local), None)
                    if name is not None and tensor is not None and not isinstance(tensor, DTensor):
                        jobs.append((tensor, name))
        in_threads(lambda job: _fill(job[0], job[1], self._source), jobs)

    def close(self) -> None:
        """Close the source."""
        self._open.close()


_SAMPLED = 1024


def base_digest(source: Source, names: Sequence[str]) -> str:
    """Fingerprint of a base: names, shapes, dtypes, and about 1 kB of each tensor.

    Sixteen hex digits. It detects another base, also one that was trained further; not a single changed value.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(names):
        entry = source.tensors[name]
        digest.update(f"{name.removeprefix(_PREFIX)} {tuple(entry.shape)} {entry.dtype}".encode())
        if not all(entry.shape):
            continue
        lengths = [1] * (len(entry.shape) - 1) + [min(_SAMPLED // entry.dtype.itemsize, entry.shape[-1])]
        lengths = lengths if entry.shape else []
        box = Box(tuple((size - n) // 2 for size, n in zip(entry.shape, lengths, strict=True)), tuple(lengths))
        digest.update(source.read(name, box).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
