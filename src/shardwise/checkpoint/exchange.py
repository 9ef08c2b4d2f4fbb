"""Small messages between the ranks of the default group: JSON as bytes, never pickles; one process needs no group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError, ModelError, ShardwiseError, UserError

_KINDS: dict[str, type[ShardwiseError]] = {kind.__name__: kind for kind in (UserError, ModelError, CheckpointError)}

Failure = dict[str, str]


def rank() -> int:
    """This process in the default group; 0 without one."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """Ranks in the default group; 1 without one."""
    return dist.get_world_size() if _grouped() else 1


def gather_json(value: Any) -> list[Any]:
    """Every rank's value in rank order, on rank 0; an empty list elsewhere. Collective."""
    data = json.dumps(value).encode()
    if not _grouped():
        return [json.loads(data)]
    sizes = gather_counts(len(data))
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_wire())
    padded[: len(data)] = _to_tensor(data)
    parts = [torch.empty_like(padded) for _ in sizes] if rank() == 0 else None
    dist.gather(padded, parts, dst=0)
    return [_from_tensor(part[:size]) for part, size in zip(parts or [], sizes, strict=False)]


def broadcast_json(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    data = json.dumps(value).encode()
    if not _grouped():
        return json.loads(data)
    size = torch.tensor([len(data)], dtype=torch.int64, device=_wire())
    dist.broadcast(size, src=0)
    wire = _to_tensor(data) if rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=_wire())
    dist.broadcast(wire, src=0)
    return _from_tensor(wire)


def gather_counts(count: int) -> list[int]:
    """Every rank's number in rank order, on every rank. Collective."""
    if not _grouped():
        return [count]
    parts = [torch.zeros(1, dtype=torch.int64, device=_wire()) for _ in range(world_size())]
    dist.all_gather(parts, torch.tensor([count], dtype=torch.int64, device=_wire()))
    return [int(part) for part in parts]


def describe(error: Exception) -> Failure:
    """An exception as JSON: which one to raise on the other ranks, and its text."""
    kind = next((name for name, cls in reversed(_KINDS.items()) if isinstance(error, cls)), CheckpointError.__name__)
    text = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    return {"kind": kind, "text": text}


def revive(failure: Failure) -> ShardwiseError:
    """The exception that `describe` wrote down."""
    return _KINDS[failure["kind"]](failure["text"])


def agree(error: Exception | None) -> None:
    """Raise the error of the first rank that has one, on every rank; return where none has. Collective."""
    found = gather_json(describe(error) if error else None)
    first = broadcast_json(next((failure for failure in found if failure), None))
    if first:
        raise revive(first) from (None if isinstance(error, ShardwiseError) else error)


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _wire() -> torch.device:
    """Where the group's backend wants its tensors."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_wire())


def _from_tensor(wire: torch.Tensor) -> Any:
    return json.loads(wire.cpu().numpy().tobytes())
