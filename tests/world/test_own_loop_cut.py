"""Loops of one's own under plans that cut the model: luck and samples are what the ranks of a group have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from shardwise.cli.own_loop import start
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.loss import token_loss_sum
from tests.families import VOCAB, family
from tests.worlds import run_world


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
    whole, seen = [], []
    for step in session.steps(loader, limit=2):
        seen += [micro.inputs.tolist() for micro in step.micros]
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
        places = dict(session.module.named_parameters())["inner.places"]
        assert isinstance(places, DTensor) and places.placements[-1].is_replicate()
        whole.append(float(places.to_local().double().square().sum()))
    place = session.place
    session.close()
    return {"whole": whole, "seen": seen, "dp": place.dp}


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
