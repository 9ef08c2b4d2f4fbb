"""Read PyTorch DCP folders in safetensors: each rank's shards, with offsets in the metadata.

``HuggingFaceStorageWriter(save_distributed=True)`` writes them; this reads them without consolidation.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.format import Shard, TensorEntry, short_list
from shardwise.checkpoint.readers.reader import TensorInfo, WeightsOnly, read_pieces
from shardwise.checkpoint.shard_files import ShardReader
from shardwise.checkpoint.storage.local_storage import Folder, RangeReader
from shardwise.errors import CheckpointError

PIECES = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # that writer's file names
_OFFSETS = "DCP_SHARDING_INFO"
_FIX = "copy or save the folder again, with the files of all ranks"


class DcpSafetensorsSource(WeightsOnly):
    """A folder of `PIECES`, as a `Source`."""

    def __init__(self, path: Folder) -> None:
        """Read the headers of all files.

        Raises:
            CheckpointError: a header is damaged, has no offsets, or the shards do not cover the tensors.
        """
        self.kind = "PyTorch DCP folder of safetensors"
        self.place = str(path)
        self.notes: Sequence[str] = (
            "the files do not record how many ranks wrote them; only the shapes show that none is missing",
        )
        self._folder = path
        self._reader = ShardReader(path, _FIX)
        try:
            self._entries = self._read_entries(sorted(p.name for p in path.iterdir() if PIECES.fullmatch(p.name)))
        except BaseException:
            self._reader.__exit__()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            f"model/{name}": TensorInfo(DTYPES[entry.dtype], entry.shape) for name, entry in self._entries.items()
        }

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        entry = self._entries[name.removeprefix("model/")]
        return read_pieces(self._reader, entry.shards, box, DTYPES[entry.dtype])

    def _read_entries(self, files: list[str]) -> dict[str, TensorEntry]:
        pieces: dict[str, dict[tuple[int, ...], Shard]] = defaultdict(dict)
        dtypes: dict[str, set[str]] = defaultdict(set)
        for file in files:
            stored_keys = self._reader.entries(file)
            offsets = self._offsets(file)
            for key, stored in stored_keys.items():
                begin = offsets.get(key, {}).get("saved_offsets", [0] * len(stored.shape))
                if not (isinstance(begin, list) and all(type(n) is int for n in begin)):
                    raise CheckpointError(f"'{self.place}/{file}' is damaged: the offsets of {key} are {begin}; {_FIX}")
                dtypes[key].add(stored.dtype)
                if all(stored.shape):
                    shard = Shard(file=file, key=key, offsets=tuple(begin), lengths=stored.shape, hash="")
                    pieces[key].setdefault(shard.offsets, shard)  # duplicates come from replicas
        entries, problems = {}, []
        for key, kinds in dtypes.items():
            shards = tuple(pieces[key].values())
            ends = [tuple(o + n for o, n in zip(s.offsets, s.lengths, strict=False)) for s in shards]
            try:
                shape = tuple(max(axis) for axis in zip(*ends, strict=True)) if ends else (0,)
                entries[key] = TensorEntry(dtype="/".join(sorted(kinds)), shape=shape, shards=shards)
            except (ValidationError, ValueError) as error:
                why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                why = why.removeprefix("Value error, ")
                problems.append(f"{key}: {why}")
        if problems:
            raise CheckpointError(f"'{self.place}' does not contain all of its tensors: {short_list(problems)}; {_FIX}")
        return entries

    def _offsets(self, file: str) -> dict[str, Any]:
        try:
            with RangeReader(self._folder / file) as reader:  # the header, validated by `entries`
                header = json.loads(reader.read(8, int.from_bytes(reader.read(0, 8), "little")))
            found = json.loads(header["__metadata__"][_OFFSETS])
            if not isinstance(found, dict) or not all(isinstance(item, dict) for item in found.values()):
                raise ValueError("it is not a table")
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"'{self.place}/{file}' does not give the offsets of its shards ({_OFFSETS}: {error}); {_FIX}"
            ) from None
        return found
