"""Record one step through hooks: block forwards, hidden states, logits, prefetched units."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.measure.collectives import CollectiveRecorder
from shardwise.model.read import CHECKPOINT_WRAPPER_PART, clean_name
from shardwise.parallel.compile import compiled_of
from shardwise.parallel.context_parallel.attention import exchanged_calls, first_sequence
from shardwise.parallel.experts.expert_parallel import received_rows
from shardwise.parallel.fp8 import float8_layers
from shardwise.parallel.pipeline_parallel.stage_runtime import StageSpan
from shardwise.receipts.expected_part import axis_of
from shardwise.receipts.lines.forward_lines import ForwardCounts
from shardwise.receipts.lines.logit_lines import LogitsRecorder
from shardwise.receipts.lines.optimizer_lines import OptimizerRecorder
from shardwise.train.session import Session
from shardwise.train.step import Step


class StepRecorder:
    """Hooks on the blocks and the head, and the collective recorder, for one step."""

    def __init__(self, session: Session, step: Step) -> None:
        self.forwards = ForwardCounts(session, step)
        self.widths: set[int] = set()  # of the hidden states that enter blocks
        self.lengths: set[int] = set()  # of those that enter all blocks but the first, where a sequence is sharded
        self._first = session.spec.blocks[0] if session.spec.blocks else ""
        self.logits: set[int] = set()
        self.gathers_before_first: int | None = None
        self.recorder = CollectiveRecorder(lambda: session.phase, axis_of(session))
        self.head = LogitsRecorder(session)
        self.optimizer = OptimizerRecorder(session)
        self.recorder.looker = self.head.look if self.head.vocab else None
        decision = session.applied.decision
        self._wiring = None if decision is None else decision.wiring
        self._layout = None if decision is None else decision.layout
        self._samples = {
            tokens.shape[0] for micro in step.micros if (tokens := first_sequence(micro.inputs)) is not None
        }
        self._hooks = [
            inner.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True)
            for name, inner in inner_blocks(session).items()
        ]
        self._hooks += [head.register_forward_hook(self._leave_head) for head in heads(session)]
        self._hooks += self.forwards.hooks
        self.fp8_layers: set[str] = set()  # whose forward was a product in fp8; compiled blocks do not show theirs
        self.fp8_called: set[str] = set()
        self._products_before = 0
        for name, layer in () if session.plan.compile else float8_layers(session.module).items():
            self._hooks.append(layer.register_forward_pre_hook(functools.partial(self._enter_layer, name)))
            self._hooks.append(layer.register_forward_hook(functools.partial(self._leave_layer, name)))
        self.spans: list[StageSpan] = []
        self._pipeline = session.applied.pipeline
        if self._pipeline is not None:
            self._pipeline.spans = self.spans
        self.compiled = compiled_of(session.module)
        self._compiled_before = (0, 0) if self.compiled is None else (self.compiled.calls, self.compiled.runs)
        self._module, self._exchanged_before = session.module, exchanged_calls(session.module)
        self._received_before = received_rows(session.module)
        self._on_host = session.applied.on_host
        self._offloaded_before = (0, 0, 0) if self._on_host is None else self._on_host.counts
        self.recorder.__enter__()

    @property
    def exchanged(self) -> int:
        """Number of attention calls on exchanged heads in this step, including recomputed ones."""
        return exchanged_calls(self._module) - self._exchanged_before

    @property
    def received(self) -> int:
        """Rows that this rank's experts got from all ranks in this step."""
        return received_rows(self._module) - self._received_before

    @property
    def offloaded(self) -> tuple[int, int, int]:
        """Bytes that blocks saved in this step, that went to host memory, and that came back."""
        if self._on_host is None:
            return 0, 0, 0
        first, second, third = (
            after - before for after, before in zip(self._on_host.counts, self._offloaded_before, strict=True)
        )
        return first, second, third

    @property
    def block_calls(self) -> int:
        """Number of forwards of blocks in this step, including recomputed ones."""
        return self.forwards.block_calls

    @property
    def compiled_calls(self) -> tuple[int, int]:
        """Number of forwards of compiled blocks, and of their graphs, in this step."""
        if self.compiled is None:
            return 0, 0
        calls, runs = self._compiled_before
        return self.compiled.calls - calls, self.compiled.runs - runs

    def stop(self) -> None:
        """Stop; the records stay."""
        self.recorder.__exit__(None, None, None)
        self.head.stop()
        self.optimizer.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._pipeline is not None:
            self._pipeline.spans = None

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.forwards.block(name)
        if not torch.is_grad_enabled():  # an evaluation inside the step is the user's own
            return
        if self.gathers_before_first is None:
            gathers = (item for item in self.recorder.collectives if item.name == "all_gather")
            self.gathers_before_first = sum(item.axis not in ("tp", "cp", "pp") for item in gathers)
        hidden = self._hidden(name, args, kwargs)
        if hidden is not None:
            self.widths.add(hidden.shape[-1])
            if name != self._first:
                self.lengths.add(hidden.shape[1])

    def _enter_layer(self, name: str, *_: Any) -> None:
        self.fp8_called.add(name)
        self._products_before = self.recorder.fp8_products

    def _leave_layer(self, name: str, *_: Any) -> None:
        if self.recorder.fp8_products > self._products_before:
            self.fp8_layers.add(name)

    def _hidden(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return the hidden state among a block's arguments: at the plan's place, or the likely one."""
        place: int | str | None = None
        if self._wiring is not None and name in self._wiring.calls:
            place = self._wiring.calls[name].argument
        elif self._layout is not None and self._layout.first:
            place = self._layout.hidden[1]
        if isinstance(place, int) and place < len(args):
            found = args[place]
        elif place in kwargs:
            found = kwargs[place]
        else:
            leaves = (leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            likely = (t for t in leaves if t.is_floating_point() and t.ndim >= 3 and t.shape[0] in self._samples)
            found = next(likely, None)
        return found if isinstance(found, torch.Tensor) and found.ndim >= 3 else None

    def _leave_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and torch.is_grad_enabled():
            self.logits.add(output.shape[-1])


def inner_blocks(session: Session) -> dict[str, nn.Module]:
    """Return this rank's blocks by name, inside recompute wrappers; compiled ones with them."""
    names = {id(part): clean_name(f"{name}.").rstrip(".") for name, part in session.module.named_modules()}
    inside = CHECKPOINT_WRAPPER_PART.rstrip(".")
    return {
        names[id(block)]: block if session.plan.compile else getattr(block, inside, block)
        for block in session.applied.blocks
    }


def heads(session: Session) -> Iterator[nn.Module]:
    """Yield the local module with the vocabulary's columns, under tensor parallel."""
    decision = session.applied.decision
    layout = None if decision is None else decision.layout
    if layout is None:
        return
    names = {name for name, shard in layout.modules.items() if shard.kind in ("colwise_gather", "colwise_loss")}
    for name, part in session.module.named_modules():
        if clean_name(name) in names and any(p is not None for p in part._parameters.values()):
            yield part
