"""Inspect a checkpoint from names, sizes and headers, without reading data.

Lists its tensors, and files that are missing or too short.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.format import (
    ITEMSIZES,
    MANIFEST,
    GridShards,
    Manifest,
    Shard,
    checkpoint_in,
    read_manifest,
    saved_steps,
    table_name,
)
from shardwise.checkpoint.storage.local_storage import (
    Folder,
    RangeReader,
    file_sizes,
    folder_of,
    is_local,
)
from shardwise.collector import no_collector
from shardwise.errors import CheckpointError

THREADS = 16  # concurrent requests to a server
OTHER = "checkpoint of another tool"
_LARGEST_HEADER = 100_000_000  # limit of the safetensors library
_OWN_FILES = re.compile(r"rank-\d{5,}\.safetensors")


@dataclass(frozen=True)
class TensorLine:
    """Tensor summary: dtype code (or torch's name), global shape, bytes, and shards.

    ``shards`` is ``None`` where the format does not record it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    shards: int | None


@dataclass(frozen=True)
class Damage:
    """Damage to a file or to the manifest, and the tensors lost with it."""

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = ", ".join(self.tensors[:3])
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"{self.file}: {self.what}" + (f" ({named}{more})" if named else "")


@dataclass(frozen=True)
class Inspection:
    """Contents of a checkpoint.

    Attributes:
        kind: whose checkpoint it is, in words.
        place: the folder or file that was inspected.
        lines: the tensors of the weights, the optimizer and whatever else, without the generators' states.
        manifest: of a Shardwise checkpoint, where it can be read.
        rng: rank to the names of the generators whose states there are.
        sizes: the files of the checkpoint with their bytes; empty where that is not known.
        others: the other checkpoints beside it, where a folder of several was given.
    """

    kind: str
    place: str
    lines: Sequence[TensorLine] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    step: int | None = None
    manifest: Manifest | None = None
    rng: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    others: Sequence[str] = ()
    damage: Sequence[Damage] = ()
    notes: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors in ``lines``."""
        return sum(line.num_bytes for line in self.lines)


@no_collector()
def inspect_checkpoint(place: str | Folder) -> Inspection:
    """Inspect the checkpoint at ``place``.

    ``place`` is a Shardwise checkpoint, the newest of a run or of a folder of checkpoints, or another tool's.

    Raises:
        UserError: there is no checkpoint in a known format.
        CheckpointError: a server does not answer.
    """
    path = folder_of(place)
    own = find_own(path)
    if own is None:
        return _of_source(place)
    kind = "Shardwise checkpoint"
    others = _others(path, own)
    try:
        manifest = read_manifest(own)
    except CheckpointError as error:
        damage = Damage(MANIFEST, plain_fault(own / MANIFEST, error))
        return Inspection(kind, str(own), sizes=file_sizes(own), others=others, damage=[damage])
    sizes = file_sizes(own)
    lines, rng = _lines(manifest)
    files, lost = readable_shards(own, manifest)
    return Inspection(
        kind,
        str(own),
        lines,
        manifest.aliases,
        manifest.optimizer.model_dump(),
        manifest.step,
        manifest,
        rng,
        sizes,
        others,
        [*lost, *damaged_files(own, files, sizes)],
        _left_over(manifest, sizes),
    )


def find_own(path: Folder) -> Folder | None:
    """Return the folder of the one Shardwise checkpoint at ``path``, else ``None``.

    It may be unfinished.
    """
    if path.name == MANIFEST and path.is_file():
        return path.parent
    if not path.is_dir():
        return None
    found = checkpoint_in(path)
    if found is not None:
        return found
    unfinished = any(_OWN_FILES.fullmatch(item.name) for item in path.iterdir())
    return path if unfinished else None


def readable_shards(folder: Folder, manifest: Manifest) -> tuple[dict[str, list[tuple[Shard, int]]], list[Damage]]:
    """Map each file name to its shards, each with its bytes; and list the damaged tables of hashes.

    The shards whose hashes are lost with a table are left out. All tables are read, those that no grid needs too.
    """
    found: dict[str, list[tuple[Shard, int]]] = defaultdict(list)
    lost: dict[str, list[str]] = {file: [] for file in manifest.files if manifest.table_fault(file)}
    for name, entry in manifest.tensors.items():
        itemsize = ITEMSIZES[entry.dtype]
        shards, without = entry.shards.readable() if isinstance(entry.shards, GridShards) else (entry.shards, [])
        for shard in shards:
            found[shard.file].append((shard, math.prod(shard.lengths) * itemsize))
        for file in without:
            lost.setdefault(file, []).append(name)
    damage = []
    for file, names in lost.items():
        table, why = table_name(file), manifest.table_fault(file) or "lacks hashes"
        what = plain_fault(folder / table, CheckpointError(why.removesuffix("; load an earlier checkpoint")))
        damage.append(Damage(table, what, tuple(names)))
    return dict(found), damage


def damaged_files(
    folder: Folder, files: Mapping[str, Sequence[tuple[Shard, int]]], sizes: Mapping[str, int]
) -> list[Damage]:
    """List files that are missing or of a wrong size; no data is read."""

    def look(name: str) -> Damage | None:
        return _damage_of(folder / name, files[name], sizes.get(name))

    names = sorted(files)
    if is_local(folder) or len(names) < 2:
        return [damage for damage in map(look, names) if damage]
    with ThreadPoolExecutor(min(THREADS, len(names)), "inspect") as pool:
        return [damage for damage in pool.map(look, names) if damage]


def unreadable(place: str | Folder, error: Exception) -> Damage:
    """Report a checkpoint of another tool that cannot be opened."""
    path = folder_of(place)
    return Damage(path.name or str(path), plain_fault(path, error))


def plain_fault(path: object, error: Exception) -> str:
    """Format an error without the path, which is printed beside it."""
    text = str(error)
    for start in (f"'{path}' is ", f"'{path}' ", f"'{path}': "):
        text = text.removeprefix(start)
    return text.rstrip("; ")


def _of_source(place: str | Folder) -> Inspection:
    from shardwise.checkpoint.dtypes import CODES
    from shardwise.checkpoint.readers.detect import (
        open_source,
    )  # loads torch, which a Shardwise checkpoint does not need

    try:
        opened = open_source(place)
    except CheckpointError as error:
        return Inspection(OTHER, str(place), damage=[unreadable(place, error)])
    with opened as source:
        lines = [
            TensorLine(
                name, CODES.get(info.dtype, str(info.dtype).removeprefix("torch.")), info.shape, info.num_bytes, None
            )
            for name, info in source.tensors.items()
        ]
        return Inspection(
            source.kind,
            source.place,
            lines,
            source.aliases,
            source.optimizer,
            source.step,
            notes=tuple(source.notes),
        )


def _others(path: Folder, own: Folder) -> list[str]:
    """List the other checkpoints, where ``path`` is a folder of several."""
    if str(own) == str(path) or path.name == MANIFEST:
        return []
    return [other.name for _, other in saved_steps(own.parent) if other.name != own.name]


def _lines(manifest: Manifest) -> tuple[list[TensorLine], dict[str, list[str]]]:
    lines: list[TensorLine] = []
    rng: dict[str, list[str]] = defaultdict(list)
    for name, entry in manifest.tensors.items():
        num_bytes = math.prod(entry.shape) * ITEMSIZES[entry.dtype]
        if name.startswith("rng/") and name.count("/") >= 2:
            _, rank, generator = name.split("/", 2)
            rng[rank].append(generator)
        else:
            lines.append(TensorLine(name, entry.dtype, entry.shape, num_bytes, len(entry.shards)))
    return lines, dict(rng)


def _left_over(manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    """Describe files that the manifest does not reference."""
    known = {shard.file for entry in manifest.tensors.values() for shard in entry.listed} | {MANIFEST}
    known |= {name for file in manifest.files for name in (file, table_name(file))}
    extra = sorted(name for name in sizes if name not in known)
    shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
    return [f"not part of the checkpoint: {shown}"] if extra else []


def _damage_of(path: Folder, shards: Sequence[tuple[Shard, int]], size: int | None) -> Damage | None:
    keys = tuple(shard.key for shard, _ in shards)
    if size is None:
        return Damage(path.name, "is missing", keys)
    try:
        with RangeReader(path, size=size, ahead=False) as reader:
            header = int.from_bytes(reader.read(0, 8), "little")
            if 8 + header + sum(num_bytes for _, num_bytes in shards) == size:
                return None
            return _closer(reader, header, shards)
    except EOFError:
        return Damage(path.name, f"has {size} bytes, which is not a safetensors file", keys)
    except OSError as error:
        return Damage(path.name, f"cannot be read: {error.strerror or error}", keys)


def _closer(reader: RangeReader, header: int, shards: Sequence[tuple[Shard, int]]) -> Damage | None:
    """Inspect the header of a file whose size is wrong; other tensors may be in it, too."""
    name, size, keys = reader.path.name, reader.size, tuple(shard.key for shard, _ in shards)
    if header > min(_LARGEST_HEADER, size - 8):
        return Damage(name, f"has {size} bytes, and its header alone claims to have {header}", keys)
    try:
        items = json.loads(reader.read(8, header))
        ends = {key: 8 + header + int(item["data_offsets"][1]) for key, item in items.items() if key != "__metadata__"}
        begins = {key: 8 + header + int(items[key]["data_offsets"][0]) for key in ends}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        return Damage(name, f"its header is damaged ({type(error).__name__}: {error})", keys)
    if lost := tuple(key for key in keys if key not in ends):
        return Damage(name, "its header does not match the manifest", lost)
    if truncated := tuple(key for key in keys if ends[key] > size):
        needed = max(ends[key] for key in truncated)
        return Damage(name, f"is truncated: it has {size} bytes, and {needed} are needed", truncated)
    if wrong := tuple(shard.key for shard, num_bytes in shards if ends[shard.key] - begins[shard.key] != num_bytes):
        return Damage(name, "has tensor sizes that differ from the manifest", wrong)
    needed = max(ends.values(), default=8 + header)
    return None if needed == size else Damage(name, f"has {size} bytes, and its header accounts for {needed}")
