"""Read ``torch.save`` state dicts: plain, Lightning's, or ``pytorch_model*.bin`` folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Self

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.format import LARGEST_MANIFEST, parsed_json, short_list
from shardwise.checkpoint.readers.reader import TensorInfo
from shardwise.checkpoint.readers.restricted import printable
from shardwise.checkpoint.readers.state_names import GROUPS, Path, sort_out
from shardwise.checkpoint.readers.torch_file import StoredTensor, TorchFile
from shardwise.checkpoint.storage.local_storage import Folder, read_small
from shardwise.errors import CheckpointError, UserError

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_USUAL = ("state_dict", "model_state_dict", "model", "module")  # keys of the weights
_OTHERS = ("optim", "rng", "sched", "scaler", "callback", "loop")  # in keys of anything but weights
_COUNTERS = ("step", "global_step", "epoch", "iteration")
_LIGHTNING = "pytorch-lightning_version"
_FIX = "download or export the weights again"


class StateDictSource:
    """``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file, or folder of them, as a `Source`.

    A folder has `SINGLE` or `INDEX`.
    """

    def __init__(self, path: Folder) -> None:
        """Read everything except the tensors.

        Raises:
            CheckpointError: a file is missing or damaged, or asks to run code.
            UserError: there are no weights in it, or several candidate dicts.
        """
        self.place = str(path)
        self.kind = "PyTorch state dict"
        self.aliases: Mapping[str, str] = {}
        self.optimizer: Mapping[str, Any] | None = None
        self._files: dict[str, TorchFile] = {}
        self._file_of: Mapping[str, str] = {}  # a tensor's file, where there are several
        try:
            self._sort_out(self._open(path))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        file, stored = self._places[name]
        try:
            return file.read(stored, box)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def _open(self, path: Folder) -> dict[Any, Any]:
        """Load the saved dict, or merge those of several files."""
        if not path.is_dir():
            return self._dict_of(path)
        if (path / SINGLE).is_file():
            return self._dict_of(path / SINGLE)
        indices = [item.name for item in path.iterdir() if item.name.endswith(".bin.index.json")]
        if INDEX not in indices and len(indices) != 1:
            raise UserError(f"'{path}' has neither {SINGLE} nor {INDEX}; give the file itself")
        return self._indexed(path, INDEX if INDEX in indices else indices[0])

    def _dict_of(self, path: Folder) -> dict[Any, Any]:
        file = self._files[path.name] = TorchFile(path)
        if not isinstance(file.content, dict):
            what = type(file.content).__name__
            raise UserError(f"'{path}' holds a {what}, not a dict of tensors; save model.state_dict() instead")
        return file.content

    def _indexed(self, folder: Folder, index: str) -> dict[Any, Any]:
        self.kind = "PyTorch state dict in several files"
        try:
            places = parsed_json(read_small(folder / index, LARGEST_MANIFEST))["weight_map"]
            if not all(name and name == PurePosixPath(name).name and name != ".." for name in places.values()):
                raise ValueError("weight_map does not map names to file names")
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"'{folder / index}' is damaged: {error!r:.200}; {_FIX}") from None
        contents = {file: self._dict_of(folder / file) for file in sorted(set(places.values()))}
        lost = [f"{n} in '{file}'" for n, file in places.items() if not isinstance(contents[file].get(n), StoredTensor)]
        if lost:
            raise CheckpointError(f"'{folder / index}' names tensors that are not there: {short_list(lost)}; {_FIX}")
        self._file_of = places
        return {name: contents[file][name] for name, file in places.items()}

    def _sort_out(self, content: dict[Any, Any]) -> None:
        """Fill in the attributes of a source."""
        if _LIGHTNING in content:
            self.kind = "Lightning checkpoint"
        root = _find_weights(content, self.place)
        entries: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for path, value in _leaves(content, ()):
            key = ".".join(map(str, path))
            while key in entries:
                key += "'"
            entries[key] = value
            at_top = len(path) == 1 and isinstance(value, StoredTensor) and _is_name(path[0])
            is_weight = path[: len(root)] == root if root else at_top
            paths[key] = ("model", *path[len(root) :]) if is_weight else path
        stored = {key: value for key, value in entries.items() if isinstance(value, StoredTensor)}

        def small(key: str) -> Any:
            return _with_numbers(entries[key], self._file(key))

        try:
            found = sort_out(paths, stored, small)
            step = small(found.step_key) if found.step_key is not None else None
        except CheckpointError as error:
            raise CheckpointError(f"'{self.place}': {error}") from None
        step = int(step) if isinstance(step, float) and step.is_integer() else step
        self.step = step if isinstance(step, int) and step >= 0 else None
        if odd := [printable(name) for name in found.tensors if not name.isprintable()]:
            raise CheckpointError(f"'{self.place}' has names with control characters: {short_list(odd)}; {_FIX}")
        self._places = {name: (self._file(key), stored[key]) for name, key in found.tensors.items()}
        self.aliases = _tied(self._places)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.dtype, tensor.shape)
            for name, (_, tensor) in self._places.items()
            if name not in self.aliases
        }
        self.optimizer = found.optimizer
        under = [f"the weights are those under '{root[-1]}'"] if root and root[-1] not in _USUAL else []
        self.notes: Sequence[str] = tuple(map(printable, (*under, *found.notes)))

    def _file(self, key: str) -> TorchFile:
        return self._files[self._file_of[key]] if self._file_of else next(iter(self._files.values()))


def _find_weights(content: Mapping[Any, Any], place: str) -> Path:
    """Find the keys that lead to the dict of the weights; none if the tensors are at the top."""
    root: Path = ()
    while True:
        inner = [name for name, value in content.items() if isinstance(value, dict) and _may_be_weights(name, value)]
        tensors = [name for name, value in content.items() if isinstance(value, StoredTensor) and _is_name(name)]
        usual = [name for name in _USUAL if name in inner]
        if root and (tensors or usual != inner or len(usual) != 1):
            return root
        if not root and not inner and tensors:
            return root
        candidates = usual or inner
        if len(candidates) != 1 or (tensors and not usual):
            found = [f"a dict of tensors under '{name}'" for name in candidates]
            found += [f"{len(tensors)} tensors beside them"] if tensors else []
            rule = "which of them is the model is not clear" if found else "none of its values is or contains a tensor"
            what = ", ".join(found[:10]) or f"a dict of {len(content)}"
            raise UserError(f"'{place}' holds {what}; {rule}. Save the model's state_dict() in a separate file")
        root = (*root, candidates[0])
        content = content[candidates[0]]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name not in _COUNTERS and not name.endswith("rng_state")


def _may_be_weights(name: Any, value: dict[Any, Any]) -> bool:
    """Return whether there are tensors below, none of them an optimizer's."""
    if not isinstance(name, str) or GROUPS in value or any(word in name.lower() for word in _OTHERS):
        return False
    return any(
        isinstance(inner, StoredTensor) or (isinstance(inner, dict) and _may_be_weights(name, inner))
        for name, inner in value.items()
    )


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its keys.

    Lists of dicts or tensors are walked; parameter groups are leaves.
    """
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            step = name if isinstance(name, int) else str(name)
            yield from [((*path, step), inner)] if step == GROUPS else _leaves(inner, (*path, step))
    elif isinstance(value, list | tuple) and any(isinstance(inner, dict | StoredTensor) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _with_numbers(value: Any, file: TorchFile) -> Any:
    """Replace one-element tensors by their number, also inside parameter groups."""
    if isinstance(value, StoredTensor) and value.numel == 1:
        return file.read(value, TensorInfo(value.dtype, value.shape).full).item()
    if isinstance(value, list):
        return [_with_numbers(inner, file) for inner in value]
    return {key: _with_numbers(inner, file) for key, inner in value.items()} if isinstance(value, dict) else value


def _tied(places: Mapping[str, tuple[TorchFile, StoredTensor]]) -> dict[str, str]:
    """Find weights with the same elements of the same storage, each mapped to the first name."""
    first: dict[tuple[int, StoredTensor], str] = {}
    tied: dict[str, str] = {}
    for name, (file, stored) in places.items():
        if name.startswith("model/") and stored.numel:
            known = first.setdefault((id(file), stored), name)
            if known != name:
                tied[name] = known
    return tied
