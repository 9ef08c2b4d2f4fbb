"""Loops of one's own under plans that cut the model: luck and samples are what the ranks of a group have in common."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from shardwise.errors import PlanError
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.families import VOCAB, family
from tests.worlds import WorldError, run_world


class Dropped(nn.Module):
    """A decoder whose hidden states lose some elements before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = family("own")
        self.inner.tokens = nn.Sequential(self.inner.tokens, nn.Dropout(0.3))

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(ids, position_ids)


def train(strategy: str) -> dict[str, Any]:
    """Two steps of a loop that seeds by rank and shuffles; this rank's inputs, and a parameter that is not cut."""
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    session = start(Plan(strategy=strategy, dims=dims, grad_accum=2, sequence_parallel=False), receipts=False)
    torch.manual_seed(session.ranks.rank)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (16, 16), generator=generator)
    loader = DataLoader(TensorDataset(ids, ids.roll(-1, 1)), batch_size=2, shuffle=True)
    model = Dropped()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ids[:2])
    full, seen = [], []
    for step in session.steps(loader, limit=3):
        seen += [micro.inputs.tolist() for micro in step.micros]
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
        places = dict(session.module.named_parameters())["inner.places"]
        assert isinstance(places, DTensor) and places.placements[-1].is_replicate()
        full.append(float(places.to_local().double().square().sum()))
        if session.ranks.is_main:
            torch.rand(1)  # a sample for a log, say
    place = session.place
    session.close()
    return {"whole": full, "seen": seen, "dp": place.dp}


@pytest.mark.parametrize(("strategy", "world"), [("ddp+tp2", 2), ("fsdp+tp2", 4)])
def test_a_group_draws_the_same_numbers_and_sees_the_same_samples(strategy: str, world: int) -> None:
    found = run_world(train, world, strategy)
    by_data_rank: dict[int, list[dict[str, Any]]] = {}
    for result in found:
        by_data_rank.setdefault(result["dp"], []).append(result)
    for first, *others in by_data_rank.values():
        for other in others:
            assert other["seen"] == first["seen"]
            assert other["whole"] == pytest.approx(first["whole"], rel=1e-12)  # or the group has drifted apart
    if len(by_data_rank) > 1:
        assert by_data_rank[0][0]["seen"] != by_data_rank[1][0]["seen"]


def train_on_others(strategy: str, from_step: int) -> None:
    """A loader that gives each rank another micro batch from a step on."""
    session = start(strategy, receipts=False)
    model = family("own")
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    ids = torch.arange(32).reshape(2, 16)
    batches = [(ids + (session.ranks.rank if number >= from_step else 0), ids) for number in range(4)]
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        step.update(optimizer)


@pytest.mark.parametrize("strategy", ["ddp+tp2", "ddp+pp2", "ddp+cp2"])
@pytest.mark.parametrize("from_step", [0, 2])
def test_other_samples_within_a_group_are_refused(strategy: str, from_step: int) -> None:
    with pytest.raises(WorldError, match=rf"ranks 0 and 1 must see the same samples under {re.escape(strategy)}"):
        run_world(train_on_others, 2, strategy, from_step)


WRONG_PLANS = {
    "has no tp axis": {"strategy": "ddp", "dims": ParallelDims(tp=2)},
    r"has tp 2, but dims say tp 1": {"strategy": "fsdp+tp2", "dims": ParallelDims(dp_shard=2)},
    "can be planned but is not run": {"strategy": "zero1+pp2", "dims": ParallelDims(pp=2)},
    "loss_parallel.*does nothing without": {"loss_parallel": True},
    "virtual_stages.*does nothing without": {"virtual_stages": 2},
}


@pytest.mark.parametrize("message", WRONG_PLANS)
def test_a_plan_that_contradicts_itself_is_refused(message: str) -> None:
    with pytest.raises(PlanError, match=message):
        start(Plan(**WRONG_PLANS[message]))


def test_options_beside_a_plan_that_says_otherwise_are_refused() -> None:
    with pytest.raises(PlanError, match=r"precision.*bf16.*plan, which has fp32"):
        start(Plan(), precision="bf16")
