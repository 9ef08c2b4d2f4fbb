"""The same-gradient contract: whatever the split, the gradient is that of one process over the whole global batch.

Gradients are compared, in float64; a loss under Adam hides a constant factor.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from shardwise.train.session import Session
from shardwise.train.step import Step
from tests.contract import Still, both_here, here
from tests.kept import kept
from tests.models import decoder, ragged_batches
from tests.worlds import WorldError, run_world

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+offload")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "all": {"tied": True, "frozen": True, "recompute": "full"},
}
CLIP = 0.05
LIMIT = 1e-9
Gradients = dict[str, torch.Tensor]


def reference(batches: list[Any], clip: float, **options: bool) -> tuple[Gradients, Gradients, float, float]:
    """One process, one batch, no Shardwise: gradient, clipped gradient, norm, loss."""
    model = decoder(**options)
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    loss = sum(token_loss_sum(model(inputs), labels) for inputs, labels in batches) / max(count, 1)
    loss.backward()
    raw = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    clipped = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return raw, clipped, norm.item(), loss.item()


class Watch:
    """Keeps the whole gradients of every step, before and after clipping."""

    def __init__(self) -> None:
        self.raw: list[Gradients] = []
        self.clipped: list[Gradients] = []

    def on_prepared(self, session: Session) -> None: ...
    def on_step_start(self, session: Session, step: Step) -> None: ...

    def on_gradients(self, session: Session, step: Step) -> None:
        self.raw.append(gradients(session.module))

    def on_step_abandoned(self, session: Session, step: Step) -> None: ...

    def on_step_end(self, session: Session, step: Step) -> None:
        self.clipped.append(gradients(session.module))


def gradients(module: nn.Module) -> Gradients:
    from shardwise.model.read import clean_name

    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[clean_name(name)] = here(parameter.grad).detach().clone()
    return found


def worst_error(found: Gradients, expected: Gradients) -> tuple[float, str]:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    errors = []
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-30)
        mine, theirs = both_here(found[name], value)
        assert mine.shape == theirs.shape, name
        if mine.numel():
            errors.append((float((mine - theirs).abs().max() / scale), name))
    return max(errors, default=(0.0, ""))


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def train(
    strategy: str | Plan, world: int, accum: int, variant: str, *, mean_of_means: bool = False, receipts: bool = False
) -> float:
    """A whole window (two before a receipt) and a partial one, at least two; returns the largest relative error."""
    options = dict(VARIANTS[variant])
    recompute = options.pop("recompute", "none")
    per_window = world * accum
    partial = max(1, per_window // 2) if per_window > 1 else 0  # some ranks run dry
    windows = 2 if receipts or not partial else 1
    batches = ragged_batches(windows * per_window + partial)
    watch = Watch()
    session = start(strategy, grad_accum=accum, recompute=recompute, receipts=receipts)
    session.observers.append(watch)
    torch.manual_seed(100 + session.ranks.rank)  # a rank's own luck must not matter
    model = decoder(seed=0 if session.ranks.is_main else 7, **options)
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    worst = 0.0
    for index, step in enumerate(session.steps(batches)):
        for micro in step:
            loss = token_loss_sum(model(micro.inputs), micro.labels)
            if mean_of_means and micro.num_tokens:
                loss = loss / micro.num_tokens * (step.tokens / (world * accum))
            step.backward(loss, count=micro.num_tokens)
        result = step.update(optimizer, clip_norm=CLIP)
        window = batches[index * per_window : (index + 1) * per_window]
        raw, clipped, norm, loss_value = kept(
            ("gradients", sorted(options.items()), len(batches), index),
            lambda window=window: reference(window, CLIP, **options),
        )
        for found, expected in ((watch.raw[-1], raw), (watch.clipped[-1], clipped)):
            error, _ = worst_error(found, expected)
            worst = max(worst, error)
        worst = max(worst, relative(result.grad_norm, norm))
        if step.tokens:
            worst = max(worst, relative(result.loss, loss_value))
        else:  # a global batch without a single label: no gradient, and no loss to speak of
            assert norm == 0 and math.isnan(result.loss)
    assert index == windows - (0 if partial else 1)
    session.close()
    return worst


def shards_of_gradients(strategy: str, world: int) -> dict[str, float]:
    """Accumulation that reduces after every micro batch; the receipt must agree that it did."""
    errors = {}
    for accum, recompute in ((3, "none"), (4, "full")):
        dims = dims_for(parse_strategy(strategy), world)
        plan = Plan(strategy=strategy, dims=dims, grad_accum=accum, recompute=recompute, gradient_sync="every")
        errors[f"{accum} {recompute}"] = train(plan, world, accum, "tied", receipts=True)
    return errors


@pytest.mark.turns(3)
@pytest.mark.parametrize(("strategy", "world"), [("zero2", 2), ("fsdp", 2), ("hsdp", 4), ("fsdp+offload", 2)])
def test_gradients_may_be_reduced_after_every_micro_batch(strategy: str, world: int) -> None:
    for errors in run_world(shards_of_gradients, world, strategy, world):
        assert all(error <= LIMIT for error in errors.values()), errors


ACCUMS, WORLDS = (1, 3, 4), (1, 2, 4)


def cases(strategy: str, world: int) -> list[tuple[int, str]]:
    """Accumulations and variants: all for ddp and fsdp, whose code the others share; of those each pair of any two."""
    return [
        (accum, variant)
        for (i, accum), (j, variant) in itertools.product(enumerate(ACCUMS), enumerate(VARIANTS))
        if strategy in ("ddp", "fsdp") or WORLDS[(i + j) % len(WORLDS)] == world
    ]


def errors_of(strategy: str, world: int) -> dict[str, float]:
    return {f"{accum} {variant}": train(strategy, world, accum, variant) for accum, variant in cases(strategy, world)}


@pytest.mark.turns(2)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_is_that_of_one_process(strategy: str, world: int) -> None:
    for errors in run_world(errors_of, world, strategy, world):
        wrong = {case: error for case, error in errors.items() if not error <= LIMIT}
        assert not wrong, wrong
        assert len(errors) == len(cases(strategy, world))


def test_every_pair_is_covered() -> None:
    for strategy in STRATEGIES:
        found = {(world, *case) for world in WORLDS for case in cases(strategy, world)}
        for one, other in itertools.combinations(range(3), 2):
            axes = (WORLDS, ACCUMS, tuple(VARIANTS))
            assert {(row[one], row[other]) for row in found} == set(itertools.product(axes[one], axes[other]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_contract_catches_a_mean_of_means(strategy: str) -> None:
    """The classic mistake, averaging each micro batch alone, must fail the very same comparison."""
    for error in run_world(mean_of_means, 2, strategy):
        assert error > 1e-3


def mean_of_means(strategy: str) -> float:
    return train(strategy, 2, 3, "plain", mean_of_means=True)


def test_a_failing_rank_is_reported() -> None:
    with pytest.raises(WorldError, match="is none of"):
        run_world(train, 2, "nonsense", 2, 1, "plain")
