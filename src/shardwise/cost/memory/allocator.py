"""Model of PyTorch's caching allocator: bytes *reserved* for a sequence of allocations.

Live bytes underestimate what a device needs: the allocator rounds, requests memory from the device in segments, caches
freed blocks per stream, and cannot use a hole that is too small. This model replays its rules, on integers.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.x, default settings (no max_split_size_mb, no power-of-two
rounding, no garbage-collection threshold). Not modelled: private pools of CUDA graphs, and blocks that other streams
have marked with ``record_stream`` (FSDP2 marks none). Addresses of segments are assumed to grow in the order of
allocation.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable

from shardwise.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_BYTES = MIB  # kSmallSize: requests up to here come from the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: segment of a request below MIN_LARGE_BYTES; page of a growing segment
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here a request gets a separate segment, rounded to
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge
_ENDLESS = LARGE_SEGMENT_BYTES << 40  # a multiple of both pages


class Block:
    """Block of a segment. ``mapped`` is False for unmapped addresses of an expandable segment."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(
        self, pool: _Pool, address: int, size: int, before: Block | None = None, after: Block | None = None
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = True
        self.mapped = True
        self.before = before
        self.after = after


class _Pool:
    """Free blocks of one stream and size class, by size and then address; unmapped by address."""

    __slots__ = ("is_small", "keys", "unmapped")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        insort(self.keys, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.address))]


