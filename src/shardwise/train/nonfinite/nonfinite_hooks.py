"""Hooks on every module and on the graph of autograd, for the time of a replay: which number is not finite first.

The graph is not changed: nodes are assigned to modules by autograd's sequence numbers, which rise with each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.distributed.process_group import no_process_group
from shardwise.model.read import STAGE, clean_name
from shardwise.parallel.data_parallel.unit_forwards import backward_runs
from shardwise.parallel.pipeline_parallel.stage_module import Absent
from shardwise.train.nonfinite.nonfinite_error import LOSS
from shardwise.train.nonfinite.tensor_values import NonFinite, batch_of, is_overflow, largest, non_finite, tensors_in
from shardwise.train.session_interface import TrainingSession

KEPT = 24  # events of a micro batch: the first is the source, unless healthy micro batches have it, too
ORDER = ("input", "forward", "loss", "backward")


class NonFiniteEvent(BaseModel):
    """Number that is not finite, where a module or a node of autograd shows it; see `NonFiniteSource` for the names.

    ``order`` counts modules in the order of the forward, the same on all ranks.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    module: str
    micro: int
    stage: int
    order: int
    value: str
    dtype: str
    rows: tuple[int, ...] | None
    batch_rows: int | None
    operation: str | None = None
    largest: float | None = None
    largest_input: float | None = None
    overflow: bool = False


@dataclass
class _Frame:
    """Module that runs: ``start`` is the sequence number of its first operation."""

    name: str
    stage: int
    micro: int
    start: int
    batch: int | None


