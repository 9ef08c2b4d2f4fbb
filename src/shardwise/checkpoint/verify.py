"""Is every byte of a checkpoint what was saved, and is it a whole? Reads all of it, by several threads."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from shardwise.checkpoint.format import MANIFEST, Manifest, Shard, TensorEntry, no_collector, read_manifest
from shardwise.checkpoint.inspect import (
    OTHER,
    Damage,
    damaged_files,
    find_own,
    plain_fault,
    shards_by_file,
    unreadable,
)
from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.shards import ShardReader
from shardwise.checkpoint.sources.detect import open_source
from shardwise.checkpoint.sources.source import Source, TensorInfo
from shardwise.checkpoint.storage import MIB, Folder, file_sizes, folder_of, is_local
from shardwise.errors import CheckpointError

LOCAL_THREADS, REMOTE_THREADS = 4, 8
BATCH = 64 * MIB  # bytes of small shards that one thread takes at once
BLOCK = 64 * MIB  # bytes of a tensor of another tool's that are in memory at once

Told = Callable[[int], None]  # a number of bytes


@dataclass(frozen=True)
class Verification:
    """What was read and what is wrong.

    ``hashed``: the bytes were compared with hashes; other tools' formats have none, and were only read.
    """

    kind: str
    place: str
    hashed: bool
    step: int | None = None
    tensors: int = 0
    files: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    damage: Sequence[Damage] = ()
    notes: Sequence[str] = ()


def _nobody(num_bytes: int) -> None:
    """Listens to no progress."""


@no_collector()
def verify_checkpoint(place: str | Folder, begin: Told = _nobody, tick: Told = _nobody) -> Verification:
    """Read every byte of the checkpoint at ``place`` and compare the hashes; see `inspect_checkpoint` for ``place``.

    Also checked: the shards of a tensor cover it exactly once, aliases lead to tensors, and the optimizer speaks of
    parameters that there are. ``begin`` is told how many bytes there are, ``tick``, from several threads, how many
    more were read.

    Raises:
        UserError: there is nothing that is known.
        CheckpointError: a server does not answer.
    """
    started = time.perf_counter()
    own = find_own(folder_of(place))
    if own is None:
        return _verify_source(place, begin, tick, started)
    kind = "Shardwise checkpoint"
    try:
        manifest = read_manifest(own)
    except CheckpointError as error:
        return Verification(kind, str(own), True, damage=[Damage(MANIFEST, plain_fault(own / MANIFEST, error))])
    files, sizes = shards_by_file(manifest), file_sizes(own)
    damage = [*structure_faults(manifest), *damaged_files(own, files, sizes)]
    broken = {one.file for one in damage}
    whole = {name: shards for name, shards in files.items() if name not in broken}
    begin(sum(num_bytes for shards in whole.values() for _, num_bytes in shards))
    damage += _wrong_shards(own, whole, tick)
    return Verification(
        kind,
        str(own),
        True,
        manifest.step,
        len(manifest.tensors),
        len(files),
        sum(num_bytes for shards in files.values() for _, num_bytes in shards),
        time.perf_counter() - started,
        damage,
    )


def structure_faults(manifest: Manifest) -> list[Damage]:
    """What in a manifest contradicts itself: tensors that are not covered exactly once, names that lead nowhere."""
    faults = []
    for name, entry in manifest.tensors.items():
        if fault := coverage_fault(entry):
            faults.append(Damage(MANIFEST, fault, (name,)))
    twice = sorted(name for name in manifest.aliases if name in manifest.tensors)
    if twice:
        faults.append(Damage(MANIFEST, "tied names that are stored on their own, too", tuple(twice)))
    return faults + _optimizer_faults(manifest)


def coverage_fault(entry: TensorEntry) -> str | None:
    """Why the shards of a tensor, all inside of it, do not cover it exactly once; ``None`` where they do."""
    shards = entry.shards
    if not math.prod(entry.shape):
        return None
    if len(shards) == 1 and shards[0].lengths == entry.shape:
        return None
    whole = Box((0,) * len(entry.shape), entry.shape)
    return _fault_in(whole, [(Box(shard.offsets, shard.lengths), shard) for shard in shards])


def _fault_in(region: Box, parts: list[tuple[Box, Shard]]) -> str | None:
    """What is wrong inside of a region, given the parts of the shards that lie in it.

    A region is cut where shards begin or end until nothing is left to cut: then it must be one shard's.
    """
    cut = _best_cut(region, [box for box, _ in parts])
    if cut is None:
        if len(parts) == 1:
            return None
        if parts:
            first, second = (f"'{shard.key}' in {shard.file} at {list(shard.offsets)}" for _, shard in parts[:2])
            return f"shards overlap: {first} and {second}"
        return f"no shard holds the elements from {list(region.offsets)} on, {list(region.lengths)} of them"
    axis, places = cut
    if len(places) + 1 == len(parts):  # slices of one dimension, in any order: the usual case, and done by sorting
        ordered = sorted((box.offsets[axis], box.offsets[axis] + box.lengths[axis]) for box, _ in parts)
        begin, end = region.offsets[axis], region.offsets[axis] + region.lengths[axis]
        if ordered == list(zip([begin, *places], [*places, end], strict=True)):
            return None  # were one narrower elsewhere, the elements would not add up, or others overlap
    middle = places[len(places) // 2]
    for low, high in ((region.offsets[axis], middle), (middle, region.offsets[axis] + region.lengths[axis])):
        inner = [(clipped, shard) for box, shard in parts if (clipped := _clip(box, axis, low, high)) is not None]
        if fault := _fault_in(_replaced(region, axis, low, high), inner):
            return fault
    return None


def _best_cut(region: Box, boxes: Sequence[Box]) -> tuple[int, list[int]] | None:
    """The dimension in which most of the boxes begin or end inside of the region, and where; ``None``: in no one."""
    best: tuple[int, list[int]] | None = None
    for axis, (low, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
        edges = {box.offsets[axis] for box in boxes} | {box.offsets[axis] + box.lengths[axis] for box in boxes}
        inside = sorted(edge for edge in edges if low < edge < low + length)
        if inside and (best is None or len(inside) > len(best[1])):
            best = axis, inside
    return best


def _clip(box: Box, axis: int, low: int, high: int) -> Box | None:
    begin, end = max(box.offsets[axis], low), min(box.offsets[axis] + box.lengths[axis], high)
    return _replaced(box, axis, begin, end) if begin < end else None


def _replaced(box: Box, axis: int, begin: int, end: int) -> Box:
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[axis], lengths[axis] = begin, end - begin
    return Box(tuple(offsets), tuple(lengths))


def _optimizer_faults(manifest: Manifest) -> list[Damage]:
    """Names in the optimizer that no parameter has."""
    known = {name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")}
    tied = {name.removeprefix("model/") for name in manifest.aliases}
    members = [name for group in manifest.optimizer.groups for name in group.params]
    state = {name.removeprefix("optimizer/").rsplit("/", 1)[0] for name in manifest.tensors if _is_state(name)}
    state |= set(manifest.optimizer.state)
    faults = []
    for what, names in (
        ("parameter groups of the optimizer name what is no tensor of the model", set(members) - known - tied),
        ("parameters in several groups of the optimizer", {name for name, n in Counter(members).items() if n > 1}),
        ("state of the optimizer for what is no tensor of the model", state - known - tied),
        ("state of the optimizer for parameters in none of its groups", (state & (known | tied)) - set(members)),
    ):
        if names:
            faults.append(Damage(MANIFEST, what, tuple(sorted(names))))
    return faults


def _is_state(name: str) -> bool:
    return name.startswith("optimizer/") and name.count("/") >= 2


def _wrong_shards(folder: Folder, files: Mapping[str, list[tuple[Shard, int]]], tick: Told) -> list[Damage]:
    """The tensors whose bytes are not those that were saved, by file."""
    threads = LOCAL_THREADS if is_local(folder) else REMOTE_THREADS
    with ShardReader(folder, "") as reader, ThreadPoolExecutor(threads, "verify") as pool:
        work = [pool.submit(_look_at, reader, batch, tick) for batch in _batches(files)]
        found = _all(pool, work)
    damage: dict[tuple[str, str], list[str]] = {}
    for file, what, tensor in found:
        damage.setdefault((file, what), []).append(tensor)
    return [Damage(file, what, tuple(tensors)) for (file, what), tensors in sorted(damage.items())]


def _batches(files: Mapping[str, list[tuple[Shard, int]]]) -> Iterator[list[Shard]]:
    """Shards of one file that follow each other, as many as make up a piece of work; files take turns."""
    return (batch for _, batch in heapq.merge(*(_batches_of(shards) for shards in files.values()), key=lambda b: b[0]))


def _batches_of(shards: list[tuple[Shard, int]]) -> Iterator[tuple[int, list[Shard]]]:
    batch: list[Shard] = []
    held = done = 0
    for shard, num_bytes in sorted(shards, key=_place_in_file):
        batch.append(shard)
        held += num_bytes
        if held >= BATCH:
            yield done, batch
            batch, done, held = [], done + held, 0
    if batch:
        yield done, batch


def _place_in_file(item: tuple[Shard, int]) -> tuple[float, str]:
    """The order in which this version writes tensors: wide elements first, then by name."""
    shard, num_bytes = item
    return -num_bytes / math.prod(shard.lengths), shard.key


def _look_at(reader: ShardReader, shards: Sequence[Shard], tick: Told) -> list[tuple[str, str, str]]:
    """File, what, tensor of each shard that is damaged."""
    found = []
    for shard in shards:
        try:
            if reader.wrong_hash(shard, tick):
                found.append((shard.file, "bytes are not those that were saved", shard.key))
        except CheckpointError as error:
            found.append((shard.file, plain_fault(reader.folder / shard.file, error), shard.key))
    return found


def _all(pool: ThreadPoolExecutor, work: Sequence[Future[list[tuple[str, str, str]]]]) -> list[tuple[str, str, str]]:
    """All results; what begins no more does not, where something goes wrong that is no damage, or Ctrl-C comes."""
    try:
        return [one for part in work for one in part.result()]
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


def _verify_source(place: str | Folder, begin: Told, tick: Told, started: float) -> Verification:
    """Read every tensor of another tool's checkpoint."""
    try:
        opened = open_source(place)
    except CheckpointError as error:
        return Verification(OTHER, str(place), False, damage=[unreadable(place, error)])
    with opened as source:
        tensors = source.tensors
        total = sum(info.num_bytes for info in tensors.values())
        begin(total)
        threads = LOCAL_THREADS if is_local(folder_of(place)) else REMOTE_THREADS
        with ThreadPoolExecutor(threads, "verify") as pool:
            work = [pool.submit(_read_all, source, name, info, tick) for name, info in tensors.items()]
            found = _all(pool, work)
        damage = [Damage(source.place, what, (name,)) for _, what, name in found]
        spent = time.perf_counter() - started
        notes = ["this format has no hashes: everything could be read, and nothing could be compared"]
        notes = [notes[0] if not damage else "this format has no hashes: nothing could be compared", *source.notes]
        return Verification(source.kind, source.place, False, source.step, len(tensors), 0, total, spent, damage, notes)


def _read_all(source: Source, name: str, info: TensorInfo, tick: Told) -> list[tuple[str, str, str]]:
    for box in _blocks(info):
        try:
            found = source.read(name, box)
        except CheckpointError as error:
            return [("", str(error), name)]
        if tuple(found.shape) != box.lengths or found.dtype != info.dtype:
            return [("", f"is {found.dtype} {tuple(found.shape)}, not {info.dtype} {box.lengths}", name)]
        tick(found.nbytes)
    return []


def _blocks(info: TensorInfo) -> Iterator[Box]:
    """The whole tensor, a large one in runs of rows."""
    if not info.shape or info.num_bytes <= BLOCK:
        yield info.whole
        return
    rows = max(1, info.shape[0] * BLOCK // info.num_bytes)
    for begin in range(0, info.shape[0], rows):
        count = min(rows, info.shape[0] - begin)
        yield Box((begin, *(0,) * (len(info.shape) - 1)), (count, *info.shape[1:]))
