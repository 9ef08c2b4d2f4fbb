"""All-to-all that stands for another collective, or for a part of one, and how a recorder can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class StandsFor(NamedTuple):
    """The collective that an all-to-all stands for, and the bytes of its full tensor.

    ``dtype``: of that tensor, where another is sent.
    """

    name: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    num_bytes: int
    dtype: torch.dtype | None = None


_now: list[StandsFor | None] = []


def begin_exchange(
    stands_for: StandsFor | None,
    received: torch.Tensor,
    sent: torch.Tensor,
    group: dist.ProcessGroup,
    splits: list[int] | None = None,
) -> Any:
    """Send each rank its piece of ``sent``, and receive one from each; returns the work to wait for.

    Pieces are equal, or have ``splits`` elements of each rank. ``stands_for`` is None in all parts of a collective but
    one, so that it counts once.
    """
    import torch.distributed as dist

    _now.append(stands_for)
    try:
        return dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)
    finally:
        _now.clear()


def is_exchange(operator: str) -> bool:
    """Whether the ``operator`` that begins now is an all-to-all that does not stand for itself."""
    return operator == "alltoall_base_" and bool(_now)


def exchange_now() -> StandsFor | None:
    """What the all-to-all that begins now stands for; ``None`` for further parts of it."""
    return _now[0] if _now else None
