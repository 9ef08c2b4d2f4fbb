"""`load_weights`: fill a live, possibly sharded model from Hugging Face safetensors, slice by slice."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from shardwise.checkpoint.format import Shard
from shardwise.checkpoint.layout import Slot, slots_of, transient_names
from shardwise.checkpoint.shards import ShardReader, fill
from shardwise.errors import ModelError, did_you_mean

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth")
_CONVERT = (
    "pickled weights can run code and are not loaded; convert them once where you trust them: "
    "model = AutoModel.from_pretrained(folder); model.save_pretrained(new_folder)"
)


def load_weights(model: nn.Module, source: Path) -> None:
    """Fill parameters and persistent buffers of ``model`` in place, each cast to the dtype it has in the model.

    ``source`` is a ``.safetensors`` file, or a folder with ``model.safetensors`` or
    ``model.safetensors.index.json``. Each rank reads only the slices that it holds; no rank talks to another. Of
    tied tensors one name is enough. Keys of the model's non-persistent buffers are skipped. Nothing is changed
    before all names and shapes were found to match.

    Raises:
        ModelError: there are no such weights, a key is missing, unexpected or has another shape (all are listed), or
            a file is damaged.
    """
    folder, files = _find(source)
    slots = slots_of(model)
    with ShardReader(folder, "download or export the weights again", ModelError) as reader:
        where = _places(folder, files, reader)
        skipped = transient_names(model)
        known = {name for slot in slots for name in slot.names}
        problems: list[str] = []
        jobs: list[tuple[Slot, Shard]] = []
        for slot in slots:
            present = [name for name in slot.names if name in where]
            if not present:
                tied = f" (nor its tied names {', '.join(slot.aliases)})" if slot.aliases else ""
                problems.append(f"{slot.name}{tied}: not in '{source}'{did_you_mean(slot.name, set(where) - known)}")
            for name in present:
                shape = reader.shape(where[name], name)
                if shape != tuple(slot.tensor.shape):
                    problems.append(f"{name}: {shape} in '{source}', {tuple(slot.tensor.shape)} in the model")
            if present:
                shape = tuple(slot.tensor.shape)
                shard = Shard(file=where[present[0]], key=present[0], offsets=(0,) * len(shape), lengths=shape, hash="")
                jobs.append((slot, shard))
        unexpected = [name for name in where if name not in known and name not in skipped]
        problems += [f"{name}: in '{source}', not in the model" for name in unexpected]
        if problems:
            raise ModelError(*problems)
        for slot, shard in jobs:
            fill(slot.tensor, [shard], reader)


def _find(source: Path) -> tuple[Path, list[str]]:
    """The folder, and the files in it to read; an index is read by `_places`."""
    if source.is_file():
        if source.suffix != ".safetensors":
            raise ModelError(f"weights '{source}': {_CONVERT if source.suffix in _PICKLES else 'not safetensors'}")
        return source.parent, [source.name]
    for name in (_INDEX, _SINGLE):
        if (source / name).is_file():
            return source, [name]
    if not source.is_dir():
        raise ModelError(f"weights '{source}' do not exist; give a .safetensors file or a folder with {_SINGLE}")
    if any(path.suffix in _PICKLES for path in source.iterdir()):
        raise ModelError(f"weights '{source}': {_CONVERT}")
    raise ModelError(f"weights '{source}': neither {_SINGLE} nor {_INDEX} is there")


def _places(folder: Path, files: list[str], reader: ShardReader) -> dict[str, str]:
    """Key to the file that holds it."""
    if files != [_INDEX]:
        return {key: file for file in files for key in reader.keys(file)}
    path = folder / _INDEX
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(name, str) and name == Path(name).name for name in places.values()):
            raise ValueError("weight_map does not map keys to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"'{path}' is damaged: {error}; {reader.fix}") from None
    held = {file: set(reader.keys(file)) for file in sorted(set(places.values()))}
    lost = [
        f"{key}: the index says '{file}', but it is not there" for key, file in places.items() if key not in held[file]
    ]
    if lost:
        raise ModelError(*lost)
    return dict(places)
