"""From a loader to this rank's micro batches: over all ranks, every sample once, whatever the loader is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

import shardwise.train.data.windows as windows_module
from shardwise.distributed.process_group import Ranks
from shardwise.errors import DataError
from shardwise.train.data.windows import PassWindows, RankBatches, rank_batches, split_batch, windows
from tests.worlds import run_world

NUMBER, BATCH = 23, 2


def fake_ranks(rank: int = 0, world_size: int = 1) -> Ranks:
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        device=torch.device("cpu"),
        control=None,
        owns_group=False,
        owns_control=False,
    )


class Numbers(Dataset):
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return torch.tensor(index)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(NUMBER))


class OwnBatches:
    """A batch sampler that is none of PyTorch's, in an order of its own."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter([[22, 0, 1], [2], [3, 4], [5]])


def taken(batches: Any) -> list[list[int]]:
    return [batch.reshape(-1).tolist() for batch in batches]


def batches_of_all_kinds() -> dict[str, Any]:
    """On each rank: what its share of each loader is. The random states of the ranks differ, as they do in life."""
    from shardwise.distributed.process_group import join

    ranks = join("cpu")
    torch.manual_seed(1000 + ranks.rank)
    found: dict[str, Any] = {}
    data = Numbers()
    shuffled = rank_batches(DataLoader(data, batch_size=BATCH, shuffle=True), ranks)
    found["shuffled"] = taken(shuffled)
    found["loaded"] = list(data.loaded)
    found["shuffled again"] = taken(shuffled)
    found["whole batches"] = taken(rank_batches(DataLoader(Numbers(), BATCH, shuffle=True, drop_last=True), ranks))
    found["in order"] = taken(rank_batches(DataLoader(Numbers(), batch_size=BATCH), ranks))
    found["own batches"] = taken(rank_batches(DataLoader(Numbers(), batch_sampler=OwnBatches()), ranks))
    found["unbatched"] = taken(rank_batches(DataLoader(Numbers(), batch_size=None, shuffle=True), ranks))
    found["stream"] = taken(rank_batches(DataLoader(Stream(), batch_size=BATCH), ranks))
    pieces = list(torch.arange(NUMBER).split(BATCH))
    found["list"] = taken(rank_batches(pieces, ranks))
    found["generator"] = taken(rank_batches((piece for piece in pieces), ranks))
    sampler: DistributedSampler = DistributedSampler(Numbers(), shuffle=False, drop_last=True)
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)
    inner = DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, BATCH, False))
    single = DataLoader(Numbers(), batch_size=None, sampler=sampler)
    found["untouched"] = [rank_batches(given, ranks) is given for given in (loader, inner, single)]
    found["state"] = torch.get_rng_state()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def shares(request):
    return run_world(batches_of_all_kinds, request.param)


def joined(shares: list[dict[str, Any]], kind: str) -> list[list[int]]:
    """The stream that the ranks have taken turns at."""
    turns = itertools.zip_longest(*(share[kind] for share in shares))
    return [batch for turn in turns for batch in turn if batch is not None]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


