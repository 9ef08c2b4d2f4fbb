"""Detect which tool wrote a checkpoint, from file names and first bytes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwise.checkpoint.format import MANIFEST
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.storage.local_storage import Folder, RangeReader, folder_of
from shardwise.errors import UserError

STATE_DICTS = (".pt", ".pth", ".bin", ".ckpt")
ACCEPTED = (
    "a checkpoint, its run's folder or the folder of its checkpoints (shardwise); a .safetensors file or a folder with "
    "model.safetensors or its index (Hugging Face); a folder with .metadata and .distcp files, or with its pieces in "
    "safetensors (PyTorch DCP); a folder of accelerator.save_state (Accelerate); a folder with 'latest' and "
    "global_step… (DeepSpeed); a .pt, .pth, .bin or .ckpt file (PyTorch, Lightning)"
)
_STEP = re.compile(r"step-\d{8,}")
_ZERO = re.compile(r"(\w*zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_SHOWN = 8


@dataclass(frozen=True)
class _Here:
    """Path of a folder and the names in it."""

    path: Folder
    names: frozenset[str]

    def has(self, *names: str) -> bool:
        """Return whether any of these names exists."""
        return any(name in self.names for name in names)

    def ends(self, *ends: str) -> bool:
        """Return whether any name has this suffix."""
        return any(name.endswith(ends) for name in self.names)


def open_source(place: str | Folder) -> Source:
    """Open a checkpoint of any tool.

    ``place`` is a path or URL of a file or folder.

    Raises:
        UserError: there is nothing, or no known format; names what was found and what is accepted.
        CheckpointError: it is a checkpoint, but cannot be read.
    """
    path = folder_of(place)
    try:
        if path.is_file():
            found = _of_file(path)
            there = f"'{path}' is a file of another kind"
        elif path.is_dir():
            here = _Here(path, frozenset(item.name for item in path.iterdir()))
            found = _of_folder(here)
            there = _in_words(here)
        else:
            raise UserError(f"'{place}' does not exist; give {ACCEPTED}")
    except OSError as error:
        raise UserError(
            f"'{place}' cannot be read: {error.strerror or error}; give a place that you may read"
        ) from None
    if found is None:
        raise UserError(f"{there}; give {ACCEPTED}")
    return found()


def _of_file(path: Folder) -> Callable[[], Source] | None:
    name, parent = path.name, path.parent
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return lambda: _hugging_face(path)
    if name.endswith(".bin.index.json"):
        return lambda: _state_dict(parent)
    if name == MANIFEST:
        return lambda: _own(parent)
    if name == ".metadata" or (name.endswith(".distcp") and (parent / ".metadata").is_file()):
        return lambda: _dcp(parent)
    if _ZERO.fullmatch(name):
        return lambda: _deepspeed(parent)
    if name.endswith(STATE_DICTS) or _first_bytes(path).startswith((_ZIP, _PICKLE)):
        return lambda: _state_dict(path)
    return None


def _of_folder(here: _Here) -> Callable[[], Source] | None:
    path = here.path
    if _is_own(here):
        return lambda: _own(path)
    if _is_deepspeed(here):
        return lambda: _deepspeed(path)
    if _is_accelerate(here):
        return lambda: _accelerate(path)
    if here.has(".metadata") or here.ends(".distcp"):
        return lambda: _dcp(path)
    if any(name.startswith("shard-") and name.endswith(".safetensors") for name in here.names):
        return lambda: _dcp_safetensors(path)
    if here.ends(".safetensors", ".safetensors.index.json"):
        return lambda: _hugging_face(path)
    if here.has("pytorch_model.bin", "pytorch_model.bin.index.json"):
        return lambda: _state_dict(path)
    files = [name for name in here.names if name.endswith(STATE_DICTS)]
    if len(files) == 1:
        return lambda: _state_dict(path / files[0])
    return None


def _is_own(here: _Here) -> bool:
    from shardwise.checkpoint.format import checkpoint_in

    likely = here.has(MANIFEST, "checkpoints") or any(_STEP.fullmatch(name) for name in here.names)
    return likely and checkpoint_in(here.path) is not None


def _is_deepspeed(here: _Here) -> bool:
    if any(_ZERO.fullmatch(name) for name in here.names):
        return True
    if not here.has("latest"):
        return False
    tag = _first_bytes(here.path / "latest", 200).decode(errors="replace").strip()
    inner = here.path / tag
    return tag in here.names and inner.is_dir() and any(_ZERO.fullmatch(item.name) for item in inner.iterdir())


def _is_accelerate(here: _Here) -> bool:
    if any(name.startswith("pytorch_model_fsdp") for name in here.names):
        return True
    weights = here.ends(".safetensors") or here.has("pytorch_model.bin", "pytorch_model.bin.index.json")
    return weights and any(name.startswith(("random_states_", "optimizer.bin")) for name in here.names)


def _first_bytes(path: Folder, count: int = 4) -> bytes:
    with RangeReader(path) as reader:
        return reader.read(0, min(count, reader.size))


def _in_words(here: _Here) -> str:
    names = sorted(here.names)
    if not names:
        return f"'{here.path}' is empty"
    steps = [name for name in names if _STEP.fullmatch(name) or name.startswith(("checkpoint-", "epoch", "step"))]
    inner = f"; is it one of those inside, such as '{here.path / max(steps)}'?" if steps else ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"'{here.path}' holds {_listed(names[:_SHOWN])}{more}, which is not a known checkpoint format{inner}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _own(path: Folder) -> Source:
    from shardwise.checkpoint.readers.shardwise_reader import OwnSource

    return OwnSource(path)


def _hugging_face(path: Folder) -> Source:
    from shardwise.checkpoint.readers.huggingface import HuggingFaceSource

    return HuggingFaceSource(path)


def _dcp(path: Folder) -> Source:
    from shardwise.checkpoint.readers.dcp import DcpSource

    return DcpSource(path)


def _dcp_safetensors(path: Folder) -> Source:
    from shardwise.checkpoint.readers.dcp_safetensors import DcpSafetensorsSource

    return DcpSafetensorsSource(path)


def _accelerate(path: Folder) -> Source:
    from shardwise.checkpoint.readers.accelerate import AccelerateSource

    return AccelerateSource(path)


def _deepspeed(path: Folder) -> Source:
    from shardwise.checkpoint.readers.deepspeed import DeepSpeedSource

    return DeepSpeedSource(path)


def _state_dict(path: Folder) -> Source:
    from shardwise.checkpoint.readers.state_dict import StateDictSource

    return StateDictSource(path)
