"""All-to-all that is a part of a reduce-scatter or an all-gather, and known as one to whoever records collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Role = Literal["reduce_scatter", "all_gather"]
_now: dict[str, Role | None] = {"role": None}


def begin_exchange(
    role: Role,
    received: torch.Tensor,
    sent: torch.Tensor,
    group: dist.ProcessGroup,
    splits: list[int] | None = None,
) -> Any:
    """Send each rank its piece of ``sent``, and receive one from each; returns the work to wait for.

    Pieces are equal, or have ``splits`` elements of each rank.
    """
    import torch.distributed as dist

    _now["role"] = role
    try:
        return dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)
    finally:
        _now["role"] = None


def exchange_role(operator: str) -> Role | None:
    """What the all-to-all that begins now is a part of; ``None`` if it stands for itself or is another ``operator``."""
    return _now["role"] if operator == "alltoall_base_" else None
