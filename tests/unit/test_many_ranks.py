"""What steps and receipts read of all ranks at once, against the same rank by rank."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwise.distributed import control_message
from shardwise.distributed.places import counted_once, first_in_group, places_of
from shardwise.distributed.process_group import Ranks, broadcast_text, gather_ints, gather_text
from shardwise.distributed.same_batches import check_same_batches
from shardwise.dryrun.record import fake_world
from shardwise.errors import DataError, TrainingError
from shardwise.measure.step_time.attribution import Attribution
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.receipts import effects
from shardwise.receipts.receipt import Line

DIMS = [
    ParallelDims(),
    ParallelDims(dp_shard=16),
    ParallelDims(dp_replicate=2, dp_shard=3, tp=2, cp=2, pp=3),
    ParallelDims(dp_replicate=4, tp=2, pp=2),
]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_places_are_those_of_each_rank(dims: ParallelDims) -> None:
    places, each = places_of(dims), [dims.place(rank) for rank in range(dims.world_size)]
    for axis in ("pp", "dp", "cp", "tp"):
        assert getattr(places, axis).tolist() == [getattr(one, axis) for one in each]
    for axes in ((), ("dp",), ("tp", "pp"), ("pp", "dp", "cp")):
        keys = [tuple(getattr(one, axis) for axis in axes) for one in each]
        assert first_in_group(dims, *axes).tolist() == [keys.index(key) for key in keys]
    parts, samples = counted_once(dims)
    assert parts.tolist() == [rank for rank, one in enumerate(each) if one.tp == one.pp == 0]
    assert samples.tolist() == [rank for rank, one in enumerate(each) if one.tp == one.pp == one.cp == 0]


def test_other_samples_are_named_with_both_ranks() -> None:
    plan = Plan(strategy="fsdp+tp2", dims=ParallelDims(dp_shard=2, tp=2))
    check_same_batches([5, 5, 6, 6], plan)
    with pytest.raises(DataError, match="ranks 2 and 3 must see the same samples"):
        check_same_batches([5, 5, 6, 5], plan)


def ranks_of(world: int) -> Ranks:
    """Rank 0 of a fake world, where all others send what it sends."""
    import torch
    import torch.distributed as dist

    control = dist.group.WORLD
    return Ranks(0, world, 0, 8, torch.device("cpu"), control, owns_group=False, owns_control=False)


def test_messages_of_a_thousand_ranks() -> None:
    with fake_world(1000, 0):
        ranks = ranks_of(1000)
        assert gather_ints([3, -(2**62)], ranks) == [[3, -(2**62)]] * 1000
        assert gather_ints([], ranks) == [[]] * 1000
        assert gather_ints([*range(200)], ranks) == [[*range(200)]] * 1000
        assert gather_text("ä b", ranks) == ["ä b"] * 1000
        assert broadcast_text("job", ranks) == "job"
        meeting = control_message.Meeting([1], ranks.control, "session.save")
        meeting.wait()
        meeting._rows[700 * 96 + 1 : 700 * 96 + 4] = torch_tag("an evaluation")
        with pytest.raises(TrainingError, match=r"rank 0 at session\.save, rank 700 at an evaluation"):
            meeting.rows()


def torch_tag(what: str) -> Any:
    """The integers that name an operation."""
    import torch

    return torch.tensor(control_message._tag(what))


def test_laps_of_ranks_that_are_not_in_step() -> None:
    """Each rank sends its n-th lap when its clock has read it; a step has the n-th of all."""
    draw = random.Random(1)
    one: Any = object.__new__(Attribution)
    fresh = Attribution(SimpleNamespace(ranks=SimpleNamespace(world_size=5, is_main=True), device=cpu()))  # type: ignore[arg-type]
    one.__dict__.update(fresh.__dict__)
    one._session = fresh._session
    tables: list[Any] = []
    one._add = lambda table: tables.append(table.tolist())
    sent = [0] * 5
    while min(sent) < 20:
        rows = np.zeros((5, one.size), dtype=np.int64)
        for rank in range(5):
            if sent[rank] < 20 and draw.random() < 0.6:
                sent[rank] += 1
                rows[rank, :3] = 1, 100 * sent[rank], rank
        one.deliver(rows)
    assert [[row[:2] for row in table] for table in tables] == [
        [[100.0 * lap, float(rank)] for rank in range(5)] for lap in range(1, 21)
    ]
    fresh._waiting.close()


def cpu() -> Any:
    """The device of a session without a GPU."""
    import torch

    return torch.device("cpu")


def test_findings_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt has rank 0's lines, and of false ones the first rank's, with the number of the others."""

    def line(name: str, found: str, *, ok: bool) -> Line:
        return Line(name=name, planned="1", found=found, ok=ok)

    usual = [line("a", "1", ok=True), line("b", "1", ok=True)]
    of_rank = [usual] * 900
    of_rank[7] = [line("a", "2", ok=False), line("c", "1", ok=True)]
    of_rank[5] = of_rank[50] = [line("a", "3", ok=False)]
    texts = [json.dumps([one.model_dump() for one in lines]) for lines in of_rank]
    monkeypatch.setattr(effects, "gather_text", lambda *_: texts)
    receipt = effects.agree(SimpleNamespace(ranks=None), "effects", usual)  # type: ignore[arg-type]
    assert [(one.name, one.found, one.ok) for one in receipt.lines] == [
        ("a", "3 (rank 5 and 2 more)", False),
        ("b", "1", True),
        ("c", "1 (rank 7)", True),
    ]
