"""See every collective that really leaves this rank, and the dtype of every matrix product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.spec.read import dtype_name

# c10d operator → (its field name, the argument that holds the whole tensor)
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


class Collective(NamedTuple):
    """One collective: its name, the bytes of the whole (unsharded) tensor, its dtype, and the session's phase."""

    name: str
    num_bytes: int
    dtype: str
    phase: str


class CollectiveRecorder(TorchDispatchMode):
    """While active, notes what passes PyTorch's dispatcher on this thread and in backward.

    Every operator gets slower, so it is on for one step only.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.matmul_dtypes: set[str] = set()
        self._phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "c10d" and name in _OPERATORS:
            field, position = _OPERATORS[name]
            tensors = _tensors(args[position])
            if tensors:
                size = sum(t.numel() * t.element_size() for t in tensors)
                self.collectives.append(Collective(field, size, dtype_name(tensors[0].dtype), self._phase()))
        elif func.namespace == "aten" and name in _MATMULS and self._phase() in ("forward", "backward"):
            self.matmul_dtypes.add(dtype_name(args[-1].dtype))
        return func(*args, **(kwargs or {}))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes of each collective that moved parameters or gradients.

        Left out: what the session itself says to other ranks, the norm of the gradient, and all but gathers during
        forward, where DDP keeps its book-keeping and batch norm's statistics together, and the user may send things.
        """
        found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for item in self.collectives:
            moved = item.phase in ("backward", "optimizer") or (item.phase, item.name) == ("forward", "all_gather")
            if moved:
                calls, size = found[item.name]
                found[item.name] = (calls + 1, size + item.num_bytes)
        return dict(found)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
