"""Weights that stay gathered after a forward without a backward between two steps, and changes made to them.

That is a trap for whoever then changes weights: a change of a gathered copy is dropped with it, and the next forward
does not see one of the shards. Blocks are freed. A root's own weights (embedding, last norm, head) stay gathered, as
FSDP2 leaves them for a loss that reads the head after the forward; but the root names its shards, and the next forward
gathers them anew, on all ranks alike. What is left is a weight that is taken from its module and changed in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import UserError
from shardwise.model.read import clean_name
from shardwise.parallel.data_parallel.unit_forwards import FsdpUnit, free_gathered


class LeftGathered:
    """Free or watch what ``units`` of ``root`` have gathered while ``is_idle``: no step, forward or backward runs.

    ``left``: there may be some; alike on all ranks, as forwards are collective.
    """

    def __init__(self, root: nn.Module, units: Sequence[FsdpUnit], is_idle: Callable[[], bool]) -> None:
        self._units, self._is_idle = units, is_idle
        self._own = next((unit for unit in units if unit.module is root), None)
        self.left = False
        self._before: list[tuple[Any, int]] = []  # with versions of gathered copies
        root.register_forward_hook(self._after_forward)  # after FSDP2's own
        if self._own is not None:
            group = self._own.group
            group._to_sharded = functools.partial(self._to_sharded, group._to_sharded)
        named = functools.partial(self._named_parameters, root.named_parameters)
        root.named_parameters = functools.wraps(root.named_parameters)(named)  # type: ignore[method-assign]

    def free(self) -> None:
        """Free before a forward what an earlier one left.

        Raises:
            UserError: a weight of the root was changed in place meanwhile.
        """
        left, self.left = self.left, False
        for unit in reversed(self._units) if left else ():  # the root's, which may raise, last
            free_gathered(unit.state._modules[0])

    def _after_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() or not self._is_idle():
            return
        for part in root.modules():
            if isinstance(part, FSDPModule) and part is not root:
                free_gathered(part)
        self.left = True
        if self._own is not None and self._own.group.is_unsharded:
            self._before = [(p, _version(p)) for p in self._own.group.fsdp_params]

    def _named_parameters(self, plain: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Name shards in place of gathered copies, as they are named before the forward."""
        groups = [unit.group for unit in self._units if unit.group.is_unsharded] if self._is_idle() else []
        shards = {id(p._unsharded_param): p.sharded_param for group in groups for p in group.fsdp_params}
        for name, parameter in plain(*args, **kwargs):
            yield name, shards.get(id(parameter), parameter)

    def _to_sharded(self, plain: Any) -> None:
        changed = [p for p, version in self._before if version != _version(p)]
        self._before = []
        plain()
        if changed:
            names = ", ".join(clean_name(str(p._param_fqn)) for p in changed[:3])
            raise UserError(
                f"weights were changed in place after a forward under torch.no_grad() between two steps ({names}): "
                "they are a gathered copy there, and the change would be lost; take them anew from model.parameters() "
                "after the forward, or call reshard() of the model before the change"
            )


def _version(p: Any) -> int:
    full = p._unsharded_param
    return 0 if full.is_inference() else int(full._version)  # of torch.inference_mode(): not tracked
