"""`StepClock`: the phases of one observed step by the host's clock, and how long collectives are in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from shardwise.measure.collectives import Collective
from shardwise.measure.step_time.attribution import CpuWait
from shardwise.observation.loop_times import LoopTimes
from shardwise.report.html.run_record import CollectiveTime

_LOADER = "enumerate(DataLoader)"  # names of PyTorch's own for the profiler
_IN_PROCESS = "_SingleProcessDataLoaderIter"
_DDP = "DistributedDataParallel.forward"
_DEVICE = "kernels run after the calls that launch them, and the host's clock sees calls; it needs events of the device"
_NO_LOADER = "no DataLoader of PyTorch was called in the step: what the loop does instead is in its own code"
_SKIPPED = "the scaler skipped a step, and this one is timed from its first forward: what was before it is not seen"
_INSIDE = {
    "transfer": "it is in the loop's own code, or in the forward",
    "recompute": "it is in the backward",
    "clip": "it is in the loop's own code",
}
_NOT_DDP = "only DDP waits in a place of its own; other waits are in the forward, the backward and the loop's own code"


class _Own:
    """Context of the observer's own work, which is taken out of the step."""

    def __init__(self) -> None:
        self.seconds = self.began = 0.0
        self.depth = 0

    def __enter__(self) -> None:
        if not self.depth:
            self.began = perf_counter()
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.depth -= 1
        if not self.depth:
            self.seconds += perf_counter() - self.began

    def outside(self) -> float:
        """Return the time by a clock that stands still during this work."""
        return (self.began if self.depth else perf_counter()) - self.seconds


class _Flight:
    """Collective from its call to its end; ``ended`` is ``None`` where its end is not seen.

    ``launched`` and ``landed`` are the same by the clock of `_Own.outside`.
    """

    def __init__(self, item: Collective, began: float, own: _Own) -> None:
        self.item, self.began, self._own = item, began, own
        self.launched = began - own.seconds
        self.ended: float | None = None
        self.landed: float | None = None

    def land(self, _: Any) -> None:
        """Take the time, on the thread that ended it."""
        self.landed, self.ended = self._own.outside(), perf_counter()


