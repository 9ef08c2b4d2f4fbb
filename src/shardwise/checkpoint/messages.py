"""Exchange small JSON messages between all ranks; a single process needs no group.

They use the default group or the given one; communication concurrent with training needs a separate group.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError, CheckpointMismatch, ModelError, ShardwiseError, UserError

_KINDS: dict[str, type[ShardwiseError]] = {  # smaller dtypes last
    kind.__name__: kind for kind in (UserError, ModelError, CheckpointError, CheckpointMismatch)
}

Failure = dict[str, str]
Result = TypeVar("Result")


def rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank in the default group, or in ``group``; 0 without one."""
    return 0 if _alone(group) else dist.get_rank(group)


def world_size() -> int:
    """Return the number of ranks in the default group; 1 without one."""
    return dist.get_world_size() if _grouped() else 1


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's value in rank order on rank 0; an empty list elsewhere. Collective."""
    data = json.dumps(value).encode()
    if _alone(group):
        return [json.loads(data)]
    sizes = gather_counts(len(data), group)
    if len(sizes) == 1:
        return [json.loads(data)]
    width = max(sizes[1:])  # rank 0 keeps its own, which may be far longer
    padded = _to_tensor(data[:width].ljust(width), group)
    parts = [torch.empty_like(padded) for _ in sizes] if rank(group) == 0 else None
    dist.gather(padded, parts, dst=0, group=group)
    if parts is None:
        return []
    others = zip(parts[1:], sizes[1:], strict=True)
    return [json.loads(data), *(_from_tensor(part[:size]) for part, size in others)]


def deal_json(values: Sequence[Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Send ``values[rank]`` to each rank; return what each rank sent here, in rank order. Collective."""
    texts = [json.dumps(value).encode() if value else b"" for value in values]
    if _alone(group):
        return [json.loads(text) if text else {} for text in texts]
    sent = [len(text) for text in texts]
    here = torch.empty(len(sent), dtype=torch.int64, device=_wire(group))
    dist.all_to_all_single(here, torch.tensor(sent, dtype=torch.int64, device=_wire(group)), group=group)
    sizes = here.tolist()
    wire = torch.empty(sum(sizes), dtype=torch.uint8, device=_wire(group))
    joined = b"".join(texts)
    data = _to_tensor(joined, group) if joined else wire[:0]
    dist.all_to_all_single(wire, data, output_split_sizes=sizes, input_split_sizes=sent, group=group)
    raw = wire.cpu().numpy().tobytes()
    ends = [*itertools.accumulate(sizes)]
    return [json.loads(raw[end - size : end]) if size else {} for end, size in zip(ends, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast rank 0's value to every rank. Collective."""
    data = json.dumps(value).encode()
    if _alone(group):
        return json.loads(data)
    size = torch.tensor([len(data)], dtype=torch.int64, device=_wire(group))
    dist.broadcast(size, src=0, group=group)
    wire = _to_tensor(data, group)
    if rank(group) != 0:
        wire = torch.empty(int(size), dtype=torch.uint8, device=_wire(group))
    dist.broadcast(wire, src=0, group=group)
    return _from_tensor(wire)


def gather_counts(count: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Gather every rank's number in rank order, on every rank. Collective."""
    if _alone(group):
        return [count]
    parts = [torch.zeros(1, dtype=torch.int64, device=_wire(group)) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.tensor([count], dtype=torch.int64, device=_wire(group)), group=group)
    return torch.cat(parts).tolist()


def describe(error: Exception) -> Failure:
    """Serialize an exception as JSON: its class on the other ranks, and its text."""
    kind = next((name for name, cls in reversed(_KINDS.items()) if isinstance(error, cls)), CheckpointError.__name__)
    text = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    return {"kind": kind, "text": text}


def revive(failure: Failure) -> ShardwiseError:
    """Rebuild the exception that `describe` serialized."""
    return _KINDS[failure["kind"]](failure["text"])


def agree(error: Exception | None) -> None:
    """Raise the first failing rank's error on every rank; return if there is none. Collective."""
    found = gather_json(describe(error) if error else None)
    first = broadcast_json(next((failure for failure in found if failure), None))
    if first:
        raise revive(first) from (None if isinstance(error, ShardwiseError) else error)


def together(do: Callable[[], Result]) -> Result:
    """Call ``do`` on every rank; then raise any rank's error on all. Collective."""
    wrong: Exception | None = None
    done: list[Result] = []
    try:
        done.append(do())
    except Exception as error:
        wrong = error
    agree(wrong)
    return done[0]


def any_of(flags: torch.Tensor) -> torch.Tensor:
    """Reduce uint8 flags elementwise with logical or, on every rank. Collective."""
    if not _grouped():
        return flags
    wire = flags.to(_wire())
    dist.all_reduce(wire, op=dist.ReduceOp.MAX)
    return wire.to(flags.device)


def side_group() -> dist.ProcessGroup | None:
    """Create a CPU group of all ranks for messages during training; ``None`` for one process.

    Collective.
    """
    return dist.new_group(backend="gloo") if _grouped() and world_size() > 1 else None


def close_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group of `side_group`."""
    if group is not None and _grouped():
        dist.destroy_process_group(group)


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Return whether this is a single process.

    False with a given group, even after the default group is destroyed.
    """
    return group is None and not _grouped()


def _wire(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device that the group's backend communicates from."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _to_tensor(data: bytes, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_wire(group))


def _from_tensor(wire: torch.Tensor) -> Any:
    return json.loads(wire.cpu().numpy().tobytes())
