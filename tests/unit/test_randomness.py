"""Whose generators a rank goes on with when a run is resumed."""

from __future__ import annotations

import pytest

from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.train.rng import rank_to_follow


def plan(strategy: str, **degrees: int) -> Plan:
    return Plan(strategy=strategy, dims=ParallelDims(**degrees))


DDP2, DDP4 = plan("ddp", dp_replicate=2), plan("ddp", dp_replicate=4)
TENSOR = plan("fsdp+tp2", dp_shard=2, tp=2)


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        pytest.param(TENSOR, TENSOR, [0, 1, 2, 3], id="same-degrees-same-rank"),
        pytest.param(DDP4, TENSOR, [0, 0, 1, 1], id="one-for-each-tensor-parallel-group"),
        pytest.param(DDP2, TENSOR, [0, 0, 1, 1], id="more-ranks"),
        pytest.param(TENSOR, DDP4, [0, 2, 4, 6], id="no-two-ranks-alike"),
        pytest.param(TENSOR, plan("ddp+tp2+pp2", tp=2, pp=2), [0, 0, 2, 2], id="stages"),
        pytest.param(DDP2, DDP4, [0, 1, 2, 3], id="plain-plans-as-ever"),
    ],
)
def test_ranks_of_a_tensor_parallel_group_draw_alike_and_no_others_do(
    saved: Plan, now: Plan, expected: list[int]
) -> None:
    document = saved.model_dump(mode="json", by_alias=True)
    assert [rank_to_follow(document, now, rank) for rank in range(now.dims.world_size)] == expected


def test_a_checkpoint_without_a_plan() -> None:
    assert [rank_to_follow({}, TENSOR, rank) for rank in range(4)] == [0, 0, 1, 1]
    assert rank_to_follow({}, DDP2, 1) == 1
