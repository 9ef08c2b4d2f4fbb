"""Record every collective of this rank, and the dtype of every matrix product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.distributed.exchange import exchange_now, is_exchange
from shardwise.model.read import dtype_name

# c10d operator → (its field name, the argument with the full tensor)
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
}
# the same, for operators of plans that split the model
_OWN_OPERATORS = {
    "allgather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
# functional operator → (its field name, whether its input is one rank's part of the full tensor)
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_reduce_coalesced_": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_out": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_out": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "broadcast_": ("broadcast", False),
}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm"}
OTHER = "other ranks"
Axes = Callable[[str, tuple[int, ...]], str]  # a collective's name and its ranks → its axis


class Collective(NamedTuple):
    """Collective: name, bytes of the full (unsharded) tensor, dtype, the session's phase, axis."""

    name: str
    num_bytes: int
    dtype: str
    phase: str
    axis: str = OTHER


class CollectiveRecorder(TorchDispatchMode):
    """Dispatch mode that records collectives and products on this thread and in backward.

    Every operator gets slower, so it is on for one step only. ``axes`` names the axis of a collective for a plan that
    splits the model; then functional collectives, exchanges and messages between two ranks are recorded, too. (By ranks
    and not by group: PyTorch caches equal meshes, and may return the group of an earlier one.)
    """

    supports_higher_order_operators = True  # compiled blocks consist of them

    def __init__(self, phase: Callable[[], str], axes: Axes | None = None) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.matmul_dtypes: set[str] = set()
        self.weight_dtypes: set[str] = set()  # of matrix products with a parameter, or a view of one, as operand
        self.fp8_products = 0
        self.looker: Callable[[Any, Any], None] | None = None  # called with each operator and its result
        self._phase = phase
        self._axes = axes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled blocks compiled while recording."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:
            return func(*args, **(kwargs or {}))
        name = packet.__name__
        if func.namespace == "c10d":
            own = _OWN_OPERATORS if self._axes is not None else {}
            field, position = _OPERATORS.get(name) or own.get(name, ("", 0))
            if is_exchange(name):
                if (meant := exchange_now()) is not None:
                    self._add(meant.name, meant.num_bytes, meant.dtype or args[1].dtype, lambda: _group_of(args))
            elif field:
                self._note(field, _tensors(args[position]), lambda: _group_of(args), 1)
        elif func.namespace == "_c10d_functional" and self._axes is not None and name in _FUNCTIONAL:
            field, is_part = _FUNCTIONAL[name]
            self._note(field, _tensors(args[0]), lambda: _named_group(args), _degree(args) if is_part else 1)
        elif func.namespace == "aten" and name in _MATMULS and self._phase() in ("forward", "backward"):
            dtype = dtype_name(args[-1].dtype)
            self.matmul_dtypes.add(dtype)
            self.fp8_products += all(type(operand).__name__ == "Float8TrainingTensor" for operand in args[-2:])
            if dtype not in self.weight_dtypes and any(_is_weight(operand) for operand in args[-2:]):
                self.weight_dtypes.add(dtype)
        made = func(*args, **(kwargs or {}))
        if self.looker is not None:
            self.looker(func, made)
        return made

    def _note(self, field: str, tensors: list[torch.Tensor], group: Callable[[], tuple[int, ...]], times: int) -> None:
        if not tensors:
            return
        self._add(field, sum(t.numel() * t.element_size() for t in tensors) * times, tensors[0].dtype, group)

    def _add(self, field: str, size: int, dtype: torch.dtype, group: Callable[[], tuple[int, ...]]) -> None:
        axis = OTHER if self._axes is None else self._axes(field, group())
        self.collectives.append(Collective(field, size, dtype_name(dtype), self._phase(), axis))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return calls and bytes of each collective that moved parameters or gradients.

        Excluded: the session's own messages, the norm of the gradient, and all but gathers during
        forward, where DDP synchronises its book-keeping and batch norm's statistics, and the user may communicate.
        """
        found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for item in self.collectives:
            moved = item.phase in ("backward", "optimizer") or (item.phase, item.name) == ("forward", "all_gather")
            if moved:
                calls, size = found[item.name]
                found[item.name] = (calls + 1, size + item.num_bytes)
        return dict(found)


def _is_weight(operand: torch.Tensor) -> bool:
    """Return whether an operand is a parameter or a view of one, not a copy in another dtype."""
    return isinstance(operand, torch.nn.Parameter) or isinstance(operand._base, torch.nn.Parameter)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _group_of(args: Any) -> tuple[int, ...]:
    """Return the ranks of the process group among the arguments of a c10d operator."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return _ranks(str(dist.ProcessGroup.unbox(argument).group_name))
            except RuntimeError:  # another object, such as the kind of reduction
                continue
    return ()


def _named_group(args: Any) -> tuple[int, ...]:
    """Return the ranks of the group that a functional operator names last."""
    return _ranks(next((argument for argument in reversed(args) if isinstance(argument, str)), ""))


def _ranks(name: str) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(_resolve_process_group(name))))  # type: ignore[arg-type]


def _degree(args: Any) -> int:
    """Return the group size from the arguments of a functional gather."""
    return next((argument for argument in args[1:] if isinstance(argument, int)), 1)
