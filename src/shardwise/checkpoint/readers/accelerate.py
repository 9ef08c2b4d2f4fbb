"""Read folders of Accelerate's ``save_state``: FSDP (sharded or full), single process, DDP."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.readers.dcp import DcpSource, whole_number
from shardwise.checkpoint.readers.huggingface import INDEX, SINGLE, HuggingFaceSource
from shardwise.checkpoint.readers.inert import StoredTensor
from shardwise.checkpoint.readers.reader import Source, TensorInfo
from shardwise.checkpoint.readers.restricted import printable
from shardwise.checkpoint.readers.state_dict import StateDictSource
from shardwise.checkpoint.readers.state_names import Path, clean_names, sort_out
from shardwise.checkpoint.readers.torch_file import TorchFile
from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.errors import CheckpointError

FSDP_MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"
_WHOLE = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_OF_RANK = re.compile(rf"({FSDP_MODEL}|{OPTIMIZER})(_\d+)?_rank\d+\.bin")
_SECOND = re.compile(rf"({FSDP_MODEL}|{OPTIMIZER}|model|pytorch_model)_([1-9]\d*)(\.bin|\.safetensors)?")
_STATE = re.compile(r"(scheduler|sampler|dl_state_dict|random_states|custom_checkpoint|scaler)[_\d]*\.(bin|pkl|pt)")
_SHOWN = 4


class AccelerateSource:
    """Folder of Accelerate's ``save_state``, as a `Source`.

    Or of ``save_fsdp_model`` and ``save_fsdp_optimizer``.
    """

    def __init__(self, path: Folder) -> None:
        """Find the parts and read their metadata.

        Raises:
            CheckpointError: the weights are missing, damaged, or readable only by the same ranks; or a file asks to
                run code.
        """
        self.place = str(path)
        names = {item.name for item in path.iterdir()} if path.is_dir() else set()
        self._weights = self._open_weights(path, names)
        self._optimizer: DcpSource | _OptimizerFile | None = None
        try:
            self._optimizer = self._open_optimizer(path, names)
        except BaseException:
            self._weights.__exit__()
            raise
        theirs = [name.removeprefix("model/") for name in self._weights.tensors if name.startswith("model/")]
        cleaned = clean_names(theirs)
        self._theirs = {f"model/{ours}": f"model/{name}" for ours, name in zip(cleaned, theirs, strict=True)}
        if len(self._theirs) != len(theirs):
            raise CheckpointError(f"'{path}': two tensors have the same name without wrapper prefixes")
        ours = {name: known for known, name in self._theirs.items()}
        tensors = {known: self._weights.tensors[name] for known, name in self._theirs.items()}
        self.aliases: Mapping[str, str] = {
            f"model/{clean_names([alias.removeprefix('model/')])[0]}": ours[name]
            for alias, name in self._weights.aliases.items()
            if name in ours
        }
        notes = list(self._weights.notes)
        self.optimizer: Mapping[str, Any] | None = None
        self.step: int | None = self._weights.step
        if self._optimizer is not None:
            tensors |= {n: info for n, info in self._optimizer.tensors.items() if n.startswith("optimizer/")}
            self.optimizer = self._optimizer.optimizer
            self.step = self._optimizer.step if self.step is None else self.step
            notes += self._optimizer.notes
        self.tensors: Mapping[str, TensorInfo] = dict(sorted(tensors.items()))
        self.notes: Sequence[str] = tuple(map(printable, notes + _left_over(names)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._weights.__exit__(*exc)
        if self._optimizer is not None:
            self._optimizer.__exit__(*exc)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        if name in self._theirs:
            return self._weights.read(self._theirs[name], box)
        if self._optimizer is None:
            raise KeyError(name)
        return self._optimizer.read(name, box)

    def _open_weights(self, path: Folder, names: set[str]) -> Source:
        self.kind = "Accelerate FSDP folder"
        if f"{FSDP_MODEL}_0" in names:
            return DcpSource(path / f"{FSDP_MODEL}_0")
        if f"{FSDP_MODEL}.bin" in names:
            return StateDictSource(path / f"{FSDP_MODEL}.bin")
        of_ranks = sorted(name for name in names if _OF_RANK.fullmatch(name) and name.startswith(FSDP_MODEL))
        if of_ranks:
            raise CheckpointError(
                f"'{path}' has '{of_ranks[0]}' and its like, a file of each rank that only the same ranks can load; "
                "load it there and save it with FSDP's SHARDED_STATE_DICT or FULL_STATE_DICT and use_dcp=True"
            )
        self.kind = "Accelerate folder"
        if SINGLE in names or INDEX in names:
            return HuggingFaceSource(path)
        full = next((name for name in _WHOLE if name in names), None)
        if full is not None:
            return StateDictSource(path / full if full.endswith(".bin") else path)
        raise CheckpointError(f"'{path}' has no weights of Accelerate: no {FSDP_MODEL}_0, {FSDP_MODEL}.bin or {SINGLE}")

    def _open_optimizer(self, path: Folder, names: set[str]) -> DcpSource | _OptimizerFile | None:
        if f"{OPTIMIZER}_0" in names:
            return DcpSource(path / f"{OPTIMIZER}_0")
        return _OptimizerFile(path / f"{OPTIMIZER}.bin") if f"{OPTIMIZER}.bin" in names else None


class _OptimizerFile:
    """One ``optimizer.bin``: FSDP's with names, or a plain ``state_dict`` with numbers."""

    def __init__(self, path: Folder) -> None:
        self._file = TorchFile(path)
        try:
            self._values: dict[str, Any] = {}
            paths: dict[str, Path] = {}
            for where, leaf in _leaves(self._file.content, (OPTIMIZER,)):
                key = ".".join(map(str, where))
                while key in paths:  # two paths may read the same
                    key += "'"
                paths[key], self._values[key] = where, leaf
            stored_keys = {key: leaf for key, leaf in self._values.items() if isinstance(leaf, StoredTensor)}
            found = sort_out(paths, stored_keys, self._value)
            if odd := [printable(name) for name in found.tensors if not name.isprintable()]:
                raise CheckpointError(f"'{path}' has names with control characters: {short_list(odd)}; save it again")
            self._stored = {n: stored_keys[key] for n, key in found.tensors.items() if n.startswith("optimizer/")}
            self.tensors = {name: TensorInfo(stored.dtype, stored.shape) for name, stored in self._stored.items()}
            self.optimizer = found.optimizer
            self.notes = found.notes
            counted = [key for name, key in sorted(found.tensors.items()) if name.endswith("/step")]
            self.step = whole_number(self._value(counted[0])) if counted else None
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        try:
            return self._file.read(self._stored[name], box)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def _value(self, key: str) -> Any:
        leaf = self._values[key]
        if not isinstance(leaf, StoredTensor):
            return leaf
        if math.prod(leaf.shape) != 1:
            raise CheckpointError(
                f"{printable(key)} in '{self._file.path}' is a tensor of {list(leaf.shape)}, not one number"
            )
        return self._file.read(leaf, Box((0,) * len(leaf.shape), leaf.shape)).item()


def _leaves(value: Any, where: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values in dicts, and in lists of dicts or tensors, each with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*where, str(key)))
    elif isinstance(value, list) and any(isinstance(inner, dict | list | StoredTensor) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*where, number))
    else:
        yield where, value


def _left_over(names: set[str]) -> list[str]:
    """Describe the files that are not converted."""
    state, second = sorted(filter(_STATE.fullmatch, names)), sorted(filter(_SECOND.fullmatch, names))
    ranks = sorted(filter(_OF_RANK.fullmatch, names))
    notes = []
    if state:
        notes.append(f"not carried over: {_listed(state)} (schedulers, data position and generators of the program)")
    if second:
        notes.append(f"there are several models or optimizers; only the first is carried over, not {_listed(second)}")
    if ranks:
        notes.append(f"{_listed(ranks)}: can only be loaded by the same ranks and is not carried over")
    return notes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
