"""Count forwards of the model and its blocks in a step, which the model decides.

A model may be called twice for a micro batch (pairs, adversaries), and may call one block many times or leave one out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree

from shardwise.parallel.data_parallel.unit_order import orders_of
from shardwise.receipts.expected import UnitCalls
from shardwise.train.session import Session
from shardwise.train.step import Step


class ForwardCounts:
    """Forwards with gradients of one step, by micro batch; others are the user's own.

    ``inside`` counts calls of each block by the model's own forward, ``block_calls`` all of them, and
    ``recomputed`` those in a backward.
    A pipeline calls its stages itself, once for each micro batch.
    """

    def __init__(self, session: Session, step: Step) -> None:
        self.block_calls = self.recomputed = 0
        self.inside: Counter[str] = Counter()
        self._last: Counter[str] = Counter()
        self._aside: Counter[str | None] = Counter()
        self.hooks: list[Any] = []
        self.shapes: list[tuple[int, int] | None] = []
        self._by_micro: Counter[int] = Counter()
        self._session, self._step = session, step
        self._orders = orders_of(session.applied.outer)
        self._running = self._apart = False
        if session.applied.pipeline is None:
            self.hooks.append(session.module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.hooks.append(session.module.register_forward_hook(self._leave, always_call=True))

    @property
    def number(self) -> int:
        """Number of forwards of the model; 0 if unknown."""
        return self._by_micro.total()

    def of_units(self, blocks: tuple[str, ...]) -> dict[str | None, UnitCalls]:
        """Return the calls of each sharding unit, ``None`` for the root; empty if unknown."""
        if not self.number or self._apart:
            return {}
        found: dict[str | None, UnitCalls] = {
            None: UnitCalls(self.number, self._by_micro[self._end], self._aside[None])
        }
        skipped = sum((order.skipped for order in self._orders), Counter[str]())
        found |= {
            block: UnitCalls(self.inside[block], self._last[block], self._aside[block], skipped[block])
            for block in blocks
        }
        return found

    @property
    def shapes_known(self) -> list[tuple[int, int]] | None:
        """Return samples and length of each forward; ``None`` if the inputs do not show them."""
        known = [shape for shape in self.shapes if shape is not None]
        return known if len(known) == len(self.shapes) else None

    def one_each(self, blocks: tuple[str, ...]) -> bool:
        """Return whether every block ran once in each forward of the model, as far as known."""
        return not self.number or self._apart or all(self.inside[block] == self.number for block in blocks)

    @property
    def _end(self) -> int:
        """Return the last micro batch, whose backward reduces gradients."""
        return len(self._step.micros) - 1

    @property
    def _now(self) -> int:
        return self._end - self._session.micros_left

    def of_blocks(self, blocks: tuple[str, ...], micros: int) -> dict[str, int]:
        """Return forwards of each block without recompute: one per model forward, or as counted."""
        number = self.number or micros
        if not self.number or self._apart:  # a block that was called by itself is not in any plan
            return dict.fromkeys(blocks, number)
        return {block: self.inside[block] for block in blocks}

    def block(self, name: str) -> None:
        """Count a call of a block."""
        if not torch.is_grad_enabled():
            self._aside[name] += 1
            return
        self.block_calls += 1
        self.recomputed += torch._C._current_graph_task_id() != -1
        if self._running:
            self.inside[name] += 1
            self._last[name] += self._now == self._end
        elif torch._C._current_graph_task_id() == -1:  # not recomputed in a backward
            self._apart = True

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            self._aside[None] += 1
        else:
            self._running = True
            self._by_micro[self._now] += 1
            ids = (t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim == 2)
            shapes = {(t.shape[0], t.shape[1]) for t in ids if not t.is_floating_point()}
            self.shapes.append(shapes.pop() if len(shapes) == 1 else None)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self._running = False
