"""The order of samples is a pure function of the seed and the index, whatever the ranks are."""

import numpy as np
import pytest

from shardwise.errors import DataError
from shardwise.train.data.order import Order, rank_ids


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    order = Order(50, seed=3, shuffle=True)
    epochs = [order.ids(50 * epoch, 50) for epoch in range(4)]
    assert all(ids.dtype == np.int64 and sorted(ids) == list(range(50)) for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 4
    assert tuple(epochs[0]) != tuple(range(50))


def test_the_order_is_what_numpy_draws_for_seed_and_epoch() -> None:
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (7, 5)):
        expected = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(20)
        assert np.array_equal(Order(20, seed, True).ids(20 * epoch, 20), expected)


def test_the_order_does_not_change_between_releases() -> None:
    assert Order(8, seed=0, shuffle=True).ids(0, 16).tolist() == [2, 4, 3, 6, 5, 0, 1, 7, 1, 3, 7, 6, 0, 4, 2, 5]


def test_an_id_depends_on_the_index_only() -> None:
    full = Order(7, seed=1, shuffle=True).ids(0, 100)
    generator = np.random.default_rng(0)
    order = Order(7, seed=1, shuffle=True)
    for _ in range(200):  # any order of calls, so that kept epochs are dropped and made again
        start, count = int(generator.integers(0, 90)), int(generator.integers(0, 10))
        assert np.array_equal(order.ids(start, count), full[start : start + count])
    assert len(order._recent) <= 2


def test_a_result_can_be_written_to() -> None:
    order = Order(5, seed=0, shuffle=True)
    order.ids(0, 5)[:] = 9
    assert sorted(order.ids(0, 5)) == [0, 1, 2, 3, 4]


def test_without_shuffle_every_epoch_counts_up() -> None:
    assert Order(3, seed=9, shuffle=False).ids(1, 7).tolist() == [1, 2, 0, 1, 2, 0, 1]


def test_the_end() -> None:
    for shuffle in (True, False):
        order = Order(5, seed=0, shuffle=shuffle, epochs=2)
        assert order.total == 10
        ids = order.ids(3, 12)
        assert (ids[:7] >= 0).all() and ids[7:].tolist() == [-1] * 5
        assert order.ids(1000, 3).tolist() == [-1] * 3
    assert Order(5, seed=0, shuffle=True).total is None
    assert (Order(5, seed=0, shuffle=True).ids(10**12, 3) >= 0).all()


def test_no_samples() -> None:
    with pytest.raises(DataError, match=r"^0 samples have no order; give a corpus with at least one sample$"):
        Order(0, seed=0, shuffle=True)


@pytest.mark.parametrize(
    ("dp", "micro_batch", "grad_accum"), [(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (12, 1, 1)]
)
def test_a_global_step_is_the_same_samples_however_it_is_split(dp: int, micro_batch: int, grad_accum: int) -> None:
    order = Order(31, seed=4, shuffle=True, epochs=2)
    for position in (0, 12, 24, 60):
        ranks = [rank_ids(order, position, dp, rank, micro_batch, grad_accum) for rank in range(dp)]
        assert all(len(micros) == grad_accum and all(len(ids) == micro_batch for ids in micros) for micros in ranks)
        in_order = [ids for micro in range(grad_accum) for rank in range(dp) for ids in ranks[rank][micro]]
        assert in_order == order.ids(position, 12).tolist()


def test_where_a_sample_of_a_rank_is() -> None:
    order = Order(1000, seed=0, shuffle=False)
    found = rank_ids(order, position=100, dp=3, dp_rank=1, micro_batch=4, grad_accum=2)
    assert [ids.tolist() for ids in found] == [[104, 105, 106, 107], [116, 117, 118, 119]]
