"""Process group: adopt an existing one, or create one and destroy it."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from shardwise.distributed.control_message import Meeting, Table, announce_joined, announce_left, collective_of
from shardwise.distributed.rendezvous import hello, meet
from shardwise.distributed.same_environment import facts_of, interface_problems
from shardwise.environment import Rendezvous, launcher, node_name, rendezvous
from shardwise.errors import MachineError, ShardwiseError, UserError

_CSR = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = (*_CSR, torch.sparse_csc, torch.sparse_bsc)
_THREADS = "/proc/self/task"
_BY_DDP = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    | {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
)


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and groups of this process.

    ``control`` is a CPU group for small messages.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    control: dist.ProcessGroup | None
    owns_group: bool
    owns_control: bool

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


_STAYING: dict[int, Ranks] = {}


def join(device: str = "auto", timeout_s: float = 1800.0, *, alike: Mapping[str, Any] | None = None) -> Ranks:
    """Join the world of the environment, adopt an existing group, or form a world of one.

    ``alike`` are JSON documents that must be the same on all ranks, such as the config, under the names that a message
    gives them.

    Raises:
        UserError: the rendezvous variables are incomplete, or ranks differ or have not come.
        MachineError: the other ranks cannot be reached.
    """
    place = _place()
    local_rank, local_world_size = _on_this_host() if place is None else (place.local_rank, place.local_world_size)
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    target = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda" and place is None and dist.is_initialized() and torch.cuda.current_device():
        target = torch.device(kind, torch.cuda.current_device())  # the script has chosen one
    elif kind == "cuda":
        torch.cuda.set_device(target)
    owns = not dist.is_initialized()
    if owns:
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            if place is None:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
            else:
                store = None if launcher() == "shardwise" else _met(place, target, timeout_s, alike or {})
                dist.init_process_group(
                    backend,
                    init_method="env://" if store is None else None,
                    store=store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=timeout,
                    device_id=target if kind == "cuda" else None,
                )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            where = f"{place.master_addr}:{place.master_port}" if place else "this process"
            raise MachineError(
                f"rank {place.rank if place else 0} cannot join the world at {where}: {error}"
            ) from error
    world = dist.get_world_size()
    needs_control = world > 1  # also with gloo as backend: see `shardwise.distributed.control_message`
    patience = datetime.timedelta(seconds=timeout_s) if owns else None
    control = dist.new_group(backend="gloo", timeout=patience, group_desc="control") if needs_control else None
    if control is not None:
        announce_joined(control)
    return Ranks(
        rank=dist.get_rank(),
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=target,
        control=control,
        owns_group=owns,
        owns_control=needs_control,
    )


def _met(place: Rendezvous, target: torch.device, timeout_s: float, alike: Mapping[str, Any]) -> Store:
    """Meet the ranks of another launcher, whose nodes may differ; returns the store of this attempt."""
    model = torch.cuda.get_device_name(target) if target.type == "cuda" else target.type
    facts = facts_of(place, torch.__version__, model, alike)
    return meet(place, hello(place, node_name(), facts, interface_problems(target.type)), timeout_s)


def _place() -> Rendezvous | None:
    """Read the rendezvous from the environment; an adopted group may exist without one."""
    try:
        return rendezvous()
    except UserError:
        if dist.is_initialized():
            return None
        raise


def _on_this_host() -> tuple[int, int]:
    """This rank's number among those of an adopted group on its host, and how many they are.

    ``mp.spawn`` with ``init_process_group(rank=, world_size=)`` sets no LOCAL_RANK. Host names go through the
    group's store: a backend may need a device before it can send anything.
    """
    if not dist.is_initialized():
        return 0, 1
    rank, world = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("shardwise/host", dist.distributed_c10d._get_default_store())
    store.set(str(rank), socket.gethostname())
    hosts = [store.get(str(other)).decode() for other in range(world)]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def leave_at_exit(ranks: Ranks) -> None:
    """Call `leave` when the process ends, unless it was called before.

    Frees the group and its threads.
    """
    _leave_rest_at_exit()
    _STAYING[id(ranks)] = ranks


def leave(ranks: Ranks) -> None:
    """Destroy the groups that `join` created; an adopted group stays."""
    _STAYING.pop(id(ranks), None)
    if not dist.is_initialized():
        return
    made = ranks.control if ranks.owns_control and _registered(ranks.control) else None
    if made is not None:
        announce_left(made)
    if ranks.control is not None:
        _drain_gloo_threads()
    if ranks.owns_group:
        dist.destroy_process_group()
    elif made is not None:
        dist.destroy_process_group(made)


def _registered(group: dist.ProcessGroup | None) -> bool:
    """Return whether the group is still registered; it may be gone when the process ends."""
    try:
        return dist.get_rank(group) >= 0
    except ValueError:
        return False


@functools.cache
def drain_at_exit() -> None:
    """Let gloo's threads release what they hold of Python before the interpreter ends: see `_drain_gloo_threads`."""
    atexit.register(_drain_gloo_threads)


