"""Manifest of a checkpoint: tensors, the location of their shards, and all other state.

``docs/checkpoint-format.md`` specifies the same in prose, for writers of other readers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, overload

import xxhash
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from shardwise.checkpoint.boxes import Box, coverage_fault
from shardwise.checkpoint.grid import Grid
from shardwise.checkpoint.storage.local_storage import Folder, read_small
from shardwise.collector import no_collector
from shardwise.errors import CheckpointError

SCHEMA = 3
MANIFEST = "manifest.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"  # folder of the checkpoints in a run's folder
TEMPORARY = ".tmp-"
AVERAGE = "ema/"  # begins the names of averages of weights
HASH = "xxh3-128"  # 31 GB/s on one core (BLAKE2b of schema 1: 1.4); it detects damage, not forgery
LARGEST_MANIFEST = 1 << 29  # bytes; a few million shards
LARGEST_TABLE = 1 << 28
LARGEST_LATEST = 1 << 12
_DEEPEST = 100
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_HASH = f"{HASH}:{'0' * 32}"
_OWN_HASH = re.compile(f"{HASH}:[0-9a-f]{{32}}".encode())
_STEP_NAME = re.compile(r"step-(\d{8,})")

Size = Annotated[int, Field(ge=0, lt=1 << 63)]  # as torch counts elements

ITEMSIZES = {  # bytes per element, by safetensors dtype code
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


def _plain_name(name: str) -> str:
    if not name or name != Path(name).name or name == ".." or not name.isprintable():
        raise ValueError(f"'{name}' is not a plain file name")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]


class Shard(BaseModel):
    """Box of a tensor: ``key`` in ``file`` stores ``offsets[d] .. offsets[d] + lengths[d]``.

    ``hash`` is over the bytes of the shard as they lie in the file: ``xxh3-128:`` and 32 hex digits, or, in schema 1,
    the bare hex digits of BLAKE2b with a digest of 16 bytes.
    """

    model_config = ConfigDict(frozen=True)

    file: FileName
    key: str
    offsets: tuple[Size, ...]
    lengths: tuple[Size, ...]
    hash: str


class HashTables:
    """Hashes of the shards of each file, in a table beside it, which is read when one is asked for.

    ``hashes`` are those of the tables, by the file's name; ``folder`` is the checkpoint's.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self.files = tuple(hashes)
        self.folder: Folder | None = None
        self._hashes = hashes
        self._lock = threading.Lock()
        self._read: dict[str, dict[str, str] | str] = {}  # or why it cannot be read

    def __eq__(self, other: object) -> bool:  # two manifests are equal wherever they lie
        return isinstance(other, HashTables) and self._hashes == other._hashes

    def hash_of(self, file: str, key: str) -> str:
        """Return the hash of a tensor in ``file``.

        Raises:
            CheckpointError: the table is missing or damaged.
        """
        table = self._kept(file)
        if isinstance(table, str):
            raise CheckpointError(table)
        if key not in table:
            raise CheckpointError(f"'{self._path(file)}' is damaged: {key} is not in it; load an earlier checkpoint")
        return table[key]

    def fault_of(self, file: str) -> str:
        """Return why the table of ``file`` cannot be read; empty where it can."""
        table = self._kept(file)
        return table if isinstance(table, str) else ""

    def _kept(self, file: str) -> dict[str, str] | str:
        with self._lock:
            if file not in self._read:
                try:
                    self._read[file] = self._table(file)
                except CheckpointError as error:
                    self._read[file] = str(error)
            return self._read[file]

    def _path(self, file: str) -> Folder:
        assert self.folder is not None  # set where a manifest is read
        return self.folder / table_name(file)

    def _table(self, file: str) -> dict[str, str]:
        path = self._path(file)
        try:
            raw = read_small(path, LARGEST_TABLE)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"'{path}' cannot be read: {why}; load an earlier checkpoint") from None
        if hash_bytes(raw) != self._hashes[file]:
            raise CheckpointError(
                f"'{path}' is damaged: its bytes are not those that were written; load an earlier checkpoint"
            )
        table = None
        with contextlib.suppress(ValueError, RecursionError):
            table = json.loads(raw)
        if not isinstance(table, dict) or not all(isinstance(one, str) for one in table.values()):
            raise CheckpointError(f"'{path}' is damaged: it is no table of hashes; load an earlier checkpoint")
        return table


