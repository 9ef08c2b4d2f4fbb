"""Record peaks of allocated CPU memory from the events of torch's allocator.

While the recorder is on, it sees allocations and frees that torch's CPU allocator reports to the profiler on the
recording thread and in backward. Not seen: memory outside that allocator (numpy, mapped files, libraries, the C
library's own free lists), and blocks that another thread returns: gloo's may be the last to release a collective's
tensor. `Recording.settled` adds those frees. Older blocks are known by the live tensors that `Recording.at_start` is
given.
"""

from __future__ import annotations

import bisect
import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from shardwise.environment import quiet_profiler
from shardwise.measure.state import local

Result = TypeVar("Result")
_torch: Any = torch.autograd  # its stubs lack the profiler's functions
_MARK = "shardwise: "


class Event(NamedTuple):
    """Allocation (``num_bytes`` > 0) or free (< 0) at an address, and its phase."""

    num_bytes: int
    address: int
    phase: str


class Recording(NamedTuple):
    """Recorded events in order.

    Bytes count from the start of the recording, where ``live`` is 0.
    """

    events: tuple[Event, ...]

    @property
    def peak(self) -> int:
        """Return the most bytes above the start."""
        return max(self.peaks().values(), default=0)

    @property
    def net(self) -> int:
        """Return the bytes allocated and not freed by the end, minus freed older bytes."""
        return sum(event.num_bytes for event in self.events)

    def peaks(self) -> dict[str, int]:
        """Return the most bytes above the start in each phase, including those from before it."""
        peaks: dict[str, int] = {}
        live = 0
        for event in self.events:
            peaks[event.phase] = max(peaks.get(event.phase, live), live, live + event.num_bytes)
            live += event.num_bytes
        return peaks

    def at_first(self, phase: str) -> int | None:
        """Return bytes above the start when ``phase`` first began; None if it never did."""
        live = 0
        for event in self.events:
            if event.phase == phase:
                return live
            live += event.num_bytes
        return None

    def at_start(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return bytes of the storages of ``tensors``, alive at the end, that existed at the start."""
        made: set[int] = set()
        for event in self.events:
            (made.add if event.num_bytes > 0 else made.discard)(event.address)
        return sum(size for address, size in storages(tensors).items() if address not in made)

    def settled(self, alive: Iterable[torch.Tensor]) -> Recording:
        """Return the recording with missing frees added for blocks that no tensor of ``alive`` uses.

        Another thread returned them, moments after this one had released them. The free is put where blocks of the same
        role (size, phase, events before and after) were returned, counted in events from their allocation; else of the
        same size and phase; else at the end of the phase. In any case before its address is reused, and within the
        phase if all similar blocks were returned within it.
        """
        left = storages(alive)
        blocks = list(_blocks(self.events))
        lost = [b for b in blocks if b.reused is not None or (b.freed is None and left.get(b.address) != b.num_bytes)]
        if not lost:
            return self
        comm_hooks = [i for i in range(1, len(self.events)) if self.events[i].phase != self.events[i - 1].phase]
        comm_hooks.append(len(self.events))

        def phase_end(block: _Block) -> int:
            return comm_hooks[bisect.bisect_right(comm_hooks, block.made)]

        lives: dict[tuple[object, ...], list[tuple[int, bool]]] = defaultdict(list)
        for b in blocks:
            if b.freed is not None:
                for role in self._roles(b):
                    lives[role].append((b.freed - b.made, b.freed < phase_end(b)))
        added: dict[int, list[_Block]] = defaultdict(list)
        for b in lost:
            same = next((lives[role] for role in self._roles(b) if role in lives), [])
            end = b.made + round(statistics.median(length for length, _ in same)) if same else phase_end(b)
            if all(within for _, within in same):
                end = min(end, phase_end(b))
            added[min(end, b.reused or end, len(self.events))].append(b)
        events: list[Event] = []
        for index, event in enumerate((*self.events, None)):
            phase = self.events[max(0, index - 1)].phase
            events.extend(Event(-b.num_bytes, b.address, phase) for b in added.get(index, ()))
            if event is not None:
                events.append(event)
        return Recording(tuple(events))

    def _roles(self, block: _Block) -> tuple[tuple[object, ...], ...]:
        """Return the properties that identify a block, the most specific first."""
        around = self.events[max(0, block.made - 3) : block.made + 4]
        plain = (block.num_bytes, block.phase)
        return (*plain, *(event.num_bytes for event in around)), plain


@dataclass
class _Block:
    """Block with the indices of its allocation, its free, or the reuse of its address."""

    num_bytes: int
    address: int
    phase: str
    made: int
    freed: int | None = None
    reused: int | None = None


def _blocks(events: Iterable[Event]) -> Iterator[_Block]:
    open_at: dict[int, _Block] = {}
    for index, event in enumerate(events):
        before = open_at.pop(event.address, None)
        if event.num_bytes > 0:
            if before is not None:
                before.reused = index
            open_at[event.address] = block = _Block(event.num_bytes, event.address, event.phase, index)
            yield block
        elif before is not None:
            before.freed = index


def live_tensors() -> list[torch.Tensor]:
    """Return every tensor that Python can see, and their gradients; not those saved by autograd."""
    seen = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return seen + [tensor.grad for tensor in seen if tensor.is_leaf and tensor.grad is not None]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Map addresses to bytes of each distinct CPU storage under ``tensors``.

    Shared ones in full.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        mine = local(tensor)
        if mine.device.type == "cpu" and mine.layout == torch.strided and not isinstance(mine, FakeTensor):
            storage = mine.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


class AllocationRecorder:
    """Recorder of allocations and phases between `start` and `stop`; free of cost when off.

    A thread has one profiler at a time: `start` returns False, and nothing is recorded, if the user's own is on.
    """

    def __init__(self) -> None:
        self._on = False

    def start(self, phase: str = "") -> bool:
        """Start; return whether it was possible."""
        if _torch._profiler_enabled():
            return False
        made = profiler.profile(profile_memory=True, use_cpu=True, use_kineto=True)
        config = made.config(create_trace_id=False)
        with quiet_profiler():
            _torch._prepare_profiler(config, made.kineto_activities)
            # user scope only: the marks of phases, without operators
            _torch._enable_profiler(config, made.kineto_activities, {torch._C._profiler.RecordScope.USER_SCOPE})
        self._on = True
        self.enter(phase)
        return True

    def enter(self, phase: str) -> None:
        """Begin a phase for the following events."""
        if self._on:
            with record_function(_MARK + phase):
                pass

    def stop(self) -> Recording:
        """Stop, and return the recording."""
        if not self._on:
            return Recording(())
        self._on = False
        found = _torch._disable_profiler()
        return Recording(tuple(_events(found.experimental_event_tree())))


def record(call: Callable[[], Result]) -> tuple[Result, Recording]:
    """Run ``call`` and record it; with other ranks, add the frees by gloo's threads.

    ``Recording.peak`` is bytes above the start; ``Recording.at_start(tensors)`` gives the bytes of ``tensors`` before
    it. Memory freed inside must have been allocated inside: keep older tensors alive in the caller, else torch logs
    once a second on stderr that it met a block of unknown size.

    Raises:
        RuntimeError: another profiler is on in this thread.
    """
    recorder = AllocationRecorder()
    if not recorder.start():
        raise RuntimeError("another profiler is on in this thread; end it before allocations are recorded")
    try:
        result = call()
    finally:
        recording = recorder.stop()
    shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return result, recording.settled(live_tensors()) if shared else recording


def _events(roots: Iterable[Any]) -> Iterator[Event]:
    """Yield allocations in order of time, each with the last phase that was marked before it."""
    flat: list[Any] = []
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children)
        flat.append(node)
    flat.sort(key=lambda node: node.start_time_ns)
    phase = ""
    for node in flat:
        fields = node.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
            if fields.device.type == "cpu" and fields.ptr:
                yield Event(fields.alloc_size, fields.ptr, phase)
        elif node.name.startswith(_MARK):
            phase = node.name.removeprefix(_MARK)
