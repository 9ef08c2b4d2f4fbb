"""The recorder sees what torch's allocator does, to the byte; frees by other threads are put where they belong."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardwise.measure.allocations import AllocationRecorder, Event, Recording, live_tensors, record, storages

MIB = 1024**2


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_a_known_allocation_to_the_byte():
    def work() -> torch.Tensor:
        first, kept = block(3 * MIB + 1), block(MIB)
        del first
        block(5)
        return kept

    kept, found = record(work)
    assert found.peak == 4 * MIB + 1
    assert found.net == MIB == kept.nbytes
    assert [event.num_bytes for event in found.events] == [3 * MIB + 1, MIB, -3 * MIB - 1, 5, -5]


def test_a_linear_layer_forward_and_backward_to_the_byte():
    layer, x = nn.Linear(64, 32, bias=False), torch.randn(128, 64)

    def work() -> None:
        layer(x).backward(torch.ones(128, 32))

    work()
    layer.weight.grad = None
    _, found = record(work)
    seed, output, gradient = 128 * 32 * 4, 128 * 32 * 4, 64 * 32 * 4
    assert found.net == gradient
    assert found.peak in (seed + output, seed + output + gradient)  # the output may go before the gradient comes


def test_recompute_is_seen_as_less_memory():
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
    )
    x = torch.randn(512, 64, requires_grad=True)

    def work(recompute: bool) -> None:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
        y.sum().backward()

    work(True)
    held = [*layers.parameters(), x]
    for parameter in held:
        parameter.grad = None
    peaks = {}
    for recompute in (False, True):
        _, found = record(lambda mode=recompute: work(mode))
        assert found.net == sum(p.nbytes for p in held)
        peaks[recompute] = found.peak
        for parameter in held:
            parameter.grad = None
    saved = 6 * 2 * 512 * 64 * 4  # of each block the first activation, and the last one, which is the next one's input
    assert peaks[False] > saved
    assert peaks[True] < 0.8 * peaks[False]


def test_phases_have_peaks_of_their_own():
    recorder = AllocationRecorder()
    assert recorder.start("first")
    kept = block(10)
    block(100)
    recorder.enter("second")
    block(1000)
    recorder.enter("first")
    more = block(7)
    found = recorder.stop()
    assert found.peaks() == {"first": 110, "second": 1010}
    assert found.at_first("second") == 10
    assert found.at_first("third") is None
    assert found.net == kept.nbytes + more.nbytes


def test_a_recorder_that_is_off_notes_nothing():
    recorder = AllocationRecorder()
    recorder.enter("nothing")
    assert recorder.stop() == Recording(())
    assert recorder.start()
    recorder.stop()
    kept = block(8)
    assert recorder.stop() == Recording(())
    del kept


def test_a_profiler_of_the_users_is_left_alone():
    recorder = AllocationRecorder()
    with torch.profiler.profile() as users:
        assert not recorder.start()
        assert recorder.stop() == Recording(())
        with pytest.raises(RuntimeError, match="another profiler"):
            record(lambda: None)
        torch.ones(3).sum()
    assert any(event.key == "aten::sum" for event in users.key_averages())


def test_a_failing_call_leaves_no_profiler_on():
    def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        record(work)
    _, found = record(lambda: None)
    assert found.peak == 0


def test_bytes_that_were_there_before():
    old, views = block(3 * MIB), block(MIB)
    made, found = record(lambda: block(2 * MIB))
    assert found.at_start([old, made, views[:5], views[7:]]) == 4 * MIB
    assert storages([views[:5], views[7:]]) == {views.data_ptr(): MIB}


def test_tensors_without_memory_hold_none():
    with FakeTensorMode():
        fake = torch.empty(5)
    assert storages([fake, torch.empty(5, device="meta"), torch.empty(0), torch.eye(2).to_sparse()]) == {}


def test_a_free_by_another_thread_is_put_in():
    """A block that another thread returned is not there for ever."""
    box: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        for by_thread in (False, True, False):
            box.append(block(MIB))
            small = block(100)
            if by_thread:
                thread = threading.Thread(target=box.clear)
                thread.start()
                thread.join()
            else:
                box.clear()
            del small
        return block(2 * MIB)

    kept, found = record(work)
    assert found.net == kept.nbytes + MIB
    settled = found.settled(live_tensors())
    assert settled.net == kept.nbytes
    assert settled.peak == 2 * MIB


def test_gradients_are_alive():
    """Nobody has asked for them, so that Python has not seen them."""
    layer, x = nn.Linear(64, 32), torch.randn(8, 64)
    _, found = record(lambda: layer(x).sum().backward())
    assert found.settled(live_tensors()) == found
    assert found.net == sum(p.nbytes for p in layer.parameters())


def test_lost_frees_are_put_where_their_like_were_returned():
    def layer(address: int, lost: bool) -> list[Event]:
        made, inner = Event(1000, address, "backward"), Event(10, 7, "backward")
        back = [] if lost else [Event(-1000, address, "backward")]
        return [made, inner, Event(-10, 7, "backward"), *back, Event(30, address + 1, "backward")]

    events = (*layer(100, False), *layer(200, True), *layer(300, False), Event(500, 9, "optimizer"))
    alive = torch.empty(0)
    found = Recording(events).settled([alive])
    assert found.events[:14] == (
        *layer(100, False)[:4],
        *layer(100, False)[4:],
        *layer(200, False),
        *layer(300, False)[:4],
    )
    assert found.peaks()["backward"] == 1070
    assert Recording(events).peaks()["backward"] == 2070


def test_a_lost_block_without_its_like_lasts_to_the_end_of_its_phase_or_until_its_address_is_taken():
    lonely = (Event(1000, 1, "backward"), Event(5, 2, "backward"), Event(3000, 3, "optimizer"))
    assert Recording(lonely).settled([]).peaks() == {"backward": 1005, "optimizer": 3000}
    taken = (Event(1000, 1, "backward"), Event(400, 1, "backward"), Event(3000, 3, "optimizer"))
    assert Recording(taken).settled([]).peaks() == {"backward": 1000, "optimizer": 3000}


def test_what_is_alive_is_not_lost():
    kept = block(1000)
    events = (Event(1000, kept.data_ptr(), "forward"), Event(8, 1, "forward"), Event(-8, 1, "forward"))
    assert Recording(events).settled([kept]) == Recording(events)
    assert Recording(events).settled([]).net == 0


def test_an_address_that_is_taken_anew_was_free():
    kept = block(1000)
    events = (Event(1000, kept.data_ptr(), "forward"), Event(1000, kept.data_ptr(), "backward"))
    assert Recording(events).settled([kept]).peaks() == {"forward": 1000, "backward": 1000}


def test_a_free_stays_in_the_phase_that_its_likes_stayed_in():
    """Two blocks alike were made late in backward; one lived for three events, and the other ends with the phase."""
    events = (
        Event(4000, 1, "backward"),
        Event(10, 2, "backward"),
        Event(-10, 2, "backward"),
        Event(-4000, 1, "backward"),
        Event(4000, 3, "backward"),
        *(Event(size, 4, "optimizer") for size in (500, -500, 500, -500)),
    )
    assert Recording(events).settled([]).peaks() == {"backward": 4010, "optimizer": 500}
    assert Recording(events).settled([]).events[5] == Event(-4000, 3, "backward")
