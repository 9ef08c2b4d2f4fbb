"""What is seen of one step through hooks: block forwards, hidden states, logits, gathers ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.measure.collectives import CollectiveRecorder
from shardwise.parallel.context import first_sequence
from shardwise.spec.read import CHECKPOINT_WRAPPER_PART, clean_name
from shardwise.train.session import Session, Step
from shardwise.verify.part import axis_of


class StepWatch:
    """Hooks on the blocks and the head, and the recorder of collectives, on for one step."""

    def __init__(self, session: Session, step: Step) -> None:
        self.block_calls = 0
        self.hidden: set[tuple[int, int]] = set()  # length and width of what enters a block
        self.logits: set[int] = set()
        self.gathers_before_first: int | None = None
        self.recorder = CollectiveRecorder(lambda: session.phase, axis_of(session))
        self._samples = {tokens.shape[0] for micro in step.micros if (tokens := first_sequence(micro.inputs)) is not None}
        self._hooks = [
            inner.register_forward_pre_hook(self._enter, with_kwargs=True) for inner in inner_blocks(session)
        ]
        self._hooks += [head.register_forward_hook(self._leave_head) for head in heads(session)]
        self.recorder.__enter__()

    def stop(self) -> None:
        """End; what was seen stays."""
        self.recorder.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation inside the step is the user's own
            return
        if self.gathers_before_first is None:
            self.gathers_before_first = sum(item.name == "all_gather" for item in self.recorder.collectives)
        self.block_calls += 1
        hidden = self._hidden((args, kwargs))
        if hidden is not None:
            self.hidden.add((hidden.shape[1], hidden.shape[-1]))

    def _hidden(self, tree: Any) -> torch.Tensor | None:
        leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        found = (t for t in leaves if t.is_floating_point() and t.ndim >= 3 and t.shape[0] in self._samples)
        return next(found, None)

    def _leave_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and torch.is_grad_enabled():
            self.logits.add(output.shape[-1])


def inner_blocks(session: Session) -> list[nn.Module]:
    """The blocks of this rank, inside of what recompute has put around them; compiled ones from outside."""
    name = CHECKPOINT_WRAPPER_PART.rstrip(".")
    return [block if session.plan.compile else getattr(block, name, block) for block in session.applied.blocks]


def heads(session: Session) -> Iterator[nn.Module]:
    """The module whose columns are those of the vocabulary, under tensor parallel, if it is on this rank."""
    decision = session.applied.decision
    layout = None if decision is None else decision.layout
    if layout is None:
        return
    names = {name for name, cut in layout.modules.items() if cut.kind in ("colwise_gather", "colwise_loss")}
    for name, part in session.module.named_modules():
        if clean_name(name) in names and any(p is not None for p in part._parameters.values()):
            yield part
