"""Collectives of the CPU ranks of one machine through memory that they share, in place of gloo's sockets.

gloo sends every byte through the loopback device, which copies it four times; here each rank copies what it has and
reads what the others have. A collective begins with a message of a few bytes over gloo, so that a rank which does not
come is waited for, timed out and reported as in any other. From then on all ranks are in it, and count pieces.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.distributed.exchange import StandsFor, begin_exchange

PIECE = 1 << 20
"""Bytes of a slot. Half as much took 1.1 to 1.3 times as long for 8 and 16 MiB, twice as much 0.8 to 1.1 times."""
SLOTS = 2
SIZE = SLOTS * PIECE + 4096  # then a page with the number of pieces that were written, and a token
SPIN = 200  # looks at a count before a rank begins to sleep between them
NAP_S = 5e-5
_KINDS = ("all_reduce", "broadcast")
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
LOOK_S = 0.2  # between looks whether a rank that is waited for still runs


class SharedMemory:
    """Memory of all ranks of ``group``, this one's among it, by `share_memory`.

    Each rank has two slots, written in turn. Before it writes one again it has seen the count of every other rank after
    the piece in between, which is written once the one before has been read.
    """

    def __init__(self, group: dist.ProcessGroup, maps: list[mmap.mmap], processes: list[int]) -> None:
        self.group, self._processes = group, processes
        self._slots = [torch.frombuffer(one, dtype=torch.uint8)[: SLOTS * PIECE].view(SLOTS, PIECE) for one in maps]
        self._counts = [memoryview(one)[SLOTS * PIECE :].cast("q") for one in maps]
        self._rank, self._count = group.rank(), 0

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace contiguous ``tensors`` by their means over all ranks, which are the same on all of them to the bit.

        Each divides its own first, as DDP does; then they are added in the order of ranks. Each type is a collective.

        Raises:
            RuntimeError: a rank has ended, does not come within the group's time limit, or has another size.
        """
        for dtype in sorted({one.dtype for one in tensors}, key=_DTYPES.index):  # in one order on all ranks
            self._mean([one for one in tensors if one.dtype == dtype])
        if not tensors:
            self._meet(StandsFor("all_reduce", 0))

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        self._meet(StandsFor("all_reduce", sum(one.nbytes for one in tensors), tensors[0].dtype))
        ranks = self.group.size()
        for piece in chain.from_iterable(one.view(-1).split(PIECE // one.element_size()) for one in tensors):
            torch.mul(piece, 1 / ranks, out=self._slot(piece.nbytes).view(piece.dtype))
            first, second, *others = (one.view(piece.dtype) for one in self._swap(piece.nbytes))
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)

    def broadcast(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give each rank's ``tensors`` to all others, in place; shapes and types are alike on all ranks.

        Raises:
            RuntimeError: as `mean`.
        """
        every = [one for of_rank in tensors for one in of_rank]
        if not every:
            return
        self._meet(StandsFor("broadcast", sum(one.nbytes for one in every), every[0].dtype))
        for parts in zip_longest(*map(_parts, tensors), fillvalue=()):
            own = parts[self._rank]
            slot = self._slot(PIECE)
            for flat, start in own:
                slot[start : start + len(flat)].copy_(flat)
            slots = self._swap(PIECE)
            for rank, part in enumerate(parts):
                for flat, start in part if rank != self._rank else ():
                    flat.copy_(slots[rank][start : start + len(flat)])

    def _meet(self, meant: StandsFor) -> None:
        """Wait for all ranks, over gloo, and compare what each is about to do and how many pieces it has counted."""
        dtype = -1 if meant.dtype is None else _DTYPES.index(meant.dtype)
        mine = torch.tensor([_KINDS.index(meant.name), meant.num_bytes, self._count, dtype])
        theirs = torch.empty(self.group.size(), len(mine), dtype=mine.dtype)
        begin_exchange(meant, theirs, mine.expand_as(theirs).contiguous(), self.group).wait()
        if not torch.equal(theirs, mine.expand_as(theirs)):
            told = [
                f"{_KINDS[kind]} of {size} bytes of {'nothing' if dtype < 0 else _DTYPES[dtype]} after {count} pieces"
                for kind, size, count, dtype in theirs.tolist()
            ]
            raise RuntimeError(f"ranks are in different collectives, one may have been interrupted: {', '.join(told)}")

    def _slot(self, size: int) -> torch.Tensor:
        """Return the bytes to write before the next `_swap`."""
        return self._slots[self._rank][self._count % SLOTS, :size]

    def _swap(self, size: int) -> list[torch.Tensor]:
        """Give what was written to all ranks, and return what each has written, to be read until the next."""
        turn = self._count % SLOTS
        self._count += 1
        self._counts[self._rank][0] = self._count  # after the copy: other processors see writes in their order (x86)
        for rank, count in enumerate(self._counts):
            if count[0] < self._count:
                self._wait(rank, count)
        return [slots[turn, :size] for slots in self._slots]

    def _wait(self, rank: int, count: memoryview) -> None:
        for _ in range(SPIN):
            time.sleep(0)  # lets another thread or rank of this core go on
            if count[0] >= self._count:
                return
        limit = time.monotonic() + self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        look = time.monotonic() + LOOK_S
        while count[0] < self._count:
            time.sleep(NAP_S)
            if (now := time.monotonic()) > look:
                look = now + LOOK_S
                if now > limit or not _runs(self._processes[rank]):
                    why = "did not answer in time" if now > limit else "has ended"
                    raise RuntimeError(f"rank {rank} of the group {why} inside a collective through shared memory")


def share_memory(group: dist.ProcessGroup, *, may: bool = True) -> SharedMemory | None:
    """Let the ranks of ``group`` share memory; ``None`` on all of them where some cannot or ``may`` not. Collective.

    They can on Linux on x86, whose processors see each other's writes in order, as one user in one namespace of
    processes. Each memory has a number in it that its rank also sends, so that a process of the same id elsewhere is
    not taken for it.
    """
    own = _create() if may else None
    token = secrets.randbits(62)
    if own is not None:
        memoryview(own[1])[SLOTS * PIECE :].cast("q")[1] = token
    sent = torch.tensor([os.getpid(), own[0] if own is not None else -1, token])
    found = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(found, sent, group=group)
    places = [one.tolist() for one in found]
    maps = [_open(*place) for place in places]
    able = torch.tensor(int(all(one is not None for one in maps)))
    dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
    if own is not None:
        os.close(own[0])
    return SharedMemory(group, [one for one in maps if one is not None], [p for p, *_ in places]) if able else None


def _create() -> tuple[int, mmap.mmap] | None:
    """Return a file that exists in memory only, as long as it is open or mapped, and a map of it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        file = os.memfd_create("shardwise")
        os.truncate(file, SIZE)
        return file, mmap.mmap(file, SIZE)
    except (AttributeError, OSError):
        return None


def _open(process: int, file: int, token: int) -> mmap.mmap | None:
    """Map a rank's memory; ``None`` if it is another's."""
    try:
        with Path(f"/proc/{process}/fd/{file}").open("r+b") as opened:
            found = mmap.mmap(opened.fileno(), SIZE)
    except (OSError, ValueError):
        return None
    return found if memoryview(found)[SLOTS * PIECE :].cast("q")[1] == token else None


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Yield what of contiguous ``tensors`` goes into each slot: bytes, and where they begin in it."""
    part: list[tuple[torch.Tensor, int]] = []
    start = 0
    for tensor in tensors:
        flat = tensor.detach().view(-1).view(torch.uint8)
        while len(flat):
            part.append((flat[: PIECE - start], start))
            flat, start = flat[PIECE - start :], start + len(part[-1][0])
            if start == PIECE:
                yield part
                part, start = [], 0
    if part:
        yield part