@functools.cache
def _leave_rest_at_exit() -> None:
    atexit.register(_leave_rest)


def _leave_rest() -> None:
    for ranks in [*_STAYING.values()]:
        leave(ranks)


def _drain_gloo_threads(quiet_s: float = 0.005, limit_s: float = 2.0) -> None:
    """Wait until gloo's threads have released the tensors of the last messages.

    A thread of PyTorch needs the interpreter for that, also after the message has arrived. DDP's reducer, if it
    has the last reference to a group, waits for such a thread with the interpreter locked, and the process hangs (1 of
    30 runs). A thread that asks while the interpreter ends is killed by it, and the process dies of ``terminate called
    without an active exception`` (7 of 60 runs on a machine with more processes than cores). Sleeping releases the
    interpreter; threads are idle when none of them runs or wants to.
    """
    end = time.monotonic() + limit_s
    looks = 0
    while looks < 2 and time.monotonic() < end:
        time.sleep(quiet_s)
        looks = 0 if _others_run() else looks + 1


def _others_run() -> bool:
    """Return whether another thread of this process runs or wants to.

    False without Linux's ``/proc``.
    """
    me = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for thread in os.listdir(_THREADS):
            if thread != me and _state_of(thread) == b"R":
                return True
    return False


def _state_of(thread: str) -> bytes:
    """Return the letter of a thread's state; dozens are looked at each time, so without pathlib."""
    with contextlib.suppress(OSError):  # it has just ended
        file = os.open(f"{_THREADS}/{thread}/stat", os.O_RDONLY)
        try:
            return os.read(file, 512).rpartition(b")")[2].split()[0]
        finally:
            os.close(file)
    return b""


def gather_ints(
    values: list[int], ranks: Ranks, what: str = "", *, patient: bool = True, limit_s: float | None = None
) -> list[list[int]]:
    """Gather each rank's integers, in rank order, as `gather_table`."""
    found: list[list[int]] = gather_table(values, ranks, what, patient=patient, limit_s=limit_s).tolist()
    return found


def gather_table(
    values: list[int], ranks: Ranks, what: str = "", *, patient: bool = True, limit_s: float | None = None
) -> Table:
    """Gather each rank's integers, a row in rank order: [ranks, integers].

    One small collective (two for more than 92 integers).

    ``what`` names this rank's operation, in at most 24 letters. Unless ``patient``, a long wait is reported, and
    ends after ``limit_s``.

    Raises:
        TrainingError: on all ranks, if they are in different operations, each waiting for the others to join; on
            this one, where others have left or did not come.
    """
    if ranks.control is None:  # one process, or a dry run of one rank: the others are as it is
        return np.array([values] * ranks.world_size, dtype=np.int64)
    meeting = Meeting(values, ranks.control, what, limit_s=limit_s)
    meeting.wait(patient=patient)
    rows = meeting.rows()
    return rows if meeting.fits else _gathered(values, ranks)


def _gathered(values: list[int], ranks: Ranks) -> Table:
    found: Table = _all_of(torch.tensor(values, dtype=torch.int64), ranks).numpy()
    return found


def _all_of(mine: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the tensor of each rank, [ranks, elements], of equal lengths."""
    rows = mine.new_empty(ranks.world_size * mine.numel())
    assert ranks.control is not None
    with collective_of(ranks.control):
        ranks.control._allgather_base(rows, mine).wait()
    return rows.view(ranks.world_size, -1)


def gather_largest(values: list[int], ranks: Ranks) -> list[int]:
    """Return the largest of all ranks' integers (0 to 255) at each place; one small collective."""
    if ranks.control is None:
        return values
    largest = torch.tensor(values, dtype=torch.uint8)
    with collective_of(ranks.control):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.control)
    return [int(value) for value in largest.tolist()]


