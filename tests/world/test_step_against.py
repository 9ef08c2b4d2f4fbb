"""``bench step --against``: each contender takes the same steps, and one that does not is void."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.bench.step import against
from shardwise.bench.step.peers import PEERS, STRATEGIES, build_hand, read_peers
from shardwise.distributed.process_group import join
from shardwise.errors import UserError
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.train.config import OptimizerTable
from tests.families import VOCAB, family
from tests.worlds import run_world

CHECKED = 6  # steps whose losses are compared; with a step that is wrong, the second differs
INSTALLED = tuple(name for name, peer in PEERS.items() if not peer.package or find_spec(peer.package))


def batches(rank: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(VOCAB, (2, 2, 17), generator=generator)
        yield [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


def never_clips(model: Any, plan: Plan, ranks: Any, make: Any, clip: float | None) -> Any:
    return build_hand(model, plan, ranks, make, None)


def rows_of(strategy: str, broken: bool) -> list[dict[str, Any]]:
    ranks = join("cpu")
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 2), micro_batch=2, grad_accum=2)
    table = OptimizerTable(name="sgd", lr=0.5, clip_norm=0.1)
    config: Any = SimpleNamespace(train=SimpleNamespace(seed=0), optimizer=table)
    peers = {**PEERS, "hand": PEERS["hand"]._replace(build=never_clips)} if broken else PEERS

    def factory() -> torch.nn.Module:
        return family("llama", layers=2, dtype=torch.float32)

    with mock.patch.object(against, "PEERS", peers), mock.patch.object(against, "CHECKED", CHECKED):
        names = ("hand",) if broken else INSTALLED
        made = against._in_turns(names, config, plan, factory, batches(ranks.rank), ranks, 2)
        alone = {
            name: against._alone(name, config, plan, factory, batches(ranks.rank), ranks)
            for name in ("shardwise", *names)
            if not broken and (name not in PEERS or strategy in PEERS[name].strategies)
        }
    return [*(row.model_dump() for row in made), alone]


def all_rows() -> dict[str, list[Any]]:
    """By strategy, and of a peer that is broken: in one world, as importing the peers takes most of the time."""
    return {strategy: rows_of(strategy, False) for strategy in STRATEGIES} | {"broken": rows_of("ddp", True)}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return run_world(all_rows, 2)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_take_the_same_steps(found: dict[str, list[Any]], strategy: str) -> None:
    *rows, alone = found[strategy]
    assert [row["name"] for row in rows] == ["shardwise", *INSTALLED]
    for row in rows:
        if row["name"] in PEERS and strategy not in PEERS[row["name"]].strategies:
            assert row["void"].startswith("not run") and not row["step_s"]
        else:
            assert row["void"] == "" and len(row["step_s"]) == len(row["cpu_s"]) == 2
            assert len(row["losses"]) == CHECKED
    weights = sum(p.numel() for p in family("llama", layers=2).parameters()) * 4
    least = {"ddp": 1.0, "zero1": 1.5, "fsdp": 1.5}[strategy]  # gradients; and weights, gathered once at least
    for name, one in alone.items():
        kept = 0 if (name, strategy) == ("deepspeed", "fsdp") else least  # ZeRO-3 does not shard what is so small
        assert kept * weights <= one["sent_bytes"] < 2 * least * weights, name
        assert one["peak_bytes"] > -(1 << 20) and one["sent_bytes"] > 0, "a process may have given a page back"


def test_one_that_takes_other_steps_is_void(found: dict[str, list[Any]]) -> None:
    ours, hand, _ = found["broken"]
    assert ours["void"] == "" and hand["void"].startswith("its loss of step 2 is ")


def test_what_is_wrong_about_peers_is_said_at_once() -> None:
    with pytest.raises(UserError) as raised:
        read_peers("hand,acelerate,torchtitan")
    assert len(raised.value.problems) == 2 and "did you mean 'accelerate'" in raised.value.problems[0].lower()
    assert read_peers("hand, hand") == ("hand",)
    with pytest.raises(UserError, match="names no peer"):
        read_peers(" ,")
