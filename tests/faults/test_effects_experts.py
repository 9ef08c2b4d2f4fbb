"""The effects receipt on mixtures of experts: silent on what is right, and each sabotage has its own line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise.parallel.experts.expert_parallel as expert_parallel
from shardwise.parallel.experts.dispatch import ScaledGradient
from shardwise.parallel.experts.router_loss import MicroRouting
from shardwise.plan.router_terms import RouterTerms
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import decided_once
from tests.experts import batches, routers
from tests.world.zoo.families import family
from tests.world.zoo.families_table import quiet
from tests.worlds import run_each, run_world


def run(strategy: str, after: Callable[[Any], None] | None = None, **options: Any) -> set[str]:
    """Two steps with AdamW in fp32; the names of the receipt's false lines."""
    quiet()
    session = start(strategy, receipts=False, **options)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    session.routing.terms = RouterTerms(aux_loss=0.01)
    model = family("mixtral", dtype=torch.float32)
    ids = batches(1)[0][0]["input_ids"]
    with decided_once("effects of experts"):
        model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), ids)
    if after is not None:
        after(session)
    for step in session.steps([(inputs["input_ids"], labels) for inputs, labels in batches(16)], limit=2):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1.0)
    assert probe.receipt is not None
    assert {"tokens of experts", "routers' losses", "gradient of experts"} <= {x.name for x in probe.receipt.lines}
    session.close()
    return {line.name for line in probe.receipt.lines if line.ok is False}


def loss_not_reduced(strategy: str) -> set[str]:
    """Each rank balances its own tokens alone."""
    with mock.patch.object(MicroRouting, "send", lambda self: None):
        return run(strategy)


def one_expert_scaled(strategy: str) -> set[str]:
    """The gradient of one expert is twice what it should be."""

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad * ctx.scale
        grad[0] *= 2
        return grad, None

    with mock.patch.object(ScaledGradient, "backward", staticmethod(backward)):
        return run(strategy)


def capacity(strategy: str) -> set[str]:
    """Experts compute the first half of the tokens that they get."""
    whole = expert_parallel._local

    def half(module: Any, here: Any, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        found = whole(module, here, rows[: len(rows) // 2], expert[: len(rows) // 2])
        return torch.cat([found, torch.zeros_like(rows[len(rows) // 2 :])])

    with mock.patch.object(expert_parallel, "_local", half):
        return run(strategy)


def left_out(strategy: str) -> set[str]:
    """A router sends some tokens to no expert, as implementations with a capacity do."""

    def drop(_: Any, __: Any, found: Any) -> Any:
        chosen = found[2].clone()
        chosen[::3] = 4
        return found[0], found[1], chosen

    def after(session: Any) -> None:
        for router in routers(session.module):
            router.register_forward_hook(drop)

    return run(strategy, after)


SABOTAGES: list[tuple[Callable[[str], set[str]], str, str]] = [
    (loss_not_reduced, "ddp", "routers' losses"),
    (loss_not_reduced, "fsdp+ep2", "routers' losses"),
    (one_expert_scaled, "fsdp+ep2", "gradient of experts"),
    (capacity, "fsdp+ep2", "tokens of experts"),
    (left_out, "fsdp", "tokens of experts"),
]


def sabotaged() -> list[set[str]]:
    return [sabotage(strategy) for sabotage, strategy, _ in SABOTAGES]


def test_each_sabotage_has_its_line() -> None:
    for found in run_world(sabotaged, 2, timeout_s=170):
        for (sabotage, strategy, line), lines in zip(SABOTAGES, found, strict=True):
            assert lines == {line}, f"{sabotage.__name__} under {strategy}: {lines}"


CLEAN = {
    2: [("ddp", {}), ("fsdp", {"precision": "bf16"}), ("fsdp+ep2", {"precision": "bf16", "recompute": "full"})],
    4: [
        ("fsdp+ep2", {"grad_accum": 2}),
        ("hsdp+ep2", {}),
        ("zero2+ep4", {"recompute": "full"}),
        ("fsdp+tp2+ep2", {}),
        ("fsdp+pp2+ep2", {}),
        ("fsdp+cp2+ep4", {}),
    ],
}


def clean(strategy: str, options: dict[str, Any]) -> set[str]:
    return run(strategy, **options)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", CLEAN)
def test_no_alarm_when_all_is_right(world: int) -> None:
    found = run_each(clean, world, CLEAN[world], timeout_s=250)
    wrong = {str(case): ranks for case, ranks in zip(CLEAN[world], found, strict=True) if any(ranks)}
    assert not wrong
