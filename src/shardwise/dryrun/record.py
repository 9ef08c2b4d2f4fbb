"""Record allocations, frees and collectives of a program on fake tensors, per storage.

Torch is imported inside functions only, so that planning needs none of it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.cost.memory.allocator import CachingAllocator
from shardwise.cost.memory.estimate import CATEGORIES
from shardwise.distributed.exchange import exchange_now, is_exchange
from shardwise.distributed.local_tensor import stored

if TYPE_CHECKING:
    import torch

PHASES = ("load", "forward", "backward", "optimizer")  # clipping counts as the optimizer's
# c10d operator → (its common name, the argument with the full tensor). `measure.collectives` has its own
# table: measurement shares no code with prediction.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "all_reduce": ("all_reduce", 0),  # functional collectives, of DTensor
    "all_reduce_": ("all_reduce", 0),
}


class StorageEvent(NamedTuple):
    """Allocation (positive) or free (negative) of ``num_bytes`` in a storage, in (step, phase)."""

    storage: int
    num_bytes: int
    stream: str
    step: int
    phase: str


class Sent(NamedTuple):
    """Collective with the bytes of the full (unsharded) tensor."""

    name: str
    num_bytes: int
    step: int
    phase: str


@dataclass(frozen=True)
class Peak:
    """Peak of a phase: live bytes, their categories at that moment, and bytes reserved so far."""

    step: int
    phase: str
    allocated: int
    reserved: int
    parts: dict[str, int]


class StorageRecorder:
    """Recorder of storage events in order, with the category of each storage.

    ``phase`` is the program's current phase. A storage has the category it was last given; an unnamed one is an
    activation if it was created in a forward and outlived it, else a temporary.
    """

    def __init__(self, phase: Callable[[], tuple[int, str]], stream: Callable[[], str]) -> None:
        self.events: list[StorageEvent] = []
        self.sent: list[Sent] = []
        self.muted = 0
        self.forward_from = 0
        self._phase = phase
        self._stream = stream
        self._live: dict[int, tuple[int, int, str]] = {}  # storage's address → (number, bytes, stream)
        self._names: dict[int, str] = {}
        self._finalizers: dict[int, Any] = {}
        self._next = 0
        self._held: tuple[int, int] | None = None

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` from now on, if it is new."""
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = (self._next, 0, self._stream())
        self._finalizers[key] = weakref.finalize(storage, self._gone, key)
        self._finalizers[key].atexit = False
        self._next += 1
        self.resized(key, storage.nbytes())

    def resized(self, key: int, num_bytes: int) -> None:
        """Record a new size of a storage."""
        if key not in self._live:
            return
        number, before, stream = self._live[key]
        if before == num_bytes:
            return
        step, phase = self._phase()
        if before:
            self.events.append(StorageEvent(number, -before, stream, step, phase))
        if num_bytes:
            stream = self._stream() if not before else stream
            self.events.append(StorageEvent(number, num_bytes, stream, step, phase))
        self._live[key] = (number, num_bytes, stream)

    def moment(self, num_bytes: int, category: str) -> None:
        """Record ``num_bytes`` allocated and freed within one operator."""
        if not num_bytes:
            return
        step, phase = self._phase()
        self._names[self._next] = category
        self.events.append(StorageEvent(self._next, num_bytes, self._stream(), step, phase))
        self.events.append(StorageEvent(self._next, -num_bytes, self._stream(), step, phase))
        self._next += 1

    def hold(self, num_bytes: int, category: str) -> None:
        """Record ``num_bytes`` allocated until `release`."""
        self.release()
        self._names[self._next] = category
        step, phase = self._phase()
        self.events.append(StorageEvent(self._next, num_bytes, self._stream(), step, phase))
        self._held = (self._next, num_bytes)
        self._next += 1

    def release(self) -> None:
        """Record that what is held is freed."""
        if self._held is not None:
            number, num_bytes = self._held
            step, phase = self._phase()
            self.events.append(StorageEvent(number, -num_bytes, self._stream(), step, phase))
            self._held = None

    def mark(self) -> None:
        """Record the start of a phase, even if it allocates nothing."""
        step, phase = self._phase()
        if not self.events or self.events[-1].step != step or self.events[-1].phase != phase:
            self.events.append(StorageEvent(-1, 0, "default", step, phase))

    def name(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of these tensors; new ones are counted from now on."""
        for tensor in tensors:
            inner = stored(getattr(tensor, "_local_tensor", tensor))
            if inner.device.type == "meta":
                continue
            storage = inner.untyped_storage()
            self.see(storage)
            self._names[self._live[storage._cdata][0]] = category

    def category_of(self, tensor: torch.Tensor) -> str | None:
        """Return the category of a tensor's storage, if set."""
        found = self._live.get(stored(getattr(tensor, "_local_tensor", tensor)).untyped_storage()._cdata)
        return None if found is None else self._names.get(found[0])

    def live_since(self, number: int) -> list[int]:
        """Return the live storages created at or after ``number``."""
        return [own for own, _, _ in self._live.values() if own >= number]

    def name_numbers(self, numbers: Iterable[int], category: str) -> None:
        """Set the category of storages that have none yet."""
        for number in numbers:
            self._names.setdefault(number, category)

    @property
    def next_number(self) -> int:
        """Return the number of the next storage."""
        return self._next

    def categories(self) -> dict[int, str]:
        """Return the category of each named storage."""
        return dict(self._names)

    def close(self) -> None:
        """Stop tracking the remaining storages."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._live.clear()

    def _gone(self, key: int) -> None:
        if key in self._live:
            self.resized(key, 0)
            del self._live[key], self._finalizers[key]


def peaks_of(
    events: Iterable[StorageEvent], categories: dict[int, str], *, expandable: bool = False
) -> tuple[tuple[Peak, ...], dict[str, int]]:
    """Compute the peak of each (step, phase) in order, and the maximum of each category.

    Every event goes through a `CachingAllocator`, too; ``reserved`` is its maximum up to the phase's end.
    """
    memory = CachingAllocator(expandable=expandable)
    blocks: dict[int, Any] = {}
    now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    most = dict(now)
    found: dict[tuple[int, str], Peak] = {}
    live = 0
    best = 0
    place: tuple[int, str] | None = None
    for number, num_bytes, stream, step, phase in events:
        if (step, phase) != place:
            place = (step, phase)
            if place not in found or live > found[place].allocated:
                found[place] = Peak(step, phase, live, memory.peak_reserved, dict(now))
            best = found[place].allocated
        if not num_bytes:
            continue
        category = categories.get(number) or ("temporaries" if stream == "default" else "buffers")
        live += num_bytes
        now[category] += num_bytes
        if num_bytes > 0:
            blocks[number] = memory.alloc(num_bytes, stream)
            most[category] = max(most[category], now[category])
        else:
            memory.free(blocks.pop(number))
        if live > best:
            best = live
            found[place] = Peak(step, phase, live, memory.peak_reserved, dict(now))
        elif memory.peak_reserved > found[place].reserved:
            last = found[place]
            found[place] = Peak(step, phase, last.allocated, memory.peak_reserved, last.parts)
    return tuple(found.values()), most


@contextmanager
def recording(recorder: StorageRecorder, *, gloo: bool, on_cpu: bool) -> Iterator[None]:
    """Record every operator on this thread, and backward's, in ``recorder``.

    Enter it inside the fake mode. ``on_cpu`` counts tensors in host memory: the random state that recompute stores per
    block. With ``gloo``, the buffers of gloo's collectives are counted: reduce_scatter reduces a copy of its input,
    all_gather gathers into a flat copy of its output, which lives until somebody waits for it
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). Gloo's thread frees them, at times earlier or later.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        """Dispatch mode for operators of plain tensors.

        Those of DTensor arrive as operators on their local shards.
        """

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            if recorder.muted or func.is_view:
                return result
            _note(recorder, func, args, result, gloo)
            return result

    resize = torch.UntypedStorage.resize_
    random_state = torch.get_rng_state
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_and_note(self: Any, size: int) -> Any:
        result = resize(self, size)
        if not recorder.muted:
            recorder.resized(self._cdata, int(size))
        return result

    def random_state_seen() -> torch.Tensor:
        state = random_state()
        if on_cpu:
            recorder.name([state], "activations")
        return state

    def propagate_unseen(*args: Any, **kwargs: Any) -> Any:  # it creates fake tensors of global shape
        recorder.muted += 1
        try:
            return propagate(*args, **kwargs)
        finally:
            recorder.muted -= 1

    try:
        with (
            swapped(torch.UntypedStorage, "resize_", resize_and_note),
            swapped(torch, "get_rng_state", random_state_seen),
            swapped(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen),
            Mode(),
        ):
            yield
    finally:
        recorder.close()


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of ``owner`` inside the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _note(recorder: StorageRecorder, func: Any, args: Any, result: Any, gloo: bool) -> None:
    recorder.mark()
    name = func._overloadpacket.__name__
    exchanged = is_exchange(name)
    if func.namespace in ("c10d", "_c10d_functional") and (name in _COLLECTIVES or exchanged):
        step, phase = recorder._phase()
        if exchanged and (meant := exchange_now()) is not None:
            recorder.sent.append(Sent(meant.name, meant.num_bytes, step, phase))
        elif not exchanged:
            field, position = _COLLECTIVES[name]
            size = sum(t.numel() * t.element_size() for t in tensors_of(args[position]))
            recorder.sent.append(Sent(field, size, step, phase))
            if gloo and field == "all_gather" and size:
                recorder.hold(size, "buffers")
            elif gloo and field == "reduce_scatter":
                recorder.moment(size, "buffers")
    for tensor in tensors_of(result):
        if tensor.device.type != "meta":
            recorder.see(tensor.untyped_storage())
            if name == "_to_copy" and recorder.category_of(args[0]) == "parameters":
                recorder.name([tensor], "buffers")  # autocast's low-precision copy of a weight


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def totals(sent: Iterable[Sent], step: int) -> dict[str, tuple[int, int]]:
    """Return calls and bytes of each collective of one step."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for item in sent:
        if item.step == step:
            calls, size = found[item.name]
            found[item.name] = (calls + 1, size + item.num_bytes)
    return dict(found)


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Create a fake process group of ``world_size`` ranks, of which this process is ``rank``.

    The mesh is built outside the fake mode, which does not support the operations needed for it.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.parallel import apply

    build_mesh = getattr(apply, "build_mesh")  # noqa: B009 (a name that the module only imports)

    def build_for_real(*args: Any) -> Any:
        with unset_fake_temporarily():
            return build_mesh(*args)

    joined = DeviceMesh._concatenate

    def join_for_real(*args: Any) -> Any:  # FSDP2's mesh over the data- and tensor-parallel axes
        with unset_fake_temporarily():
            return joined(*args)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            swapped(apply, "build_mesh", build_for_real),
            swapped(DeviceMesh, "_concatenate", staticmethod(join_for_real)),
            # it reads data of other ranks
            swapped(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def naming_shards(recorder: StorageRecorder) -> Iterator[None]:
    """Categorize gradients in FSDP2's reduction as buffers, and end what a gather holds where it is waited for."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    reduce = getattr(group, "foreach_reduce")  # noqa: B009
    copy_out = getattr(group, "foreach_all_gather_copy_out")  # noqa: B009

    def named(params: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.name(gradients, "buffers")
        first = recorder.next_number
        result = reduce(params, gradients, *args, **kwargs)
        recorder.name_numbers(recorder.live_since(first), "buffers")
        return result

    def waited(*args: Any, **kwargs: Any) -> Any:
        recorder.release()
        return copy_out(*args, **kwargs)

    with swapped(group, "foreach_reduce", named), swapped(group, "foreach_all_gather_copy_out", waited):
        yield


def sharding_units(module: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups in ``module``, in the order of its modules."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


def stream_name(module: torch.nn.Module | None) -> str:
    """Return the name of the current stream, among those of FSDP2."""
    import torch

    current = torch.cpu.current_stream()
    if module is None:
        return "default"
    for group in sharding_units(module):
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            if current is getattr(group.comm_ctx, f"{name}_stream", None):
                return name
        break
    return "default"


def answer_reductions(outer: torch.nn.Module) -> None:
    """Let DDP's reducer run in a fake world.

    It gets its buckets back at once, because a fake group's own result is empty, and does not reorder them after
    the first step, which would read data of other ranks. Their bytes stay the same.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from shardwise.parallel.data_parallel.ddp import Replicated

    def hook(state: object, bucket: Any) -> Any:
        buffer = bucket.buffer()
        dist.all_reduce(buffer)
        done: Any = torch.futures.Future()
        done.set_result(buffer)
        return done

    if isinstance(outer, Replicated) and outer.reduction is not None:
        outer.reduction.waits = True
    elif isinstance(outer, DistributedDataParallel):
        hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
        outer.register_comm_hook(None, hook)
    if isinstance(outer, DistributedDataParallel):
        blocks: Any = outer
        blocks.reducer = _FixedBuckets(outer.reducer)


class _FixedBuckets:
    """DDP's reducer without the reordering of its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
