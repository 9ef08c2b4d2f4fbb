"""Leave parameters unchanged that a step does not use, as in one process.

Does not import DeepSpeed.

DeepSpeed gives the optimizer flat tensors with many parameters in each: one without a gradient would be updated with
zeros, which decays it and its momentum. And the flat tensor has one step count for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

State = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Location of this rank's elements of a parameter: ``flat[begin:end]``.

    Empty if they are equal.
    """

    flat: torch.Tensor
    begin: int
    end: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a tensor that is laid out like ``flat``."""
        return tensor.detach()[self.begin : self.end]


class StandStill:
    """Restore parameters that had no gradient after an update, and count their steps separately.

    ``apart`` has the scalars (AdamW's ``step``) of each parameter that has missed an update of its flat tensor, and
    ``fresh`` are those of them that were never updated. They are updated separately once they have a gradient.
    """

    def __init__(self, base: Optimizer, parts: dict[str, Part]) -> None:
        self.apart: dict[str, State] = {}
        self.fresh: set[str] = set()
        self._base, self._parts = base, parts
        self._still: frozenset[str] = frozenset()
        self._kept: dict[str, tuple[torch.Tensor, State]] = {}
        self._alone = False
        self._hooks = [
            base.register_step_pre_hook(lambda *_: self._before()),
            base.register_step_post_hook(lambda *_: self._after()),
        ]

    def expect(self, missing: Iterable[str]) -> None:
        """Set the parameters without a gradient in the next update; the same on all ranks."""
        self._still = frozenset(missing)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _stepped(self) -> Iterator[tuple[str, Part, dict[str, Any]]]:
        """Yield parameters to update separately: no gradient, or a step count of their own."""
        groups = {id(flat): group for group in self._base.param_groups for flat in group["params"]}
        for name in sorted({*self._still, *self.apart}):
            part = self._parts[name]
            if id(part.flat) in groups:
                yield name, part, groups[id(part.flat)]

    def _before(self) -> None:
        if self._alone or not (self._still or self.apart):
            return
        for name, part, _ in self._stepped():
            state = self._base.state.get(part.flat, {})
            copies = {key: part.of(value).clone() for key, value in state.items() if _laid_out(value, part.flat)}
            if name not in self.apart:
                self.apart[name] = _numbers(state)
                self.fresh |= set() if state else {name}
            self._kept[name] = part.of(part.flat).clone(), {} if name in self.fresh else copies

    def _after(self) -> None:
        if self._alone or not self._kept:
            return
        for name, part, group in self._stepped():
            weight, copies = self._kept.pop(name)
            state = self._base.state.get(part.flat, {})
            part.of(part.flat).copy_(weight)
            for key, value in state.items():
                if _laid_out(value, part.flat):
                    part.of(value).copy_(copies[key]) if key in copies else part.of(value).zero_()
            if name not in self._still:
                self._update(name, part, group, copies)

    def _update(self, name: str, part: Part, group: dict[str, Any], copies: State) -> None:
        """Run the user's optimizer on one parameter alone, with its own scalars."""
        base, piece = self._base, torch.nn.Parameter(part.of(part.flat).clone())
        assert part.flat.grad is not None
        piece.grad = part.of(part.flat.grad)
        if name not in self.fresh:
            base.state[piece] = {**copies, **self.apart[name]}
        groups, base.param_groups, self._alone = base.param_groups, [{**group, "params": [piece]}], True
        try:
            base.step()
        finally:
            base.param_groups, self._alone = groups, False
        new = base.state.pop(piece, {})
        part.of(part.flat).copy_(piece.detach())
        for key, value in base.state.get(part.flat, {}).items():
            if _laid_out(value, part.flat):
                part.of(value).copy_(new[key])
        self.apart[name] = _numbers(new)
        self.fresh.discard(name)
        if not self.apart[name]:  # no separate count is left: it is updated with the others
            del self.apart[name]


def _laid_out(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == flat.shape


def _numbers(state: State) -> State:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) or not value.dim()
    }
