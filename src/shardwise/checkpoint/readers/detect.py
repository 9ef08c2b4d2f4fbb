"""Detect which tool wrote a checkpoint, from file names and first bytes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwise.checkpoint.format import MANIFEST
from shardwise.checkpoint.readers.reader import Source
from shardwise.checkpoint.storage.local_storage import Folder, RangeReader, folder_of
from shardwise.errors import UserError
from shardwise.import_object import import_path

STATE_DICTS = (".pt", ".pth", ".bin", ".ckpt")
_STEP = re.compile(r"step-\d{8,}")
_ZERO = re.compile(r"(\w*zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_DCP_PIECE = re.compile(r"shard-.*\.safetensors", re.DOTALL)
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_SHOWN = 8


@dataclass(frozen=True)
class Listing:
    """A folder's path and the names in it."""

    path: Folder
    names: frozenset[str]

    def has(self, *names: str) -> bool:
        """Return whether any of these names exists."""
        return any(name in self.names for name in names)

    def ends(self, *ends: str) -> bool:
        """Return whether any name has this suffix."""
        return any(name.endswith(ends) for name in self.names)


@dataclass(frozen=True)
class Format:
    """One kind of checkpoint: how it is known, and who reads it.

    ``accepts`` tells users what to give. ``source`` is the `Source` that is made of a path, as ``module:name``; it is
    imported when it is needed. ``file`` and ``folder`` look at a file's path or a folder's listing and return the path
    that the source is made of, ``None`` where it is another kind.
    """

    accepts: str
    source: str
    file: Callable[[Folder], Folder | None] = lambda path: None
    folder: Callable[[Listing], Folder | None] = lambda here: None


def open_source(place: str | Folder) -> Source:
    """Open a checkpoint of any tool.

    ``place`` is a path or URL of a file or folder.

    Raises:
        UserError: there is nothing, or no known format; names what was found and what is accepted.
        CheckpointError: it is a checkpoint, but cannot be read.
    """
    path = folder_of(place)
    accepted = "; ".join(one.accepts for one in FORMATS)
    try:
        if path.is_file():
            found = ((one, one.file(path)) for one in FORMATS)
            there = f"'{path}' is a file of another kind"
        elif path.is_dir():
            here = Listing(path, frozenset(item.name for item in path.iterdir()))
            found = ((one, one.folder(here)) for one in FORMATS)
            there = _in_words(here)
        else:
            raise UserError(f"'{place}' does not exist; give {accepted}")
        kind, inner = next(((kind, inner) for kind, inner in found if inner is not None), (None, path))
    except OSError as error:
        raise UserError(
            f"'{place}' cannot be read: {error.strerror or error}; give a place that you may read"
        ) from None
    if kind is None:
        raise UserError(f"{there}; give {accepted}")
    source: Source = import_path(kind.source)(inner)
    return source


def _is_own(here: Listing) -> bool:
    from shardwise.checkpoint.format import checkpoint_in

    likely = here.has(MANIFEST, "checkpoints") or any(_STEP.fullmatch(name) for name in here.names)
    return likely and checkpoint_in(here.path) is not None


def _is_deepspeed(here: Listing) -> bool:
    if any(_ZERO.fullmatch(name) for name in here.names):
        return True
    if not here.has("latest"):
        return False
    tag = _first_bytes(here.path / "latest", 200).decode(errors="replace").strip()
    inner = here.path / tag
    return tag in here.names and inner.is_dir() and any(_ZERO.fullmatch(item.name) for item in inner.iterdir())


def _is_accelerate(here: Listing) -> bool:
    if any(name.startswith("pytorch_model_fsdp") for name in here.names):
        return True
    weights = here.ends(".safetensors") or here.has("pytorch_model.bin", "pytorch_model.bin.index.json")
    return weights and any(name.startswith(("random_states_", "optimizer.bin")) for name in here.names)


def _first_bytes(path: Folder, count: int = 4) -> bytes:
    with RangeReader(path) as reader:
        return reader.read(0, min(count, reader.size))


def _in_words(here: Listing) -> str:
    names = sorted(here.names)
    if not names:
        return f"'{here.path}' is empty"
    steps = [name for name in names if _STEP.fullmatch(name) or name.startswith(("checkpoint-", "epoch", "step"))]
    inner = f"; is it one of those inside, such as '{here.path / max(steps)}'?" if steps else ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"'{here.path}' holds {_listed(names[:_SHOWN])}{more}, which is not a known checkpoint format{inner}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _dcp_file(path: Folder) -> Folder | None:
    is_piece = path.name.endswith(".distcp") and (path.parent / ".metadata").is_file()
    return path.parent if path.name == ".metadata" or is_piece else None


def _state_dict_file(path: Folder) -> Folder | None:
    if path.name.endswith(".bin.index.json"):
        return path.parent
    return path if path.name.endswith(STATE_DICTS) or _first_bytes(path).startswith((_ZIP, _PICKLE)) else None


def _state_dict_folder(here: Listing) -> Folder | None:
    if here.has("pytorch_model.bin", "pytorch_model.bin.index.json"):
        return here.path
    files = [name for name in here.names if name.endswith(STATE_DICTS)]
    return here.path / files[0] if len(files) == 1 else None


_READERS = "shardwise.checkpoint.readers"
# The first that knows a place reads it. DeepSpeed's and Accelerate's folders may hold Hugging Face's files, too; the
# last one goes by a file's first bytes.
FORMATS: list[Format] = [
    Format(
        "a checkpoint, its run's folder or the folder of its checkpoints (shardwise)",
        f"{_READERS}.shardwise_reader:OwnSource",
        file=lambda path: path.parent if path.name == MANIFEST else None,
        folder=lambda here: here.path if _is_own(here) else None,
    ),
    Format(
        "a folder with 'latest' and global_step… (DeepSpeed)",
        f"{_READERS}.deepspeed:DeepSpeedSource",
        file=lambda path: path.parent if _ZERO.fullmatch(path.name) else None,
        folder=lambda here: here.path if _is_deepspeed(here) else None,
    ),
    Format(
        "a folder of accelerator.save_state (Accelerate)",
        f"{_READERS}.accelerate:AccelerateSource",
        folder=lambda here: here.path if _is_accelerate(here) else None,
    ),
    Format(
        "a folder with .metadata and .distcp files (PyTorch DCP)",
        f"{_READERS}.dcp:DcpSource",
        file=_dcp_file,
        folder=lambda here: here.path if here.has(".metadata") or here.ends(".distcp") else None,
    ),
    Format(
        "a folder of shard-….safetensors (PyTorch DCP)",
        f"{_READERS}.dcp_safetensors:DcpSafetensorsSource",
        folder=lambda here: here.path if any(map(_DCP_PIECE.fullmatch, here.names)) else None,
    ),
    Format(
        "a .safetensors file or a folder with model.safetensors or its index (Hugging Face)",
        f"{_READERS}.huggingface:HuggingFaceSource",
        file=lambda path: path if path.name.endswith((".safetensors", ".safetensors.index.json")) else None,
        folder=lambda here: here.path if here.ends(".safetensors", ".safetensors.index.json") else None,
    ),
    Format(
        "a .pt, .pth, .bin or .ckpt file (PyTorch, Lightning)",
        f"{_READERS}.state_dict:StateDictSource",
        file=_state_dict_file,
        folder=_state_dict_folder,
    ),
]
