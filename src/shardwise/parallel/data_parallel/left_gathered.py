"""Weights that stay gathered after a forward without a backward between two steps, and changes made to them.

That is a trap for whoever then changes weights: a change of a gathered copy is dropped with it, and the next forward
does not see one of the shards. Blocks are freed. A root's own weights (embedding, last norm, head) stay gathered, as
FSDP2 leaves them for a loss that reads the head after the forward; they are watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import UserError
from shardwise.model.read import clean_name
from shardwise.parallel.data_parallel.unit_forwards import FsdpUnit, free_gathered


class LeftGathered:
    """Free or watch what is gathered in ``root`` while ``is_idle``: no step, forward or backward runs.

    ``own`` is the unit of the root's own weights, if it has any. They are freed before `named_parameters` names them,
    as FSDP2 frees them before it returns a state dict.
    """

    def __init__(self, root: nn.Module, own: FsdpUnit | None, is_idle: Callable[[], bool]) -> None:
        self._own, self._is_idle = own, is_idle
        self._before: list[tuple[Any, int, tuple[int, int]]] = []  # with versions of the gathered copy and the shard
        root.register_forward_hook(self._after_forward)  # after FSDP2's own
        if own is not None:
            own.group._to_sharded = functools.partial(self._to_sharded, own.group._to_sharded)
            named = functools.partial(self._named_parameters, root.named_parameters)
            root.named_parameters = functools.wraps(root.named_parameters)(named)  # type: ignore[method-assign]

    def _after_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() or not self._is_idle():
            return
        for part in root.modules():
            if isinstance(part, FSDPModule) and part is not root:
                free_gathered(part)
        if self._own is not None and self._own.group.is_unsharded:
            self._before = [(p, p._unsharded_param._version, _shard(p)) for p in self._own.group.fsdp_params]

    def _named_parameters(self, plain: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_idle():
            self._free()
        return plain(*args, **kwargs)

    def _free(self) -> None:
        if self._before and self._own is not None:
            free_gathered(self._own.state._modules[0])

    def check(self) -> None:
        """Before the next forward: free them if weights were changed.

        Raises:
            UserError: the change was one of a gathered weight.
        """
        before = self._before
        if self._changed() or any(shard != _shard(p) for p, _, shard in before):
            self._free()
        self._before = []

    def _changed(self) -> list[Any]:
        return [p for p, full, _ in self._before if p._unsharded_param._version != full]

    def _to_sharded(self, plain: Any) -> None:
        changed, self._before = self._changed(), []
        plain()
        if changed:
            names = ", ".join(clean_name(str(p._param_fqn)) for p in changed[:3])
            raise UserError(
                f"weights were changed in place after a forward under torch.no_grad() between two steps ({names}): "
                "they are a gathered copy there, and the change would be lost; take them anew from model.parameters() "
                "after the forward, or call reshard() of the model before the change"
            )


def _shard(p: Any) -> tuple[int, int]:
    return p.sharded_param._version, p._sharded_param_data._version
