"""Read a Shardwise checkpoint through the common reader interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.format import Shard, checkpoint_in, read_manifest
from shardwise.checkpoint.readers.reader import TensorInfo, read_pieces
from shardwise.checkpoint.shard_files import ShardReader, in_threads, wrong_bytes
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.errors import CheckpointError

_FIX = "take an earlier checkpoint"


class OwnSource:
    """Shardwise checkpoint, or the newest of a folder of checkpoints or a run, as a `Source`.

    The generators' states are among ``tensors`` too, as ``rng/<rank>/<name>``.

    Attributes:
        manifest: all contents except the tensors.
        path: the folder of the one checkpoint.
    """

    def __init__(self, path: Folder) -> None:
        """Read the manifest.

        Raises:
            CheckpointError: there is no complete checkpoint, or its manifest is damaged or of a later version.
        """
        found = checkpoint_in(path)
        if found is None:
            raise CheckpointError(f"'{path}' is not a Shardwise checkpoint and contains no complete one")
        self.path = found
        self.place = str(found)
        self.kind = "Shardwise checkpoint"
        self.manifest = read_manifest(found)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(DTYPES[entry.dtype], entry.shape) for name, entry in self.manifest.tensors.items()
        }
        self.aliases: Mapping[str, str] = self.manifest.aliases
        self.optimizer: Mapping[str, Any] | None = self.manifest.optimizer.model_dump()
        self.step: int | None = self.manifest.step
        self.notes: Sequence[str] = ()
        self._reader = ShardReader(found, _FIX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__()

    def check(
        self, tick: Callable[[int], None] | None = None, *, prefix: str = "", rank: int = 0, ranks: int = 1
    ) -> None:
        """Read every byte and compare the hashes; ``tick`` is called with the bytes read.

        Only tensors whose names begin with ``prefix``, and of these ``rank``'s share where ``ranks`` share the work.

        Raises:
            CheckpointError: bytes differ from those that were saved; names files and tensors.
        """
        entries = [entry for name, entry in self.manifest.tensors.items() if name.startswith(prefix)]
        shards, before = list[tuple[Shard, torch.dtype]](), 0
        for entry in entries:  # every so-many-th of all: no others are made of a grid
            shards += [(shard, DTYPES[entry.dtype]) for shard in entry.shards[(rank - before) % ranks :: ranks]]
            before += len(entry.shards)
        wrong: list[tuple[object, str]] = []

        def look(one: tuple[Shard, torch.dtype]) -> None:
            self._reader.stored(*one)
            if self._reader.wrong_hash(one[0], tick):
                wrong.append((self.path / one[0].file, one[0].key))

        in_threads(look, shards)
        if wrong:
            raise CheckpointError(wrong_bytes(sorted(wrong, key=str), _FIX))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        entry = self.manifest.tensors[name]
        return read_pieces(self._reader, entry.shards, box, DTYPES[entry.dtype])
