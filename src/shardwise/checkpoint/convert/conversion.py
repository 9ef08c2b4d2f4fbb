"""Convert a checkpoint, block by block, to a Hugging Face, peft or Shardwise folder.

Memory is needed for a few blocks, whatever the size of the tensors. On a disk everything is written to a folder beside
the target, which is renamed to the target when all is written and checked.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.commit import LOCK, FolderLock, begin, commit, move_latest
from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.format import (
    Manifest,
    OptimizerEntry,
    ParamGroup,
    Shard,
    TensorEntry,
    short_list,
    step_folder,
)
from shardwise.checkpoint.matching import MODEL, Selection, TargetTensor
from shardwise.checkpoint.readers.huggingface import CONFIG, INDEX, SINGLE
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.save_report import versions
from shardwise.checkpoint.shard_files import TensorFile, in_threads
from shardwise.checkpoint.storage.local_storage import (
    Folder,
    free_bytes,
    remove_folder,
    rename_folder,
    sync_folder,
    write_small,
)
from shardwise.errors import CheckpointError, ModelError, UserError
from shardwise.units import MIB, bytes_text

To = Literal["hf", "shardwise", "peft"]
Result = TypeVar("Result")
LOCAL, REMOTE = (4 * MIB, 4), (16 * MIB, 4)  # bytes of a block, and threads
ADAPTER_FILE, ADAPTERS = "adapter_model.safetensors", "adapter_config.json"
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class Progress(Protocol):
    """Progress callback; called from several threads."""

    def begin(self, what: str, num_bytes: int) -> None:
        """Start a new phase of ``num_bytes``."""

    def tick(self, num_bytes: int) -> None:
        """Report ``num_bytes`` more as done."""


@dataclass(frozen=True)
class Extras:
    """Files and metadata beside the weights.

    Attributes:
        config: ``config.json`` of a Hugging Face folder, ``adapter_config.json`` of peft's.
        files: files to copy into a Hugging Face folder as they are.
        model: how the model is built, for `Manifest.model`.
    """

    config: Mapping[str, Any] | None = None
    files: Sequence[Folder] = ()
    model: dict[str, Any] | None = None


@dataclass(frozen=True)
class Written:
    """Converted output: its path (for Shardwise, the checkpoint's), number of files and bytes."""

    place: Folder
    files: int
    num_bytes: int


@dataclass(frozen=True)
class Deviation:
    """Difference of a tensor: in values, and relative to the tensor's largest value."""

    name: str
    difference: float
    relative: float


@dataclass
class _File:
    """Output file: for each tensor in it the item and the box."""

    name: str
    pieces: list[tuple[TargetTensor, Box]] = field(default_factory=list)


def convert(
    source: Source,
    selection: Selection,
    target: Folder,
    *,
    to: To,
    max_shard_bytes: int,
    extras: Extras,
    progress: Progress,
    check: Callable[[Folder], Result],
) -> tuple[Written, Result]:
    """Write ``selection`` of ``source`` to ``target``, which must not exist or be empty.

    ``check`` is called with the written folder, on a disk before its final rename; an exception removes everything, and
    its result is returned.

    Raises:
        UserError: the target is taken, may not be written to, or a value does not fit into the requested dtype.
        ModelError: tensors that the model ties have different values in the source.
        CheckpointError: the source is damaged, or the target cannot be written (no space).
    """
    target = target.resolve() if isinstance(target, Path) else target
    refuse_taken(target)
    _check_room(target, selection.num_bytes)
    _check_ties(source, selection)
    files = _dealt(selection, max_shard_bytes, to)
    with _working_folder(target, selection.num_bytes) as working:
        progress.begin("writing", selection.num_bytes)
        if to != "shardwise":
            place = _write_hugging_face(source, files, working, extras, progress, ADAPTERS if to == "peft" else CONFIG)
        else:
            place = _write_own(source, selection, files, working, extras, progress)
        result = check(place)
    made = target / place.name if to == "shardwise" else target
    return Written(made, len(files), selection.num_bytes), result


def row_boxes(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Yield consecutive boxes of at most ``limit`` bytes (or one element) that cover the tensor."""
    if not math.prod(shape):
        return
    inner = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]  # bytes per index of an axis
    if not shape:
        yield Box((), ())
        return
    split_axis = next(axis for axis in range(len(shape)) if inner[axis] <= limit or axis == len(shape) - 1)
    rows = max(1, limit // inner[split_axis])
    for index in itertools.product(*map(range, shape[:split_axis])):
        for start in range(0, shape[split_axis], rows):
            count = min(rows, shape[split_axis] - start)
            rest = shape[split_axis + 1 :]
            yield Box((*index, start, *(0,) * len(rest)), (*(1,) * split_axis, count, *rest))


def pace(*sources: Source) -> tuple[int, int]:
    """Return bytes per block and number of threads for reading; a source may limit its threads."""
    block, threads = REMOTE if any("://" in source.place for source in sources) else LOCAL
    return block, min(int(getattr(source, "threads", threads)) for source in sources)


def read_back(source: Source, selection: Selection, written: Source, progress: Progress) -> list[Deviation]:
    """Compare every written tensor with the source's, bit by bit; list differences, worst first."""
    found: list[Deviation] = []
    lost = [item.name for item in selection.items if item.name not in written.tensors]
    if lost:
        raise CheckpointError(f"'{written.place}' lacks what was written to it: {short_list(lost)}")
    progress.begin("reading back", selection.num_bytes)
    block, threads = pace(source, written)

    def compare(item: TargetTensor) -> None:
        difference, largest, equal = 0.0, 0.0, True
        for box in row_boxes(item.info.shape, item.info.dtype.itemsize, block):
            wanted = source.read(item.origin, box).to(item.info.dtype)
            there = written.read(item.name, box)
            if there.dtype != wanted.dtype or not _same_bits(there, wanted):
                equal = False
                difference = max(difference, _apart(there, wanted))
            largest = max(largest, float(wanted.abs().max()) if wanted.dtype.is_floating_point else 0.0)
            progress.tick(wanted.nbytes)
        if not equal:
            found.append(Deviation(item.name, difference, difference / largest if largest else math.inf))

    in_threads(compare, sorted(selection.items, key=lambda item: -item.info.num_bytes), threads)
    return sorted(found, key=lambda deviation: -deviation.relative)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    difference = (one.to(torch.float64) - other.to(torch.float64)).abs().max()
    return math.inf if difference.isnan() else float(difference)


def refuse_taken(target: Folder) -> None:
    """Reject an existing target; nothing is ever overwritten.

    Raises:
        UserError: ``target`` already exists.
    """
    if target.is_file():
        raise UserError(f"'{target}' is a file; give a folder that does not exist yet")
    if target.is_dir() and next(iter(target.iterdir()), None) is not None:
        raise UserError(f"'{target}' is there and not empty; give a folder that does not exist yet")


def _check_room(target: Folder, needed: int) -> None:
    near = next((folder for folder in [target, *target.parents] if folder.is_dir()), target)
    free = free_bytes(near)
    if free is not None and free < needed:
        raise CheckpointError(
            f"'{target}': the conversion needs {bytes_text(needed)} and {bytes_text(free)} are free there; make room, "
            "or choose a folder on another disk"
        )


def _check_ties(source: Source, selection: Selection) -> None:
    for one, other in selection.equal:
        info = source.tensors[f"{MODEL}{one}"]
        for box in row_boxes(info.shape, info.dtype.itemsize, pace(source)[0]):
            if not _same_bits(source.read(f"{MODEL}{one}", box), source.read(f"{MODEL}{other}", box)):
                raise ModelError(
                    f"{one} and {other} are one tensor in the model but have different values in '{source.place}'; "
                    "give a model that does not tie them (tie_word_embeddings: false); nothing was written"
                )


def _dealt(selection: Selection, limit: int, to: To) -> list[_File]:
    """Assign tensors to files of at most ``limit`` bytes, in order.

    A larger tensor is split, or alone in its file where that is impossible. Of adapters there is one file.
    """
    if to == "peft":
        return [_File(ADAPTER_FILE, [(item, item.info.full) for item in selection.items])]
    files: list[_File] = []
    room = 0
    for item in selection.items:
        itemsize = item.info.dtype.itemsize
        split_axis = to == "shardwise" and item.info.num_bytes > limit
        boxes = list(row_boxes(item.info.shape, itemsize, limit)) if split_axis else [item.info.full]
        for box in boxes:
            size = box.numel * itemsize
            if not files or size > room:
                files.append(_File(""))
                room = limit
            files[-1].pieces.append((item, box))
            room -= size
    if to == "shardwise":
        names = [f"part-{number:05d}.safetensors" for number in range(len(files))]
    elif len(files) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.name = name
    return files


@contextlib.contextmanager
def _working_folder(target: Folder, needed: int) -> Iterator[Folder]:
    """Create a folder that becomes ``target`` at the end, or is removed on an error."""
    working = target.with_name(f".tmp-{target.name}") if isinstance(target, Path) else target
    lock: FolderLock | None = None
    try:
        working.mkdir(parents=True, exist_ok=True)
        if isinstance(working, Path):
            lock = FolderLock(working)
            for stale in working.iterdir():  # from a conversion that was killed
                if stale.name != LOCK:
                    remove_folder(stale) if stale.is_dir() else stale.unlink()
        yield working
        if isinstance(working, Path) and isinstance(target, Path):
            (working / LOCK).unlink()
            sync_folder(working)
            rename_folder(working, target)
    except BaseException as error:
        if lock is not None or not isinstance(working, Path):
            with contextlib.suppress(OSError):
                remove_folder(working if working.exists() else target)
        if isinstance(error, OSError):
            raise _plain(error, target, needed) from None
        raise
    finally:
        if lock is not None:
            lock.release()


def _plain(error: OSError, target: Folder, needed: int) -> UserError | CheckpointError:
    why = error.strerror or str(error)
    if error.errno in _NOT_ALLOWED:
        return UserError(f"'{target}' cannot be written: {why}; choose a folder that you may write to")
    near = next((folder for folder in [target, *target.parents] if folder.is_dir()), target)
    return CheckpointError(
        f"'{target}' could not be written: {why}; the conversion needs {bytes_text(needed)}, and "
        f"{bytes_text(free_bytes(near))} are free; make room or choose a folder on another disk. Nothing is left of it."
    )


def _write_hugging_face(
    source: Source, files: list[_File], folder: Folder, extras: Extras, progress: Progress, config: str
) -> Folder:
    places: dict[str, str] = {}
    size = numel = 0
    for file in files:
        _write_file(source, file, folder / file.name, progress, {"format": "pt"}, strip=MODEL)
        for item, box in file.pieces:
            places[item.name.removeprefix(MODEL)] = file.name
            size += item.info.num_bytes
            numel += box.numel
    for other in extras.files:
        write_small(folder / other.name, other.read_bytes())
    if extras.config is not None:
        write_small(folder / config, _json(extras.config))
    if len(files) > 1:  # last: without it a folder of shards is not a checkpoint
        index = {"metadata": {"total_parameters": numel, "total_size": size}, "weight_map": places}
        write_small(folder / INDEX, _json(index))
    return folder


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _write_own(
    source: Source, selection: Selection, files: list[_File], folder: Folder, extras: Extras, progress: Progress
) -> Folder:
    step = source.step or 0
    working = begin(folder, step)
    shards: dict[str, list[Shard]] = {item.name: [] for item in selection.items}
    for file in files:
        hashes = _write_file(source, file, working / file.name, progress, {}, strip="")
        for item, box in file.pieces:
            if box.numel:
                made = hashes[item.name, box]
                shard = Shard(file=file.name, key=item.name, offsets=box.offsets, lengths=box.lengths, hash=made)
                shards[item.name].append(shard)
    tensors = {
        item.name: TensorEntry(dtype=CODES[item.info.dtype], shape=item.info.shape, shards=tuple(shards[item.name]))
        for item in selection.items
    }
    target = folder / step_folder(step)
    commit(working, target, _manifest(source, selection, tensors, extras.model))
    move_latest(folder, target)
    return target


def _write_file(
    source: Source, file: _File, path: Folder, progress: Progress, metadata: Mapping[str, str], strip: str
) -> dict[tuple[str, Box], str]:
    """Write one safetensors file and return the hashes; removes ``strip`` from its names."""
    pieces = {item.name.removeprefix(strip): (item, box) for item, box in file.pieces}
    entries = {key: (CODES[item.info.dtype], box.lengths) for key, (item, box) in pieces.items()}
    hashes: dict[tuple[str, Box], str] = {}
    with TensorFile(path, entries, metadata) as out:

        def put(key: str) -> None:
            item, box = pieces[key]
            hashes[item.name, box] = out.put(key, _blocks(source, item, box, progress))

        in_threads(put, out.order, pace(source)[1] if out.parallel else 1)
    return hashes


def _blocks(source: Source, item: TargetTensor, box: Box, progress: Progress) -> Iterator[torch.Tensor]:
    """Yield the elements of ``box`` as stored, a block at a time."""
    widest = max(item.info.dtype.itemsize, source.tensors[item.origin].dtype.itemsize)
    for part in row_boxes(box.lengths, widest, pace(source)[0]):
        offsets = tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True))
        found = source.read(item.origin, Box(offsets, part.lengths))
        made = found.to(item.info.dtype)
        if made is not found and made.isinf().sum() != found.isinf().sum():
            largest = float(found[found.isfinite()].abs().max())
            raise UserError(
                f"{item.name} holds {largest:.3g}, and {str(made.dtype).removeprefix('torch.')} ends at "
                f"{torch.finfo(made.dtype).max:.3g}; use --dtype bf16 or fp32"
            )
        progress.tick(made.nbytes)
        yield made


def _manifest(
    source: Source, selection: Selection, tensors: dict[str, TensorEntry], model: dict[str, Any] | None
) -> Manifest:
    own = source.manifest if isinstance(source, OwnSource) else None
    full = any(not item.name.startswith(MODEL) for item in selection.items)  # a run can resume from it
    return Manifest(
        step=source.step or 0,
        plan=own.plan if own else {},
        plan_fingerprint=own.plan_fingerprint if own else "",
        versions=versions(),
        ranks=own.ranks if own else 1,
        tensors=tensors,
        aliases=dict(selection.aliases),
        optimizer=_optimizer(source, selection) if full else OptimizerEntry(name="none"),
        state=own.state if own and full else {},
        model=model,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _optimizer(source: Source, selection: Selection) -> OptimizerEntry:
    if source.optimizer is None:
        return OptimizerEntry(name="unknown")
    saved = OptimizerEntry.model_validate(source.optimizer)
    names = selection.renamed
    groups = tuple(ParamGroup(params=tuple(names.get(p, p) for p in g.params), options=g.options) for g in saved.groups)
    return OptimizerEntry(
        name=saved.name, groups=groups, state={names.get(name, name): values for name, values in saved.state.items()}
    )