def gather_text(text: str, ranks: Ranks) -> list[str]:
    """Gather each rank's text, in rank order. Sent as bytes of text, not as objects."""
    if ranks.control is None:
        return [text]
    payload = _bytes_of(text)
    lengths = gather_table([payload.numel()], ranks)[:, 0].tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    rows = _all_of(padded, ranks).numpy()
    return [row[:length].tobytes().decode().strip() for row, length in zip(rows, lengths, strict=True)]


def _bytes_of(text: str) -> torch.Tensor:
    """Return the bytes of a text, at least one."""
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)


def prepared_by_main(prepare: Callable[[], str], ranks: Ranks, what: str) -> str:
    """Call ``prepare`` on rank 0 only, and return its result on every rank. Collective.

    ``prepare`` finds no process group: a model whose forward calls a collective, which nobody else would join, sees
    the same as before ranks start.

    Raises:
        ShardwiseError: on rank 0, the error of ``prepare``.
        UserError: on the others, that rank 0 could not prepare ``what``.
    """
    text, failure = "", None
    if ranks.is_main:
        try:
            with no_process_group():
                text = prepare()
        except ShardwiseError as error:
            failure = error
    text = broadcast_text(text, ranks)
    if failure is not None:
        raise failure
    if not text:
        told = UserError(f"rank 0 could not prepare {what}; its message shows the reason")
        told.on_all_ranks = True
        raise told
    return text


@contextlib.contextmanager
def no_process_group() -> Iterator[None]:
    """Inside, ``torch.distributed`` is as if it were not initialised."""
    group = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group


def broadcast_text(text: str, ranks: Ranks) -> str:
    """Broadcast rank 0's text to every rank."""
    if ranks.control is None:
        return text
    payload = _bytes_of(text if ranks.is_main else "")
    length = int(gather_table([payload.numel()], ranks)[0, 0])
    if not ranks.is_main:
        payload = torch.empty(length, dtype=torch.uint8)
    with collective_of(ranks.control):
        dist.broadcast(payload, src=0, group=ranks.control)
    return payload.numpy().tobytes().decode().strip()


def send(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast rank 0's values into ``tensor`` and return it; a sparse one is recreated.

    Collective.

    Sends bytes, as a backend need not support a dtype to copy it, and a contiguous copy where that is
    needed: a backend ignores strides, and would write a tensor made by ``expand`` past the end of its memory.
    """
    if tensor.layout is not torch.strided:
        return _sent_sparse(tensor)
    once = tensor.detach()
    for axis, stride in enumerate(once.stride()):
        if stride == 0 and once.shape[axis] > 1:
            once = once.narrow(axis, 0, 1)
    flat = once.resolve_conj().resolve_neg().contiguous()
    if flat.numel():
        dist.broadcast(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8), src=0)
    if flat is not once:
        once.copy_(flat)
    return tensor


def _sent_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Broadcast a sparse tensor; ranks may have different numbers of elements in it."""
    if tensor.layout in _CSR:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _COMPRESSED:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor._indices(), tensor._values()]
    sent = []
    for part in parts:
        shape = send(torch.tensor(part.shape, device=part.device)).tolist()
        same = list(part.shape) == shape  # always true on rank 0
        sent.append(send(part.detach().clone() if same else part.new_empty(shape)))
    if tensor.layout in _COMPRESSED:
        outer, inner, values = sent
        return torch.sparse_compressed_tensor(outer, inner, values, size=tensor.shape, layout=tensor.layout)
    indices, values = sent
    found = torch.sparse_coo_tensor(indices, values, size=tensor.shape, check_invariants=False)
    return found._coalesced_(bool(send(torch.tensor([tensor.is_coalesced()], device=tensor.device)).item()))


def is_sent_by_ddp(buffer: torch.Tensor) -> bool:
    """Return whether DDP, which flattens and copies buffers, can send ``buffer``."""
    strided = buffer.layout is torch.strided and buffer.dtype in _BY_DDP
    return strided and all(stride or size < 2 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