def table_name(file: str) -> str:
    """Return the name of the table with the hashes of ``file``."""
    return f"{file.removesuffix('.safetensors')}.hashes.json"


class GridShards(Sequence[Shard]):
    """Shards of a tensor that is cut as a grid, made when they are asked for."""

    def __init__(self, grid: Grid, shape: tuple[int, ...], key: str, tables: HashTables) -> None:
        self.grid, self.made = grid, dict[int, Shard]()
        self._shape, self._key, self._tables = shape, key, tables

    def __len__(self) -> int:
        return self.grid.cells

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Shard]: ...
    def __getitem__(self, at: int | slice) -> Shard | Sequence[Shard]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._shard(at, self.grid.box(at, self._shape), self.grid.file(at))

    def _shard(self, at: int, box: Box, number: int) -> Shard:
        if at not in self.made:
            file = self._tables.files[number]
            made = self._tables.hash_of(file, self._key)
            self.made[at] = Shard.model_construct(
                file=file, key=self._key, offsets=box.offsets, lengths=box.lengths, hash=made
            )
        return self.made[at]

    def readable(self) -> tuple[list[Shard], list[str]]:
        """Return all shards but those whose hashes cannot be read, and the files of these."""
        found: list[Shard] = []
        lost: list[str] = []
        for at, (box, number) in enumerate(self.grid.placed(self._shape)):
            try:
                found.append(self._shard(at, box, number))
            except CheckpointError:
                lost.append(self._tables.files[number])
        return found, lost

    def __eq__(self, other: object) -> bool:
        own = (self.grid, self._shape, self._key, self._tables)
        return isinstance(other, GridShards) and own == (other.grid, other._shape, other._key, other._tables)

    def overlapping(self, box: Box) -> list[Shard]:
        """Return the shards that overlap ``box``."""
        return [self[at] for at in self.grid.overlapping(box)]


