"""A scheduler in a loop of one's own has as many steps as the loop, or it is said; nothing is said without reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from shardwise.errors import UserError
from shardwise.run.start import start
from tests.worlds import run_world

DATA = TensorDataset(torch.arange(42.0).unsqueeze(1), torch.arange(42))
EPOCHS = 3
Build = Callable[[Any, int, int], Any]


def loader_of(sampler: Any = None) -> Any:
    return DataLoader(DATA, batch_size=2, sampler=sampler)


def said(build: Build, *, epochs: bool = True, each_epoch: bool = False, **options: Any) -> list[str]:
    """What a run logs whose scheduler is ``build(optimizer, len(loader), steps per epoch)``."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    model = nn.Linear(1, 1)
    session = start("ddp", receipts=False, **options)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = loader_of()
    scheduler = build(optimizer, len(loader), session.steps_per_epoch(loader))
    for _ in session.epochs(EPOCHS) if epochs else range(EPOCHS):
        for step in session.steps(loader):
            for micro in step:
                step.backward(model(micro.inputs).sum())
            step.update(optimizer)
            if not each_epoch:
                scheduler.step()
        if each_epoch:
            scheduler.step()
    session.close()
    logger.removeHandler(handler)
    return told


def cosine(steps: Callable[[int, int], int]) -> Build:
    return lambda optimizer, batches, each: lr_scheduler.CosineAnnealingLR(optimizer, steps(batches, each))


def warmed(optimizer: Any, batches: int, each: int) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, each * EPOCHS - 5)
    return lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[5])


def warmed_too_long(optimizer: Any, batches: int, each: int) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, batches * EPOCHS - 5)
    return lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[5])


RIGHT: list[tuple[Build, dict[str, Any]]] = [
    (cosine(lambda batches, each: each * EPOCHS), {}),
    (cosine(lambda batches, each: each * EPOCHS), {"epochs": False}),
    (cosine(lambda batches, each: each * EPOCHS - 1), {}),
    (cosine(lambda batches, each: EPOCHS), {"each_epoch": True}),
    (cosine(lambda batches, each: EPOCHS), {"each_epoch": True, "epochs": False}),
    (cosine(lambda batches, each: 1000), {"epochs": False}),
    (lambda optimizer, batches, each: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=each * EPOCHS + 1), {}),
    (lambda optimizer, batches, each: lr_scheduler.StepLR(optimizer, 5), {}),
    (warmed, {}),
]


@pytest.mark.turns(2)
@pytest.mark.parametrize("accum", [1, 2])
def test_a_right_one_is_passed_over(accum: int) -> None:
    for build, options in RIGHT:
        assert said(build, grad_accum=accum, **options) == []


def test_one_of_another_length_is_named() -> None:
    (text,) = said(cosine(lambda batches, each: batches * EPOCHS), grad_accum=2)
    assert text == (
        "CosineAnnealingLR has 61 steps left, but the loop 31: an epoch has 11 steps here "
        "(1 data-parallel rank, 2 micro batches a step); build it with session.steps_per_epoch(loader)"
    )
    (text,) = said(warmed_too_long, grad_accum=2)
    assert text.startswith("SequentialLR has 61 steps left, but the loop 31:")
    (text,) = said(cosine(lambda batches, each: batches * EPOCHS), grad_accum=2, epochs=False)
    assert text == (
        "CosineAnnealingLR has 63 steps, a multiple of the loader's 21 batches, but an epoch has 11 steps here "
        "(1 data-parallel rank, 2 micro batches a step); build it with session.steps_per_epoch(loader)"
    )


def on_two_ranks() -> tuple[list[str], list[int]]:
    found = said(cosine(lambda batches, each: batches * EPOCHS))
    session = start("ddp", receipts=False)
    model = nn.Linear(1, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loaders = [loader_of(), loader_of(DistributedSampler(DATA)), [1] * 5]
    steps = [session.steps_per_epoch(loader) for loader in loaders]
    steps.append(session.steps_per_epoch(loader_of(), sharded=True))
    session.close()
    return found, steps


def test_two_ranks_take_half_the_steps_and_one_of_them_says_so() -> None:
    first, second = run_world(on_two_ranks, 2)
    (text,), steps = first
    assert "61 steps left, but the loop 31" in text and "(2 data-parallel ranks, 1 micro batch a step)" in text
    assert steps == [11, 11, 3, 21]
    assert second == ([], steps)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from DATA


def test_a_loader_without_a_length_is_refused() -> None:
    session = start("ddp", receipts=False)
    model = nn.Linear(1, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    with pytest.raises(UserError, match=r"the loader \(DataLoader\) has no length; count the steps of an epoch"):
        session.steps_per_epoch(DataLoader(Endless(), batch_size=2))
    session.close()
