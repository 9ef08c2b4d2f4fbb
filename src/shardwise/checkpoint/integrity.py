"""Verify a checkpoint: every byte as saved, and structurally complete.

Reads all of it, with several threads.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.format import MANIFEST, GridShards, Manifest, Shard, read_manifest
from shardwise.checkpoint.inspect import (
    OTHER,
    Damage,
    damaged_files,
    find_own,
    plain_fault,
    readable_shards,
    unreadable,
)
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.reader import Source, TensorInfo
from shardwise.checkpoint.shard_files import ShardReader
from shardwise.checkpoint.storage.local_storage import MIB, Folder, file_sizes, folder_of, is_local
from shardwise.collector import no_collector
from shardwise.errors import CheckpointError

LOCAL_THREADS, REMOTE_THREADS = 4, 8
BATCH = 64 * MIB  # bytes of small shards per task
BLOCK = 64 * MIB  # bytes in memory at once, of a tensor of another tool's

OnBytes = Callable[[int], None]  # a number of bytes


@dataclass(frozen=True)
class Verification:
    """Result of a verification: what was read, and all damage.

    ``hashed``: the bytes were compared with hashes; other tools' formats have no hashes and were only read.
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
    """Ignore progress."""


@no_collector()
def verify_checkpoint(place: str | Folder, begin: OnBytes = _nobody, tick: OnBytes = _nobody) -> Verification:
    """Read every byte of the checkpoint at ``place`` and compare the hashes.

    See `inspect_checkpoint` for ``place``. Also checked: the shards of a tensor cover it exactly once, aliases refer to
    tensors, and the optimizer refers to existing parameters. ``begin`` is called with the total bytes, ``tick``, from
    several threads, with the bytes just read.

    Raises:
        UserError: there is no checkpoint in a known format.
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
    (files, unreadable_tables), sizes = readable_shards(own, manifest), file_sizes(own)
    damage = [*unreadable_tables, *structure_faults(manifest), *damaged_files(own, files, sizes)]
    broken = {one.file for one in damage}
    full = {name: shards for name, shards in files.items() if name not in broken}
    begin(sum(num_bytes for shards in full.values() for _, num_bytes in shards))
    dtypes: dict[int, torch.dtype] = {}
    for entry in manifest.tensors.values():
        shards = entry.shards.made.values() if isinstance(entry.shards, GridShards) else entry.shards
        dtypes |= {id(shard): DTYPES[entry.dtype] for shard in shards}
    damage += _wrong_shards(own, full, dtypes, tick)
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
    """List names in a manifest that refer to nothing.

    Shard coverage is proven whenever a manifest is read.
    """
    faults = []
    twice = sorted(name for name in manifest.aliases if name in manifest.tensors)
    if twice:
        faults.append(Damage(MANIFEST, "tied names that are stored on their own, too", tuple(twice)))
    return faults + _optimizer_faults(manifest)


def _optimizer_faults(manifest: Manifest) -> list[Damage]:
    """List names in the optimizer that match no parameter."""
    known = {name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")}
    tied = {name.removeprefix("model/") for name in manifest.aliases}
    members = [name for group in manifest.optimizer.groups for name in group.params]
    state = {name.removeprefix("optimizer/").rsplit("/", 1)[0] for name in manifest.tensors if _is_state(name)}
    state |= set(manifest.optimizer.state)
    faults = []
    for what, names in (
        (
            "parameter groups of the optimizer name something that is not a tensor of the model",
            set(members) - known - tied,
        ),
        ("parameters in several groups of the optimizer", {name for name, n in Counter(members).items() if n > 1}),
        ("state of the optimizer for something that is not a tensor of the model", state - known - tied),
        ("state of the optimizer for parameters in none of its groups", (state & (known | tied)) - set(members)),
    ):
        if names:
            faults.append(Damage(MANIFEST, what, tuple(sorted(names))))
    return faults


def _is_state(name: str) -> bool:
    return name.startswith("optimizer/") and name.count("/") >= 2


def _wrong_shards(
    folder: Folder, files: Mapping[str, list[tuple[Shard, int]]], dtypes: Mapping[int, torch.dtype], tick: OnBytes
) -> list[Damage]:
    """List tensors whose bytes differ from those that were saved, by file."""
    threads = LOCAL_THREADS if is_local(folder) else REMOTE_THREADS
    with ShardReader(folder, "") as reader, ThreadPoolExecutor(threads, "verify") as pool:
        work = [pool.submit(_look_at, reader, batch, dtypes, tick) for batch in _batches(files)]
        found = _all(pool, work)
    damage: dict[tuple[str, str], list[str]] = {}
    for file, what, tensor in found:
        damage.setdefault((file, what), []).append(tensor)
    return [Damage(file, what, tuple(tensors)) for (file, what), tensors in sorted(damage.items())]


def _batches(files: Mapping[str, list[tuple[Shard, int]]]) -> Iterator[list[Shard]]:
    """Group consecutive shards of one file into tasks; files alternate."""
    return (batch for _, batch in heapq.merge(*(_batches_of(shards) for shards in files.values()), key=lambda b: b[0]))


def _batches_of(shards: list[tuple[Shard, int]]) -> Iterator[tuple[int, list[Shard]]]:
    batch: list[Shard] = []
    batched = done = 0
    for shard, num_bytes in sorted(shards, key=_place_in_file):
        batch.append(shard)
        batched += num_bytes
        if batched >= BATCH:
            yield done, batch
            batch, done, batched = [], done + batched, 0
    if batch:
        yield done, batch


def _place_in_file(item: tuple[Shard, int]) -> tuple[float, str]:
    """Sort key in the order in which tensors are written: large element size first, then name."""
    shard, num_bytes = item
    return -num_bytes / math.prod(shard.lengths), shard.key


def _look_at(
    reader: ShardReader, shards: Sequence[Shard], dtypes: Mapping[int, torch.dtype], tick: OnBytes
) -> list[tuple[str, str, str]]:
    """Return file, problem and tensor of each damaged shard."""
    found = []
    for shard in shards:
        try:
            reader.stored(shard, dtypes[id(shard)])
            if reader.wrong_hash(shard, tick):
                found.append((shard.file, "bytes are not those that were saved", shard.key))
        except CheckpointError as error:
            found.append((shard.file, plain_fault(reader.folder / shard.file, error), shard.key))
    return found


def _all(pool: ThreadPoolExecutor, work: Sequence[Future[list[tuple[str, str, str]]]]) -> list[tuple[str, str, str]]:
    """Collect all results.

    On an error that is not damage, or on Ctrl-C, pending tasks are cancelled.
    """
    try:
        return [one for part in work for one in part.result()]
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


def _verify_source(place: str | Folder, begin: OnBytes, tick: OnBytes, started: float) -> Verification:
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


def _read_all(source: Source, name: str, info: TensorInfo, tick: OnBytes) -> list[tuple[str, str, str]]:
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
    """Yield the full tensor, a large one in runs of rows."""
    if not info.shape or info.num_bytes <= BLOCK:
        yield info.full
        return
    rows = max(1, info.shape[0] * BLOCK // info.num_bytes)
    for begin in range(0, info.shape[0], rows):
        count = min(rows, info.shape[0] - begin)
        yield Box((begin, *(0,) * (len(info.shape) - 1)), (count, *info.shape[1:]))