class TensorEntry(BaseModel):
    """Tensor entry: safetensors dtype code, global shape, and shards that cover it exactly once.

    They are ``listed``, or the cells of a ``grid``.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    dtype: str
    shape: tuple[Size, ...]
    listed: tuple[Shard, ...] = Field(default=(), alias="shards")
    grid: Grid | None = None
    _cells: GridShards | None = PrivateAttr(default=None)

    @property
    def shards(self) -> Sequence[Shard]:
        """Shards, in no particular order."""
        return self.listed if self._cells is None else self._cells

    def bind(self, name: str, tables: HashTables) -> None:
        """Connect a grid with the checkpoint's files.

        Raises:
            ValueError: it is no grid of this tensor.
        """
        if self.grid is not None:
            if fault := self.grid.fault(self.shape, len(tables.files)):
                raise ValueError(f"{name}: {fault}")
            self._cells = GridShards(self.grid, self.shape, name, tables)

    @model_validator(mode="after")
    def _covered(self) -> Self:
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype '{self.dtype}' is unknown")
        if self.grid is not None:
            if self.listed:
                raise ValueError("shards are listed, and a grid, too")
            return self
        num_elements = 0
        for shard in self.listed:
            if not len(shard.offsets) == len(shard.lengths) == len(self.shape):
                raise ValueError(f"a shard in {shard.file} has another number of dimensions than {self.shape}")
            for start, length, size in zip(shard.offsets, shard.lengths, self.shape, strict=True):
                if length < 1 or start + length > size:
                    raise ValueError(f"a shard in {shard.file} reaches outside of {self.shape}")
            num_elements += math.prod(shard.lengths)
        if num_elements != math.prod(self.shape):
            raise ValueError(f"the shards contain {num_elements} of {math.prod(self.shape)} elements")
        return self


class ParamGroup(BaseModel):
    """Parameter group: parameter names, and hyperparameters as JSON values."""

    model_config = ConfigDict(frozen=True)

    params: tuple[str, ...]
    options: dict[str, Any]


class OptimizerEntry(BaseModel):
    """Non-tensor optimizer state: class name, groups, and state values that are JSON scalars."""

    model_config = ConfigDict(frozen=True)

    name: str
    groups: tuple[ParamGroup, ...] = ()
    state: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Manifest(BaseModel):
    """Complete checkpoint contents except the bytes of the tensors.

    ``state`` is the caller's own JSON. ``aliases`` maps the other names of a tied tensor to the one it is stored
    under. ``model`` describes how to build the model: ``{"kind": "transformers", "config": {...}}`` or ``{"kind":
    "factory", "factory": "package.module:name", "kwargs": {...}}``. ``created`` is UTC, ISO 8601. Unknown fields are
    ignored, so that one may be added without a new schema. ``files``, of schema 3, are those that grids count, each
    with the hash of its table of hashes.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_version: Literal[1, 2, 3] = Field(default=2, alias="schema", serialization_alias="schema")
    step: Size
    plan: dict[str, Any]
    plan_fingerprint: str
    versions: dict[str, str]
    ranks: int = Field(ge=1, lt=1 << 31)
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = Field(default_factory=dict)
    optimizer: OptimizerEntry
    state: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] | None = None
    created: str | None = None
    files: dict[FileName, str] = Field(default_factory=dict)
    _tables: HashTables = PrivateAttr(default_factory=lambda: HashTables({}))

    @model_validator(mode="after")
    def _bound(self) -> Self:
        self._tables = HashTables(self.files)
        for name, entry in self.tensors.items():
            entry.bind(name, self._tables)
        return self

    def stored_in(self, folder: Folder) -> None:
        """Set the folder of the checkpoint, where its tables are."""
        self._tables.folder = folder

    def table_fault(self, file: str) -> str:
        """Return why the table of hashes of ``file`` cannot be read; empty where it can, and in schemas 1 and 2."""
        return self._tables.fault_of(file) if file in self.files else ""

    @model_validator(mode="after")
    def _aliases_lead_somewhere(self) -> Self:
        lost = sorted(alias for alias, name in self.aliases.items() if name not in self.tensors)
        if lost:
            raise ValueError(f"aliases of nothing: {', '.join(lost)}")
        return self

    def entry(self, name: str) -> TensorEntry | None:
        """Return the tensor stored under ``name``, or under the name that ``name`` is tied to."""
        return self.tensors.get(self.aliases.get(name, name))

    def to_json(self) -> str:
        """Serialize the document, which begins with its own hash; see `_own_hash`.

        Floats that are not finite are written as Python's json module does (``Infinity``).
        """
        document = self.model_dump(by_alias=True)
        for entry in document["tensors"].values():
            del entry["grid" if entry["grid"] is None else "shards"]
        if self.schema_version < 3:
            del document["files"]
        text = json.dumps({"hash": _NO_HASH, **document}, separators=(",", ":"))
        return text.replace(_NO_HASH, _own_hash(text.encode()), 1)


class Hasher(Protocol):
    """Incremental hash of bytes."""

    def update(self, data: Any, /) -> None:
        """Update the hash with more bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""
        ...


def hasher(saved: str | None = None) -> Hasher:
    """Create a hasher of this version's kind, or of the kind of ``saved``.

    Raises:
        CheckpointError: ``saved`` is of a kind that this version does not know.
    """
    if saved is None or saved.startswith(f"{HASH}:"):
        return xxhash.xxh3_128()
    if ":" not in saved:
        return hashlib.blake2b(digest_size=16)
    raise CheckpointError(f"hashes of the kind '{saved.split(':')[0]}' are unknown to this version; update shardwise")


def hash_text(made: Hasher) -> str:
    """Format a finished hash of this version's kind as in a manifest."""
    return f"{HASH}:{made.hexdigest()}"


def hash_bytes(data: bytes) -> str:
    """Return the hash of bytes, as text."""
    made = hasher()
    made.update(data)
    return hash_text(made)


def _own_hash(data: bytes) -> str:
    """Hash a manifest's bytes, with the digits of its own hash (the first in the file) as zeros."""
    return hash_bytes(_OWN_HASH.sub(_NO_HASH.encode(), data, count=1))