class CachingAllocator:
    """PyTorch's allocator on one device; all sizes in bytes.

    ``expandable`` is ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``. ``limit_bytes`` is the device's memory: at
    the limit cached blocks are released and the request is retried, as PyTorch does; if that fails, ``out_of_memory``
    is set and the request is granted anyway, so that the peak shows how much memory is missing.
    """

    def __init__(self, *, expandable: bool = False, limit_bytes: int | None = None) -> None:
        self.expandable = expandable
        self.limit_bytes = limit_bytes
        self.allocated = 0  # rounded blocks in use, as PyTorch counts them
        self.reserved = 0
        self.peak_reserved = 0
        self.segments = 0
        self.retries = 0
        self.out_of_memory = False
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}
        self._end = 0

    def alloc(self, num_bytes: int, stream: Hashable = 0) -> Block | None:
        """Allocate ``num_bytes`` on ``stream``; ``None`` for zero bytes, which take no memory."""
        if num_bytes <= 0:
            return None
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        is_small = size <= SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small)
        keys = pool.keys
        index = bisect_left(keys, (size,))
        if index == len(keys):
            block = self._grow(pool, size) if self.expandable else self._new_segment(pool, size)
        else:
            after = keys[index][2].after
            if after is not None and not after.mapped:
                index = _best(keys, index)
            block = keys.pop(index)[2]
        remaining = block.size - size
        if remaining >= MIN_BLOCK_BYTES if is_small or self.expandable else remaining > SMALL_BYTES:
            rest = self._split(block, size)
            insort(keys, (remaining, rest.address, rest))
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block | None) -> None:
        """Return ``block`` to its stream's pool and merge it with free neighbours."""
        if block is None:
            return
        if block.free:
            raise ValueError(f"the block at {block.address} was freed before")
        pool = block.pool
        self.allocated -= block.size
        block.free = True
        self._join(block)
        insort(pool.keys, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """Release every fully free segment, or every fully free page of expandable segments."""
        for pool in self._pools.values():
            for _, _, block in list(pool.keys):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size
                    self.segments -= 1

    def unlink(self, blocks: Iterable[Block | None]) -> None:
        """Cut the links of ``blocks`` and of all free ones; the allocator cannot be used any more.

        The garbage collector frees a chain of linked blocks by recursion, which overflows the stack of a browser.
        """
        pools = self._pools.values()
        free = [block for pool in pools for block in (*pool.unmapped, *(key[2] for key in pool.keys))]
        for block in itertools.chain(blocks, free):
            if block is not None:
                block.before = block.after = None
        for pool in pools:
            pool.keys.clear()
            pool.unmapped.clear()

    def _take(self, num_bytes: int) -> None:
        """Take memory from the device."""
        self.out_of_memory |= self._lacks(num_bytes)
        self.reserved += num_bytes
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def _lacks(self, num_bytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved + num_bytes > self.limit_bytes

    def _release(self) -> None:
        self.retries += 1
        self.empty_cache()

    def _new_segment(self, pool: _Pool, size: int) -> Block:
        if pool.is_small:
            full = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            full = LARGE_SEGMENT_BYTES
        else:
            full = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self._lacks(full):
            self._release()
        self._take(full)
        block = Block(pool, self._end, full)
        self._end += full
        self.segments += 1
        return block

    def _split(self, block: Block, size: int) -> Block:
        """Shorten ``block`` to ``size``; returns the remainder, which follows it."""
        after = block.after
        rest = Block(block.pool, block.address + size, block.size - size, block, after)
        rest.mapped = block.mapped
        if after is not None:
            after.before = rest
        block.after = rest
        block.size = size
        return rest

    def _join(self, block: Block) -> None:
        """Merge with free neighbours, and remove them from the pool."""
        before, after, keys = block.before, block.after, block.pool.keys
        if before is not None and before.free and before.mapped:
            del keys[bisect_left(keys, (before.size, before.address))]
            block.address = before.address
            block.size += before.size
            block.before = before = before.before
            if before is not None:
                before.after = block
        if after is not None and after.free and after.mapped:
            del keys[bisect_left(keys, (after.size, after.address))]
            block.size += after.size
            block.after = after = after.after
            if after is not None:
                after.before = block

    # expandable segments

    def _grow(self, pool: _Pool, size: int) -> Block:
        """Map pages behind a free block, in a hole, or at the segment's end."""
        page = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        hole, pages = self._hole(pool, size, page)
        if self._lacks(pages):
            self._release()
            hole, pages = self._hole(pool, size, page)
        self._take(pages)
        index = pool.unmapped.index(hole)
        if hole.size > pages:
            pool.unmapped[index] = self._split(hole, pages)
        else:
            del pool.unmapped[index]
        hole.mapped = True
        self._join(hole)
        return hole

    def _hole(self, pool: _Pool, size: int, page: int) -> tuple[Block, int]:
        """Find the first hole that fits ``size`` with the free block before it; and missing bytes."""
        for hole in pool.unmapped:
            before = hole.before
            head = before.size if before is not None and before.free else 0
            if head + hole.size >= size:
                return hole, -(-(size - head) // page) * page
        tail = Block(pool, self._end, _ENDLESS)  # addresses cost nothing: the segment can always grow
        self._end += _ENDLESS
        tail.mapped = False
        pool.unmapped.append(tail)
        self.segments += 1
        return tail, -(-size // page) * page

    def _unmap(self, block: Block) -> None:
        """Unmap the full pages inside a free block; they become a hole."""
        pool = block.pool
        page = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        first = -(-block.address // page) * page  # segments begin at multiples of every page
        last = (block.address + block.size) // page * page
        if last <= first:
            return
        pool.remove(block)
        if first > block.address:
            inner = self._split(block, first - block.address)
            pool.add(block)
            block = inner
        if last < block.address + block.size:
            pool.add(self._split(block, last - block.address))
        self.reserved -= block.size
        block.mapped = False
        after, before = block.after, block.before
        if after is not None and not after.mapped:
            pool.unmapped.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and not before.mapped:
            before.size, before.after = before.size + block.size, block.after
            if block.after is not None:
                block.after.before = before
        else:
            pool.unmapped.append(block)
            pool.unmapped.sort(key=lambda hole: hole.address)


def _best(keys: list[tuple[int, int, Block]], place: int) -> int:
    """Find the best fit, where a block counts with the unmapped addresses behind it."""
    reach = _reach(keys[place][2])
    while place + 1 < len(keys) and keys[place + 1][0] < reach:
        following = _reach(keys[place + 1][2])
        if following >= reach:
            break
        place, reach = place + 1, following
    return place


def _reach(block: Block) -> int:
    """Bytes of a block with the unmapped ones behind it."""
    after = block.after
    return block.size if after is None or after.mapped else block.size + after.size