class TestRanks:
    @pytest.mark.parametrize("kind", ["shuffled", "shuffled again"])
    def test_a_shuffled_loader_without_a_seed_gives_each_sample_to_one_rank(self, shares, kind):
        stream = flat(joined(shares, kind))
        assert sorted(stream) == list(range(NUMBER))
        assert stream != list(range(NUMBER)), "it is still shuffled"

    def test_every_epoch_has_its_own_order(self, shares):
        assert joined(shares, "shuffled") != joined(shares, "shuffled again")

    def test_a_rank_loads_its_own_samples_only(self, shares):
        for share in shares:
            assert share["loaded"] == flat(share["shuffled"])

    def test_a_short_last_batch_is_dropped_where_the_loader_says_so(self, shares):
        stream = joined(shares, "whole batches")
        assert [len(batch) for batch in stream] == [BATCH] * (NUMBER // BATCH)
        assert len(set(flat(stream))) == NUMBER // BATCH * BATCH

    @pytest.mark.parametrize("kind", ["in order", "stream", "list", "generator"])
    def test_the_ranks_take_turns_at_any_other_stream(self, shares, kind):
        assert joined(shares, kind) == [list(range(n, min(n + BATCH, NUMBER))) for n in range(0, NUMBER, BATCH)]

    def test_the_users_own_batch_sampler_is_kept(self, shares):
        assert joined(shares, "own batches") == list(OwnBatches())

    def test_a_shuffled_loader_of_single_samples_gives_each_to_one_rank(self, shares):
        assert sorted(flat(joined(shares, "unbatched"))) == list(range(NUMBER))

    def test_a_distributed_sampler_is_taken_as_it_is(self, shares):
        assert all(share["untouched"] == [True] * 3 for share in shares)

    def test_ranks_keep_random_states_of_their_own(self, shares):
        assert not torch.equal(shares[0]["state"], shares[1]["state"]), "or dropout would be the same on all"


class TestOneProcess:
    @pytest.mark.parametrize(
        "loader", [[1, 2], iter([1]), DataLoader(Numbers(), shuffle=True), DataLoader(Stream(), batch_size=2)]
    )
    def test_one_rank_takes_the_loader_itself(self, loader):
        assert rank_batches(loader, fake_ranks()) is loader

    @pytest.mark.parametrize("world", [2, 3, 5, 13])
    @pytest.mark.parametrize("number", [0, 1, 12, 64 * 13, 64 * 13 + 1, 2000])
    def test_item_n_goes_to_rank_n_mod_dp(self, world, number, monkeypatch):
        """Whatever the chunks, and with as many chunks told to each rank, or some would wait for ever."""
        items, said = list(range(number)), []
        monkeypatch.setattr(windows_module, "broadcast_text", lambda text, ranks: said.append(text) or text)
        assert list(RankBatches(items, fake_ranks(0, world))) == items[::world]
        told = list(said)
        for rank in range(1, world):
            heard = iter(told)
            monkeypatch.setattr(windows_module, "broadcast_text", lambda text, ranks, heard=heard: next(heard))
            assert list(RankBatches([], fake_ranks(rank, world))) == items[rank::world]
            assert list(heard) == []

    def test_options_of_the_loader_are_kept(self):
        loader = DataLoader(Numbers(), BATCH, collate_fn=sum, timeout=0, worker_init_fn=print, pin_memory=False)
        rebuilt = rank_batches(loader, fake_ranks(0, 2))
        assert rebuilt is not loader and rebuilt.dataset is loader.dataset
        assert (rebuilt.collate_fn, rebuilt.worker_init_fn, rebuilt.num_workers) == (sum, print, 0)
        workers = DataLoader(Numbers(), BATCH, num_workers=1, prefetch_factor=5, persistent_workers=True)
        rebuilt = rank_batches(workers, fake_ranks(0, 2))
        assert (rebuilt.num_workers, rebuilt.prefetch_factor, rebuilt.persistent_workers) == (1, 5, True)


class TestWindows:
    def test_every_batch_is_in_one_window_in_order(self):
        for number, accum in itertools.product(range(12), range(1, 6)):
            found = list(windows(range(number), accum))
            assert [batch for window in found for batch in window] == list(range(number))
            assert all(len(window) == accum for window in found[:-1])
            assert all(0 < len(window) <= accum for window in found)

    def test_no_more_is_read_than_is_needed(self):
        read: list[int] = []
        stream = (read.append(n) or n for n in range(10))
        assert next(windows(stream, 3)) == [0, 1, 2]
        assert read == [0, 1, 2]


class TestSplit:
    @pytest.mark.parametrize("batch", [("in", "out"), ["in", "out"]])
    def test_a_pair(self, batch):
        assert split_batch(batch) == ("in", "out")

    def test_a_dict(self):
        batch = {"ids": 1, "labels": 2, "mask": 3}
        assert split_batch(batch) == ({"ids": 1, "mask": 3}, 2)
        assert "labels" in batch, "the user's own is not changed"

    @pytest.mark.parametrize(
        ("batch", "says"),
        [
            ((1, 2, 3), "tuple"),
            ([1], "list"),
            (torch.ones(2), "Tensor"),
            ({"ids": 1, "label": 2}, "dict with keys ids, label"),
        ],
    )
    def test_neither(self, batch, says):
        with pytest.raises(DataError, match=f"the loader gave a {says};"):
            split_batch(batch)


class Counted:
    """Windows of one number each, and how many were read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.length):
            self.read += 1
            yield [number]


@pytest.mark.parametrize("asks", [1, 2])
def test_the_end_of_a_pass_is_seen_one_window_ahead_and_none_is_lost(asks: int) -> None:
    source = Counted(3)
    left = PassWindows(source, None)
    for number in range(3):
        assert [left.at_end() for _ in range(asks)] == [False] * asks
        assert source.read == number + 1
        assert left.take() == [number]
    assert left.at_end() and left.take() == []


def test_nothing_is_read_beyond_what_was_asked_for() -> None:
    source = Counted(9)
    left = PassWindows(source, 2)
    assert not left.at_end() and left.take() == [0]
    assert not left.spent and left.take() == [1]
    assert left.spent and left.at_end() and source.read == 2
