"""`load_weights`: fill a live, possibly sharded model from anybody's checkpoint, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from shardwise.checkpoint.layout import Box, Slot, box_of, local_of, part_of, slots_of, transient_names
from shardwise.checkpoint.shards import BUFFER, in_threads
from shardwise.checkpoint.sources.detect import open_source
from shardwise.checkpoint.sources.source import Source
from shardwise.checkpoint.storage import Folder
from shardwise.errors import ModelError, did_you_mean

_PREFIX = "model/"


def load_weights(model: nn.Module, source: str | Folder | Source) -> None:
    """Fill parameters and persistent buffers of ``model`` in place, each cast to the dtype it has in the model.

    ``source`` is anything that `open_source` knows: Hugging Face safetensors, a checkpoint of Shardwise's, PyTorch DCP,
    Accelerate, DeepSpeed, Lightning or a plain ``.pt``. Each rank reads only the slices that it holds; no rank talks
    to another. Of tied tensors one name is enough. Keys of the model's non-persistent buffers are skipped. Nothing is
    changed before all names and shapes were found to match.

    Raises:
        ModelError: a key is missing, unexpected or has another shape (all are listed).
        UserError: there are no such weights.
        CheckpointError: a file is damaged, or asks for code to be run.
    """
    with nullcontext(source) if isinstance(source, Source) else open_source(source) as opened:
        jobs = _match(model, opened)

        def fill(job: tuple[Slot, str]) -> None:
            _fill(job[0].tensor, job[1], opened)

        in_threads(fill, jobs)


def _match(model: nn.Module, source: Source) -> list[tuple[Slot, str]]:
    """Each slot with the name that it is read by."""
    slots = slots_of(model)
    where = {name.removeprefix(_PREFIX): name for name in source.tensors if name.startswith(_PREFIX)}
    where |= {name.removeprefix(_PREFIX): kept for name, kept in source.aliases.items() if name.startswith(_PREFIX)}
    skipped = transient_names(model)
    home = part_of(model)
    known = {name for slot in slots for name in slot.names}
    if home is not None:
        known |= {*home.names, *home.aliases}
    problems: list[str] = []
    jobs: list[tuple[Slot, str]] = []
    for slot in slots:
        present = [name for name in slot.names if name in where]
        if not present:
            tied = f" (nor its tied names {', '.join(slot.aliases)})" if slot.aliases else ""
            problems.append(f"{slot.name}{tied}: not in '{source.place}'{did_you_mean(slot.name, set(where) - known)}")
        for name in present:
            shape = source.tensors[where[name]].shape
            if shape != tuple(slot.tensor.shape):
                problems.append(f"{name}: {shape} in '{source.place}', {tuple(slot.tensor.shape)} in the model")
        if present:
            jobs.append((slot, where[present[0]]))
    unexpected = [name for name in where if name not in known and name not in skipped]
    problems += [f"{name}: in '{source.place}', not in the model" for name in unexpected]
    if problems:
        raise ModelError(*problems)
    return jobs


def _fill(tensor: torch.Tensor, name: str, source: Source) -> None:
    """Copy what is needed here, a few rows at a time."""
    here, local = box_of(tensor), local_of(tensor)
    if not here.numel:
        return
    with torch.no_grad():
        for part, rows in row_blocks(here, source.tensors[name].dtype.itemsize):
            local[rows].copy_(source.read(name, part))


def row_blocks(box: Box, itemsize: int) -> Iterator[tuple[Box, slice | tuple[()]]]:
    """Cut a box along its first dimension into parts of about 64 MiB, each with the rows of the box that it is."""
    if not box.lengths:
        yield box, ()
        return
    row_bytes = box.numel // box.lengths[0] * itemsize
    rows = max(1, BUFFER // max(1, row_bytes))
    for begin in range(0, box.lengths[0], rows):
        count = min(rows, box.lengths[0] - begin)
        part = Box((box.offsets[0] + begin, *box.offsets[1:]), (count, *box.lengths[1:]))
        yield part, slice(begin, begin + count)
