"""The caching allocator's rules, by cases worked out by hand from its source."""

from __future__ import annotations

import gc
import itertools
import random

import pytest

from shardwise.cost.memory.allocation_trace import AllocationTrace
from shardwise.cost.memory.allocator import Block, CachingAllocator
from shardwise.cost.memory.estimate_memory import _simulated
from shardwise.cost.memory.simulate import fullest, replay
from shardwise.units import KIB, MIB


def test_sizes_are_rounded_to_512_and_nothing_takes_nothing():
    memory = CachingAllocator()
    assert memory.alloc(0) is None
    memory.free(None)
    assert (memory.allocated, memory.reserved) == (0, 0)
    memory.alloc(1)
    memory.alloc(513)
    assert memory.allocated == 512 + 1024


@pytest.mark.parametrize(
    ("num_bytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_segment_of_a_request(num_bytes, segment):
    memory = CachingAllocator()
    memory.alloc(num_bytes)
    assert (memory.reserved, memory.segments) == (segment, 1)


def test_small_requests_share_a_segment_and_large_ones_another():
    memory = CachingAllocator()
    for _ in range(4):
        memory.alloc(512 * KIB)
    assert memory.reserved == 2 * MIB
    memory.alloc(512 * KIB)
    assert memory.reserved == 4 * MIB
    for _ in range(4):
        memory.alloc(5 * MIB)
    assert memory.reserved == 24 * MIB


def test_a_large_block_is_split_only_where_more_than_one_mib_is_left():
    memory = CachingAllocator()
    memory.free(memory.alloc(12 * MIB))
    block = memory.alloc(11 * MIB)  # 1 MiB would be left: the whole block is taken
    assert memory.allocated == 12 * MIB
    memory.free(block)
    memory.alloc(11 * MIB - 512)
    assert memory.allocated == 11 * MIB - 512
    memory.alloc(MIB + 512)  # the rest
    assert memory.reserved == 12 * MIB


def test_a_small_block_is_split_down_to_512():
    memory = CachingAllocator()
    memory.alloc(MIB)
    memory.alloc(MIB - 512)
    memory.alloc(512)
    assert (memory.allocated, memory.reserved) == (2 * MIB, 2 * MIB)


def test_best_fit_takes_the_smallest_that_is_large_enough():
    memory = CachingAllocator()
    big, fit = memory.alloc(40 * MIB), memory.alloc(30 * MIB)
    memory.free(big)
    memory.free(fit)
    memory.alloc(29 * MIB)
    memory.alloc(40 * MIB)
    assert memory.reserved == 70 * MIB


def test_free_neighbours_become_one_block():
    memory = CachingAllocator()
    memory.free(memory.alloc(60 * MIB))
    parts = [memory.alloc(20 * MIB) for _ in range(3)]
    memory.free(parts[0])
    memory.free(parts[2])
    memory.alloc(30 * MIB)  # 40 MiB are free, but in two pieces
    assert memory.reserved == 90 * MIB
    memory.free(parts[1])
    memory.alloc(60 * MIB)
    assert memory.reserved == 90 * MIB


def test_a_block_freed_on_one_stream_serves_no_other():
    memory = CachingAllocator()
    memory.free(memory.alloc(30 * MIB, "default"))
    memory.alloc(30 * MIB, "all_gather")
    assert memory.reserved == 60 * MIB
    memory.alloc(30 * MIB, "default")
    assert memory.reserved == 60 * MIB


def test_a_limit_frees_what_is_cached_before_it_gives_up():
    memory = CachingAllocator(limit_bytes=100 * MIB)
    memory.free(memory.alloc(60 * MIB))
    memory.alloc(80 * MIB)  # does not fit beside the cached 60
    assert (memory.reserved, memory.retries, memory.out_of_memory) == (80 * MIB, 1, False)
    memory.alloc(30 * MIB)
    assert memory.out_of_memory
    assert memory.reserved == 110 * MIB


def test_a_split_segment_is_not_given_back():
    memory = CachingAllocator(limit_bytes=100 * MIB)
    memory.free(memory.alloc(60 * MIB))
    memory.alloc(20 * MIB)  # cuts the cached 60
    memory.alloc(50 * MIB)
    assert (memory.reserved, memory.out_of_memory) == (110 * MIB, True)


def test_a_growing_segment_maps_pages_of_20_mib_and_wastes_no_tail():
    memory = CachingAllocator(expandable=True)
    memory.alloc(25 * MIB)
    assert memory.reserved == 40 * MIB
    memory.alloc(30 * MIB)  # 15 free, 15 more are needed: one page
    assert (memory.reserved, memory.segments) == (60 * MIB, 1)
    memory.alloc(100)
    assert (memory.reserved, memory.segments) == (62 * MIB, 2)  # the small pool has its own, of 2 MiB pages


def test_a_growing_segment_joins_where_fixed_ones_cannot():
    for expandable, reserved in ((False, 90 * MIB), (True, 60 * MIB)):
        memory = CachingAllocator(expandable=expandable)
        for block in [memory.alloc(20 * MIB), memory.alloc(20 * MIB)]:
            memory.free(block)
        memory.alloc(50 * MIB)
        assert memory.reserved == reserved, expandable


def test_a_growing_segment_keeps_its_end_for_what_fits_nowhere_else():
    memory = CachingAllocator(expandable=True)
    first = memory.alloc(30 * MIB)
    memory.alloc(31 * MIB)  # 80 are mapped, 19 of them free at the end
    memory.free(first)
    place = memory.alloc(15 * MIB)  # the end is the better fit, but it could grow
    assert place is not None and place.address == 0
    memory.alloc(30 * MIB)
    assert memory.reserved == 100 * MIB


def test_a_growing_segment_gives_single_pages_back():
    memory = CachingAllocator(expandable=True, limit_bytes=100 * MIB)
    first, kept = memory.alloc(50 * MIB), memory.alloc(30 * MIB)
    assert memory.reserved == 80 * MIB
    memory.free(first)
    memory.alloc(60 * MIB, "other")  # two whole pages of the first 50 MiB go back
    assert (memory.reserved, memory.out_of_memory) == (100 * MIB, False)
    memory.free(kept)
    memory.alloc(40 * MIB)  # 10 + 30 free behind the hole
    assert (memory.reserved, memory.allocated) == (100 * MIB, 100 * MIB)


def test_freeing_twice_is_refused():
    memory = CachingAllocator()
    block = memory.alloc(100)
    memory.free(block)
    with pytest.raises(ValueError, match="freed before"):
        memory.free(block)


@pytest.mark.parametrize("expandable", [False, True])
def test_books_balance_over_a_random_history(expandable):
    rng = random.Random(7)
    memory = CachingAllocator(expandable=expandable, limit_bytes=600 * MIB)
    live: list = []
    for _ in range(6000):
        if live and rng.random() < 0.5:
            memory.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(memory.alloc(int(2 ** rng.uniform(5, 24.5)), rng.choice("ab")))
        assert memory.allocated <= memory.reserved <= memory.peak_reserved
    spans = sorted((block.address, block.address + block.size) for block in live)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans)), "blocks overlap"
    assert sum(block.size for block in live) == memory.allocated
    for block in live:
        memory.free(block)
    memory.empty_cache()
    assert (memory.allocated, memory.reserved) == (0, 0)