@dataclass
class Recorder:
    """Context that records events while the model runs. ``micro`` tells the micro batch outside of a pipeline.

    A hook that fails records nothing more and sets ``failure``: an error on this rank alone would leave the others in
    a collective.
    """

    session: TrainingSession
    micro: Callable[[], int]
    events: list[NonFiniteEvent] = field(default_factory=list)
    finite_losses: dict[int, bool] = field(default_factory=dict)
    failure: str = ""
    _stack: list[_Frame] = field(default_factory=list)
    _spans: list[tuple[int, int, _Frame]] = field(default_factory=list)
    _calls: dict[int, int] = field(default_factory=dict)
    _previous: Any = None
    _count: int = 0
    _handles: list[Any] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)

    def __enter__(self) -> Recorder:
        pipeline = self.session.applied.pipeline is not None
        for raw, module in self.session.module.named_modules():
            if isinstance(module, Absent) or (pipeline and not raw):
                continue
            stage = int(raw.removeprefix(STAGE).partition(".")[0]) if pipeline else 0
            name = clean_name(raw) if "." in raw or not pipeline else ""
            before, after = self._safe(self._before(name, stage)), self._safe(self._after(name))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._seen.clear()
        self._spans.clear()
        self._previous = None

    def _safe(self, hook: Callable[..., None]) -> Callable[..., None]:
        def safe(*args: Any) -> None:
            if self.failure:
                return
            try:
                hook(*args)
            except Exception as error:
                text = " ".join(str(error).split())
                self.failure = f"the replay could not watch every module: {type(error).__name__}: {text:.200}"

        return safe

    def loss_of(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        """Return ``loss_fn`` with its result recorded."""

        def watched(outputs: Any, labels: Any) -> torch.Tensor:
            start = _sequence()
            loss = loss_fn(outputs, labels)
            self._safe(self.on_loss)(loss, outputs, labels, loss_fn, start)
            return loss

        return watched

    # forward

    def _before(self, name: str, stage: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if backward_runs():  # recomputation of what was seen before
                return
            self._count += 1
            if not name:
                self._begin(stage, (args, kwargs))
            parent = self._stack[-1] if self._stack else None
            micro, batch = (parent.micro, parent.batch) if parent else (self.micro(), batch_of((args, kwargs)))
            for tensor in tensors_in((args, kwargs)):
                found = non_finite(tensor, batch)
                if found is not None and found.kind == "-inf" and name and _is_mask((args, kwargs)):
                    continue
                if found is not None and name and parent is not None:
                    self._add("forward", parent, found, operation=f"before '{name}'", inputs=self._previous)
                elif found is not None:
                    self._add("input", _Frame(name, stage, micro, 0, batch), found, inputs=None)
            self._stack.append(_Frame(name, stage, micro, _sequence(), batch))

        return hook

    def _begin(self, stage: int, inputs: Any) -> None:
        """Begin a micro batch on a stage; a pipeline calls it for each in turn."""
        self._stack.clear()
        self._calls[stage] = self._calls.get(stage, 0) + 1
        if self.session.applied.pipeline is not None:
            micro, batch = self._calls[stage], batch_of(inputs)
            self._stack.append(_Frame("", stage, micro, _sequence(), batch))

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if backward_runs():
                return
            self._count += 1
            frame = self._pop(name)
            if frame is None:
                return
            for tensor in tensors_in(output):
                found = non_finite(tensor, frame.batch)
                if found is not None and not (found.kind == "-inf" and _is_mask(output)):
                    self._add("forward", frame, found, inputs=(args, kwargs))
            self._previous = output
            if not name:
                self._watch(output, frame)
                self._stack.clear()

        return hook

    def _pop(self, name: str) -> _Frame | None:
        """End a module, and those inside of it that have ended by an exception, as those of a stage do."""
        while self._stack:
            frame = self._stack.pop()
            self._spans.append((frame.start, _sequence(), frame))
            if frame.name == name:
                return frame
        return None

    def on_loss(self, loss: torch.Tensor, outputs: Any, labels: Any, loss_fn: Any = None, start: int = 0) -> None:
        """Record the loss of the micro batch, and the samples of which ``loss_fn`` is not finite."""
        pipeline = self.session.applied.pipeline
        stage = max(self._calls, default=0)
        micro = self.micro() if pipeline is None else self._calls.get(stage, 0)
        frame = _Frame(LOSS, stage, micro, start, batch_of(labels))
        self._spans.append((start, _sequence(), frame))
        found = non_finite(loss)
        self.finite_losses[micro] = found is None
        self._count += 1
        if found is not None:
            rows = _rows_of_loss(loss_fn, outputs, labels, frame.batch)
            found = NonFinite(found.kind, found.dtype, rows, None)
            self._add("loss", frame, found, inputs=outputs)
        self._watch(loss, frame)

    def _add(
        self, kind: str, frame: _Frame, found: NonFinite, *, inputs: Any, operation: str | None = None, order: int = -1
    ) -> None:
        if sum(one.micro == frame.micro and one.kind == kind for one in self.events) >= KEPT:
            return
        entering = [size for one in tensors_in(inputs) if (size := largest(one)) is not None]
        most = max(entering, default=None)
        event = NonFiniteEvent(
            kind=kind,
            module=frame.name,
            micro=frame.micro,
            stage=frame.stage,
            order=self._count if order < 0 else order,
            value=found.kind,
            dtype=found.dtype,
            rows=found.rows,
            batch_rows=frame.batch,
            operation=operation,
            largest=found.largest,
            largest_input=most,
            overflow=is_overflow(found, most),
        )
        self.events.append(event)

    # backward

    def _watch(self, outputs: Any, frame: _Frame) -> None:
        """Watch every node of the graph that has made ``outputs``."""
        for node in self._nodes(outputs):
            node.register_hook(self._safe(self._on_node(node.name(), node._sequence_nr(), frame)))

    def _nodes(self, outputs: Any) -> Iterator[Any]:
        leaves = (leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._seen or node.name().endswith("AccumulateGrad"):
                continue
            self._seen.add(node)
            yield node
            waiting += [other for other, _ in node.next_functions if other is not None]

    def _on_node(self, name: str, sequence: int, frame: _Frame) -> Callable[..., None]:
        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            self._count += 1
            if any(one.kind == "backward" and one.micro == frame.micro for one in self.events):
                return
            entered, made = _bad(grad_outputs, frame.batch), _bad(grad_inputs, frame.batch)
            if not entered and not made:
                return
            found = next((one for one in made if one.rows is not None), [*made, *entered][0])
            at = self._frame_of(sequence, frame)
            operation = name if not entered else f"the sum of gradients before {name}"
            self._add("backward", at, found, inputs=grad_outputs, operation=operation)

        return hook

    def _frame_of(self, sequence: int, frame: _Frame) -> _Frame:
        """Return the innermost module that ran when the operation with this number was recorded."""
        here = [(end - start, one) for start, end, one in self._spans if start <= sequence < end]
        return min(here, key=lambda pair: pair[0])[1] if here else frame


def _sequence() -> int:
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _bad(gradients: Any, batch: int | None) -> list[NonFinite]:
    return [bad for one in tensors_in(gradients) if (bad := non_finite(one, batch, exact=True)) is not None]


def _is_mask(output: Any) -> bool:
    """Return whether minus infinity is meant: no gradient reaches a mask."""
    leaves = (leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return torch.is_grad_enabled() and not any(leaf.requires_grad for leaf in leaves)


class _NoCollective(TorchDispatchMode):
    """Refuse collectives of any process group."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} is a collective, which no other rank joins")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _rows_of_loss(loss_fn: Any, outputs: Any, labels: Any, batch: int | None) -> tuple[int, ...] | None:
    """Return the samples whose own loss is not finite; ``None`` if it cannot be computed for one sample."""
    if not batch or loss_fn is None:
        return None
    rows = []
    for row in range(batch):
        parts = [0]

        def one(tensor: torch.Tensor, row: int = row, parts: list[int] = parts) -> torch.Tensor:
            if tensor.ndim and tensor.shape[0] == batch:
                parts[0] += 1
                return tensor[row : row + 1]
            return tensor

        try:
            with no_process_group(), _NoCollective():  # this rank is alone here
                loss = loss_fn(*_pytree.tree_map_only(torch.Tensor, one, (outputs, labels)))
        except Exception:  # the user's function may need the full micro batch, or other ranks
            return None
        if parts[0] < 2:
            return None
        if non_finite(loss) is not None:
            rows.append(row)
    return tuple(rows) or None
