"""Checkpoints of a mixture of experts: any plan into any other, whatever the ranks that experts are on, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.load import load_checkpoint, newest_of_all
from shardwise.checkpoint.save import save_checkpoint
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.checkpoints import save_as_many
from tests.contract import decided_once
from tests.experts import batches
from tests.world.test_checkpoint_plans import check_all, plan_for, set_all
from tests.world.zoo.families import family
from tests.world.zoo.families_table import quiet
from tests.worlds import run_world

NAME = "deepseek_v3"  # a dense layer, a shared expert, and a buffer beside the router
STRATEGIES = {
    2: ("ddp", "fsdp", "fsdp+ep2", "ddp+pp2"),
    4: ("fsdp+ep2", "hsdp+ep2", "fsdp+ep4", "fsdp+pp2+ep2", "zero2+cp2+ep2"),
}


def prepared(strategy: str) -> tuple[Any, Any, Any]:
    quiet()
    model = family(NAME)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    groups += [{"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    session = start(plan_for(strategy, dist.get_world_size()), device="cpu", receipts=False)
    optimizer = torch.optim.AdamW(groups, lr=0.125, fused=True)
    with decided_once(f"experts: {NAME}"):
        return session, *session.prepare(model, optimizer, batches(1)[0][0]["input_ids"])


def step(session: Any, model: Any, optimizer: Any) -> None:
    given = [(inputs["input_ids"], labels) for inputs, labels in batches(8)]
    for one in session.steps(given, limit=1):
        one.run(model, token_loss_sum)
        one.update(optimizer)


def save_each(root: str) -> None:
    for number, strategy in enumerate(STRATEGIES[dist.get_world_size()]):
        save_as_many(number % 2 == 0)
        session, model, optimizer = prepared(strategy)
        step(session, model, optimizer)
        set_all(session, optimizer)
        where = Path(root) / f"{strategy}@{dist.get_world_size()}"
        saved = {"model": session.module, "optimizer": optimizer, "plan": session.plan, "state": {}, "rng": None}
        save_checkpoint(where, 20, **saved, keep=1)
        session.close()


def load_each(root: str) -> int:
    number = 0
    for strategy in STRATEGIES[dist.get_world_size()]:
        session, model, optimizer = prepared(strategy)
        for source in sorted(Path(root).iterdir()):
            load_checkpoint(newest_of_all(source), model=session.module, optimizer=optimizer)
            check_all(session, optimizer, f"{source.name} into {strategy}@{dist.get_world_size()}")
            set_all(session, optimizer, scrambled=True)
            number += 1
        load_checkpoint(newest_of_all(source), model=session.module, optimizer=optimizer)
        step(session, model, optimizer)  # the state made by the load is one that the optimizer goes on with
        session.close()
    return number


@pytest.mark.timeout(400)
def test_any_plan_into_any_other(tmp_path: Path) -> None:
    for world in STRATEGIES:
        run_world(save_each, world, str(tmp_path), timeout_s=150)
    loads = [run_world(load_each, world, str(tmp_path), timeout_s=200)[0] for world in STRATEGIES]
    assert loads == [4 * 9, 5 * 9]