def test_no_chain_of_blocks_is_left_to_the_garbage_collector() -> None:
    trace = AllocationTrace()
    trace.phase("load")
    handles = [trace.alloc(MIB * (1 + i % 7), 0) for i in range(200)]
    trace.free(*handles[::2])
    gc.collect()
    gc.disable()
    try:
        for expandable in (True, False):
            replay(trace, cuda=True, expandable=expandable)
        assert not [one for one in gc.get_objects() if type(one) is Block]
    finally:
        gc.enable()


def random_trace(seed: int) -> AllocationTrace:
    """Forwards and backwards whose sizes change, so that cached blocks do not fit."""
    rng, trace = random.Random(seed), AllocationTrace()
    trace.phase("load")
    for _ in range(6):
        trace.phase("forward")
        handles = [trace.alloc(rng.randrange(1, 40) * MIB, 3, rng.choice((0, 0, 1))) for _ in range(40)]
        trace.phase("backward")
        trace.free(*reversed(handles))
    return trace


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("expandable", [False, True])
def test_a_limit_changes_what_it_should_and_nothing_else(number, expandable):
    tapes = [random_trace(seed) for seed in range(number)]
    free, _ = _simulated(tapes, cuda=True, expandable=expandable, limit=None)
    seen = set()
    for part in range(60, 130, 2):
        limit = free.peak("reserved") * part // 100
        expected = free, False
        if free.peak("allocated") <= limit < free.peak("reserved"):
            each = [replay(one, cuda=True, expandable=expandable, limit_bytes=limit) for one in tapes]
            expected = (fullest(each), True) if all(one.fits for one in each) else expected
        assert _simulated(tapes, cuda=True, expandable=expandable, limit=limit) == expected
        seen.add(expected[1])
    assert seen == {False, True}
