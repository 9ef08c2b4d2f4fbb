"""Read Hugging Face weights: a safetensors file, or a folder of one or of indexed shards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.format import LARGEST_MANIFEST, Shard, parsed_json, short_list
from shardwise.checkpoint.readers.reader import TensorInfo, WeightsOnly
from shardwise.checkpoint.shard_files import ShardReader
from shardwise.checkpoint.storage.local_storage import Folder, read_small
from shardwise.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_FIX = "download or export the weights again"


class HuggingFaceSource(WeightsOnly):
    """A safetensors file, an ``….index.json``, or a folder with either, as a `Source`.

    Attributes:
        config: contents of ``config.json`` beside the weights; ``None`` where there is none.
        folder: where the files are.
    """

    def __init__(self, path: Folder) -> None:
        """Read the headers.

        Raises:
            CheckpointError: there are no such weights, or a header, the index or ``config.json`` is damaged.
        """
        is_file = path.name.endswith((".safetensors", ".json")) and path.is_file()
        self.folder: Folder = path.parent if is_file else path
        self.place = str(path)
        self.kind = "Hugging Face folder"
        self.config: dict[str, Any] | None = None
        self._reader = ShardReader(self.folder, _FIX)
        notes: list[str] = []
        try:
            if is_file and path.name.endswith(".safetensors"):
                self.kind = "safetensors file"
                files = self._headers([path.name])
            else:
                self.config = _document(self.folder / CONFIG)
                files = self._find(path.name if is_file else None, notes)
            self._file = {key: file for file, keys in files.items() for key in keys}
            if sum(map(len, files.values())) > len(self._file):
                raise CheckpointError(f"'{path}': the same tensor is in several of its files; {_FIX}")
        except BaseException:
            self._reader.__exit__()
            raise
        entries = {key: self._reader.entries(file)[key] for key, file in sorted(self._file.items())}
        self.tensors: Mapping[str, TensorInfo] = {
            f"model/{key}": TensorInfo(DTYPES[stored.dtype], stored.shape) for key, stored in entries.items()
        }
        self.notes: Sequence[str] = tuple(notes)

    def __exit__(self, *exc: object) -> None:
        self._reader.__exit__()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        key = name.removeprefix("model/")
        lengths = self.tensors[name].shape
        shard = Shard(file=self._file[key], key=key, offsets=(0,) * len(lengths), lengths=lengths, hash="")
        return self._reader.read(shard, box)

    def _find(self, index: str | None, notes: list[str]) -> dict[str, list[str]]:
        """Map the files of a folder to the keys to read from each."""
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        there = [name for name in names if name.endswith(".safetensors")]
        indices = [name for name in names if name.endswith(".safetensors.index.json")]
        if index is None and SINGLE not in there and (INDEX in indices or len(indices) == 1):
            index = INDEX if INDEX in indices else indices[0]
        if index is not None:
            return self._indexed(index, notes)
        if SINGLE in there:
            there = [SINGLE]
        matches = [_PART.fullmatch(name) for name in there]
        parts = [match for match in matches if match is not None]
        if parts and len(parts) == len(there):
            return self._headers(_all_parts(self.folder, parts, notes))
        if len(there) != 1:
            found = f"{len(there)} that do not say which belongs to it" if there else "none"
            raise CheckpointError(
                f"'{self.folder}': of {SINGLE}, {INDEX} and other .safetensors files there is {found}"
            )
        if there[0].startswith("adapter_"):
            notes.append(f"'{there[0]}' holds adapters only, not the model that they belong to")
        return self._headers(there)

    def _headers(self, files: list[str]) -> dict[str, list[str]]:
        return {file: list(self._reader.entries(file)) for file in files}

    def _indexed(self, index: str, notes: list[str]) -> dict[str, list[str]]:
        path = self.folder / index
        places = (_document(path) or {}).get("weight_map")
        if not isinstance(places, dict) or not all(map(_is_plain, places.values())):
            raise CheckpointError(f"'{path}' is damaged: weight_map does not map keys to file names; {_FIX}")
        files: dict[str, list[str]] = {file: [] for file in sorted(set(places.values()))}
        for key, file in places.items():
            files[file].append(key)
        missing = [file for file in files if not (self.folder / file).is_file()]
        if missing:
            raise CheckpointError(
                f"'{self.folder}': files that '{index}' names are missing: {short_list(missing)}; {_FIX}"
            )
        lost = [f"{key} in '{file}'" for file, keys in files.items() for key in keys if not self._holds(file, key)]
        if lost:
            raise CheckpointError(f"'{path}' names tensors that are not there: {short_list(lost)}; {_FIX}")
        extra = sum(len(self._reader.entries(file)) for file in files) - len(places)
        if extra:
            notes.append(f"{extra} tensors in the files are not in '{index}' and are left out")
        return files

    def _holds(self, file: str, key: str) -> bool:
        return key in self._reader.entries(file)


def _all_parts(folder: Folder, parts: list[re.Match[str]], notes: list[str]) -> list[str]:
    """List every file of a set without an index, if its names show that it is complete."""
    stem, number = parts[0][1], int(parts[0][3])
    wanted = [f"{stem}-{part + 1:05d}-of-{number:05d}.safetensors" for part in range(number)]
    there = {part[0] for part in parts}
    if there != set(wanted):
        missing = [name for name in wanted if name not in there] or sorted(there - set(wanted))
        raise CheckpointError(
            f"'{folder}' has no {INDEX}, and not one complete set of files: {short_list(missing)}; {_FIX}"
        )
    notes.append(f"there is no {INDEX}; the {number} files were taken as their names say")
    return wanted


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and name == PurePosixPath(name).name and name != ".."


def _document(path: Folder) -> dict[str, Any] | None:
    """Read a JSON object; ``None`` where there is no such file."""
    if not path.is_file():
        return None
    try:
        data = parsed_json(read_small(path, LARGEST_MANIFEST))
        if not isinstance(data, dict):
            raise ValueError(f"it holds {data!r:.40}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is damaged: {error}; {_FIX}") from None
    return data