@no_collector()
def read_manifest(path: Folder) -> Manifest:
    """Read the manifest of the checkpoint folder ``path``.

    Raises:
        CheckpointError: there is none, it is damaged, or a later version of Shardwise wrote it.
    """
    file = path / MANIFEST
    earlier = "load an earlier checkpoint"
    try:
        raw = read_small(file, LARGEST_MANIFEST)
        data = parsed_json(raw)
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"checkpoint '{path}' has no {MANIFEST} ({why}); {earlier}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}; {earlier}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"checkpoint '{path}' has schema {str(schema)[:12]}, and this version of shardwise reads up to {SCHEMA}; "
            "update shardwise"
        )
    if isinstance(data, dict) and (schema != 1 or "hash" in data) and data.get("hash") != _own_hash(raw):
        raise CheckpointError(f"'{file}' is damaged: its bytes are not those that were written; {earlier}")
    try:
        found = Manifest.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise CheckpointError(f"'{file}' is damaged: {_problem_text(lines)}; {earlier}") from None
    found.stored_in(path)
    entries = found.tensors.items()  # a grid covers its tensor
    listed = [(name, e) for name, e in entries if e.grid is None]
    if lines := [f"{name}: {fault}" for name, e in listed if (fault := coverage_fault(e.shape, e.listed))]:
        raise CheckpointError(f"'{file}' is damaged: {_problem_text(lines)}; {earlier}")
    return found


def parsed_json(raw: bytes) -> Any:
    """Parse JSON with unique keys, writable text and limited nesting.

    Raises:
        ValueError, RecursionError: it is not such JSON.
    """
    data = json.loads(raw.decode(), object_pairs_hook=_object)
    if _SURROGATE.search(raw):  # an unpaired surrogate is not valid text: no path and no line can contain it
        json.dumps(data, ensure_ascii=False).encode()
    level: list[Any] = [value for key, value in data.items() if key != "tensors"] if isinstance(data, dict) else []
    for _ in range(_DEEPEST):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return data
        level = [v for one in level for v in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"it nests deeper than {_DEEPEST} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build one object, rejecting duplicate keys, whose meaning JSON leaves open."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key '{twice:.100}' is there twice")
    return found


def _problem_text(problems: list[str]) -> str:
    """Shorten a list of problems, without terminal control characters."""
    return short_list(["".join(c if c.isprintable() else "?" for c in line[:300]) for line in problems])


def step_folder(step: int) -> str:
    """Return the folder name of a step, such as ``step-00000020``."""
    return f"step-{step:08d}"


def saved_steps(folder: Folder) -> list[tuple[int, Folder]]:
    """List the complete checkpoints in ``folder`` with their steps, highest first.

    Empty where the folder does not exist.
    """
    if not folder.is_dir():
        return []
    matches = [(_STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    found = [(int(m[1]), path) for m, path in matches if m and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda item: item[0], reverse=True)


def newest(folder: Folder) -> Folder | None:
    """Return the checkpoint to resume from; ``None`` where there is none.

    Unfinished ones are ignored. It is the one that ``latest`` names. Where that file is missing or names none that is
    complete, it is the one with the highest step.
    """
    steps = saved_steps(folder)
    try:
        named = read_small(folder / LATEST, LARGEST_LATEST).decode().strip()
    except (OSError, ValueError):
        named = ""
    return next((path for _, path in steps if path.name == named), steps[0][1] if steps else None)


def checkpoint_in(path: Folder) -> Folder | None:
    """Find the checkpoint at ``path``, or the newest in it or in its ``checkpoints``.

    ``None`` where there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    return newest(path) or newest(path / CHECKPOINTS)


def short_list(problems: list[str], limit: int = 10) -> str:
    """Format the first ``limit`` problems, one per line if several, then ``and N more``."""
    shown = problems[:limit]
    if len(problems) > limit:
        shown.append(f"and {len(problems) - limit} more")
    return shown[0] if len(shown) == 1 else "".join(f"\n  {line}" for line in shown)