class StepClock:
    """Clock of one step: every moment counts as one part, and the observer's own work as none.

    Only of models on a CPU: see `_DEVICE`.
    """

    def __init__(self, root: nn.Module) -> None:
        self.own = _Own()
        self._root = root
        self._on_host = all(p.device.type == "cpu" for p in root.parameters())
        self._running = False
        self._cores = CpuWait()
        self._inputs: dict[str, tuple[int | None, int | None]] = {}
        self._reset()

    def _reset(self) -> None:
        self.own.seconds, self.own.began = 0.0, perf_counter()
        self._began = self._since = self._ended = self.own.outside()
        self._loader = self._restarted = False
        self._workers: int | None = None
        self._cores.interval()
        self._without_core = -1
        self._part, self._parts = "other", defaultdict[str, float](float)
        self._loading = self._operators = 0
        self._flights: list[_Flight] = []
        self._waits: list[tuple[str, float, float]] = []  # phase, and when it may begin and must end
        self._entered: float | None = None

    def start(self, *, again: bool = False) -> None:
        """Begin the step; ``again`` with its first forward, where the one before was skipped."""
        self._reset()
        self._running, self._restarted = True, again

    def stop(self) -> None:
        """End it."""
        if self._running:
            self._loading = 0
            self.at("other")
            self._ended = self._since
            self._without_core = self._cores.interval()
        self._running = False

    @property
    def part(self) -> str:
        """Part that the time now counts as."""
        return self._part

    def at(self, part: str) -> None:
        """Count the time until now to the part so far, and from now on to ``part``."""
        if not self._running or self._loading:
            return
        now = self.own.outside()
        self._parts[self._part] += now - self._since
        self._part, self._since = part, now

    def count(self) -> None:
        """Count an operator."""
        self._operators += 1

    def see_operator(self, phase: str, name: str, args: Sequence[Any]) -> None:
        """Follow the phases, and the ranges of the profiler that loaders and DDP enter and leave."""
        if phase != self._part and self._entered is None:
            self.at(phase)
        if name == "_record_function_enter_new":
            if self._loading:
                self._loading += 1
            elif str(args[0]).startswith(_LOADER):
                self.at("data")
                self._loading, self._loader = 1, True
                self._workers = 0 if _IN_PROCESS in args[0] else None
            elif args[0] == _DDP and torch.is_grad_enabled():  # it orders its buckets, and sends buffers, first
                self.at("forward")
                self._entered = self._since
        elif name == "_record_function_exit" and self._loading:
            self._loading -= 1
            self.at(phase)

    def enter_model(self) -> None:
        """End what DDP does before the forward of the model."""
        if self._running and self._entered is not None:
            self._waits.append(("forward", self._entered, self.own.outside()))
        self._entered = None

    def begin_backward(self) -> None:
        """Begin a backward, and have its end seen: after its last gradient, and after what DDP does then."""
        self.at("backward")
        first: list[float] = []
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def gradients_ready() -> None:
            first.append(self.own.outside())
            queue(finished)  # behind the callbacks that others have queued

        def finished() -> None:
            self.at("other")
            if self._running:
                self._waits.append(("backward", first[0], self._since))

        queue(gradients_ready)

    def launch(self, item: Collective, began: float, made: Any) -> None:
        """Follow a collective by the work that its operator returned."""
        flight = _Flight(item, began, self.own)
        self._flights.append(flight)
        boxed = [leaf for leaf in _pytree.tree_leaves(made) if isinstance(leaf, torch.ScriptObject)]
        if boxed and self._on_host:
            try:
                dist.Work.unbox(boxed[-1]).get_future().add_done_callback(flight.land)
            except RuntimeError:  # this backend has no future of its work
                return

    def see_inputs(self, digests: Sequence[str], args: Any, kwargs: Any) -> None:
        """Keep the size of one forward's inputs, by their checksum."""
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        ids = kwargs.get("input_ids", tensors[0] if tensors else None)
        text = isinstance(ids, torch.Tensor) and ids.ndim == 2 and not (ids.is_floating_point() or ids.is_complex())
        text = text and any(isinstance(part, nn.Embedding) for part in self._root.modules())
        rows = ids if text else tensors[0] if tensors else None
        mask, tokens = kwargs.get("attention_mask"), ids.numel() if text else None
        if text and isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            tokens = int(mask.sum())
        for digest in digests:
            self._inputs[digest] = None if rows is None else rows.shape[0], tokens

    def times(self, samples: Sequence[str], wrapper: nn.Module | None) -> LoopTimes:
        """Return the times of the step; ``samples`` are the checksums of the inputs that it trained on."""
        rows, tokens, unknown = self._sizes(samples)
        parts = {name: self._parts.get(name, 0.0) for name in ("forward", "backward", "optimizer", "other")}
        unknown |= _INSIDE
        waits = self._waited()
        early = [(seconds, reduces) for phase, seconds, reduces in waits if phase == "backward"][:-1]
        if self._loader and not self._restarted:
            parts["data"] = self._parts["data"]
        else:
            unknown["data"] = _SKIPPED if self._restarted else _NO_LOADER
            parts["other"] += self._parts.get("data", 0.0)
        if isinstance(wrapper, DistributedDataParallel):
            parts["exposed_dp"] = 0.0
            for phase, seconds, _ in waits:
                parts[phase] -= seconds
                parts["exposed_dp"] += seconds
        elif dist.is_initialized() and dist.get_world_size() > 1:
            unknown["exposed_dp"] = _NOT_DDP
        if not self._on_host:
            unknown |= dict.fromkeys((*parts, *_INSIDE, "exposed_dp", "data"), _DEVICE)
            parts = {}
        return LoopTimes(
            step_s=self._ended - self._began,
            own_s=self.own.seconds,
            operators=self._operators,
            parts=parts,
            collectives=tuple(self._collectives()),
            early_reduce_s=sum(seconds for seconds, _ in early) if "exposed_dp" in parts else None,
            early_reduces=sum(reduces for _, reduces in early),
            cpu_wait_s=None if self._without_core < 0 else self._without_core / 1e9,
            loader_workers=self._workers,
            restarted=self._restarted,
            samples=rows,
            tokens=tokens,
            unknown=unknown,
        )

    def _sizes(self, samples: Sequence[str]) -> tuple[int | None, int | None, dict[str, str]]:
        found = [self._inputs.get(digest, (None, None)) for digest in dict.fromkeys(samples)]
        rows = [rows for rows, _ in found if rows is not None]
        tokens = [tokens for _, tokens in found if tokens is not None]
        unknown = {}
        if not found or len(rows) < len(found):
            unknown["samples"] = "no input tensor of the model was seen"
        if not found or len(tokens) < len(found):
            unknown["tokens"] = "the model's inputs are no token numbers by sample and position"
        return (None if "samples" in unknown else sum(rows)), (None if "tokens" in unknown else sum(tokens)), unknown

    def _waited(self) -> list[tuple[str, float, bool]]:
        """Return each place where this rank had nothing to do but to wait for collectives: phase, seconds, any sent."""
        found, before = [], self._began
        for phase, first, last in self._waits:
            flights = [one for one in self._flights if one.item.phase == phase and before <= one.launched <= last]
            ends = [min(one.landed, last) for one in flights if one.landed is not None]
            found.append((phase, max([first, *ends]) - first, bool(flights)))
            before = last
        return found

    def _collectives(self) -> list[CollectiveTime]:
        rows: dict[tuple[str, str], list[_Flight]] = defaultdict(list)
        for flight in self._flights:
            rows[flight.item.name, flight.item.phase].append(flight)
        made = []
        for (name, phase), flights in rows.items():
            spans = [(flight.began, flight.ended) for flight in flights if flight.ended is not None]
            made.append(
                CollectiveTime(
                    name=name,
                    phase=phase,
                    calls=len(flights),
                    num_bytes=sum(flight.item.num_bytes for flight in flights),
                    seconds=_covered(spans) if len(spans) == len(flights) else None,
                    unknown="" if len(spans) == len(flights) else _DEVICE if not self._on_host else "no end was seen",
                )
            )
        return made


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of ``spans`` is open."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total
