"""All-to-all that is a part of a reduce-scatter, and known as one to whoever records collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_now = {"reduces": False}


def begin_exchange(pieces: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Send each rank its piece of ``sent``, and receive the ``pieces`` to add up; returns the work to wait for."""
    import torch.distributed as dist

    _now["reduces"] = True
    try:
        return dist.all_to_all_single(pieces, sent, group=group, async_op=True)
    finally:
        _now["reduces"] = False


def reduces() -> bool:
    """Whether the all-to-all that begins now is a reduce-scatter."""
    return _now["reduces"]
