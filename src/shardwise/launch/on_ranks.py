"""`on_ranks`: call one function on every rank of a new local world, and return all results."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict

from shardwise.environment import rendezvous
from shardwise.errors import RankError
from shardwise.hardware.cpu import cores_here
from shardwise.import_object import load_object
from shardwise.launch.rank import guarded

if TYPE_CHECKING:
    from shardwise.distributed.process_group import Ranks

PayloadT = TypeVar("PayloadT", bound=BaseModel)

_REQUEST = "request.json"


class _Request(BaseModel):
    """Serialized call, as the ranks read it."""

    model_config = ConfigDict(frozen=True)

    work: str
    payload_type: str
    payload: str
    device: str | None
    timeout_s: float


def on_ranks(
    work: str,
    payload: BaseModel,
    world_size: int,
    *,
    device: str | None = "auto",
    threads: int | None = None,
    timeout_s: float = 1800.0,
    grace_s: float = 5.0,
    folder: Path | None = None,
) -> list[Any]:
    """Call ``work`` (a ``package.module:function``) as ``work(payload, ranks)`` on local ranks.

    Returns the results of the ``world_size`` ranks, which must be JSON, rank 0's first. The payload is sent without
    unset fields: a config reports keys that are given without effect. Ranks without a ``device`` join no process group
    and get ``None`` for ``ranks``. ``threads`` are CPU threads of a rank, by default its share of the cores. The
    request, the results and the logs are in ``folder``, or in a temporary one, which is kept if a rank failed.

    Raises:
        ShardwiseError: the first failure of a rank; see `shardwise.launch.local.run_local`.
    """
    from shardwise.launch.local import run_local

    place = folder or Path(tempfile.mkdtemp(prefix="shardwise-"))
    keep = folder is not None
    kind = type(payload)
    request = _Request(
        work=work,
        payload_type=f"{kind.__module__}:{kind.__qualname__}",
        payload=payload.model_dump_json(by_alias=True, exclude_unset=True),
        device=device,
        timeout_s=timeout_s,
    )
    try:
        file = place / _REQUEST
        file.write_text(request.model_dump_json())
        command = [sys.executable, "-m", __name__, str(file)]
        threads = threads or max(1, cores_here() // world_size)
        sys.stdout.flush()
        run_local(command, world_size, threads=threads, logs=place / "logs", grace_s=grace_s)
        return [json.loads(_result(place, rank).read_text()) for rank in range(world_size)]
    except RankError:
        keep = True  # the message names the folder of the logs
        raise
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def as_rank(work: Callable[[PayloadT, Ranks], object], payload: PayloadT, device: str) -> NoReturn:
    """Call ``work(payload, ranks)`` in this process, a rank of torchrun or the like, and exit."""

    def main() -> int:
        _joined(work, payload, device)
        return 0

    guarded(main)


def _joined(
    work: Callable[[PayloadT, Ranks], object], payload: PayloadT, device: str, timeout_s: float = 1800.0
) -> object:
    from shardwise.distributed.process_group import join, leave

    ranks = join(device, timeout_s)
    found = work(payload, ranks)
    leave(ranks)
    return found


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.json"


def _main() -> int:
    """Run as one rank that `on_ranks` has started."""
    import pydantic_core

    file = Path(sys.argv[1])
    request = _Request.model_validate_json(file.read_text())
    work = load_object(request.work, "work")
    kind: Any = load_object(request.payload_type, "payload")
    payload = kind.model_validate_json(request.payload)
    if request.device is None:
        found = work(payload, None)
    else:
        found = _joined(work, payload, request.device, request.timeout_s)
    place = rendezvous()
    _result(file.parent, place.rank if place else 0).write_bytes(pydantic_core.to_json(found, by_alias=True))
    return 0


if __name__ == "__main__":
    guarded(_main)
