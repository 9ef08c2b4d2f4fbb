"""Epochs of a loop of one's own: a finished one never runs again, and the rest sees the samples of a whole run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from shardwise.errors import UserError
from shardwise.run.start import start
from shardwise.train.session import Session
from tests.turns import by_turns
from tests.worlds import run_each

SAMPLES, EPOCHS = 14, 3
DATA = TensorDataset(torch.arange(SAMPLES).float().unsqueeze(1), torch.arange(SAMPLES))


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from DATA


def loader_of(kind: str) -> Any:
    if kind == "own generator":
        return DataLoader(DATA, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "unsized":
        return DataLoader(Unsized(), batch_size=2)
    if kind == "distributed":
        return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, seed=5))
    return DataLoader(DATA, batch_size=2, shuffle=True)


def prepared(strategy: str = "ddp", **options: Any) -> tuple[Session, nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    session = start(strategy, receipts=False, **options)
    return session, *session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))


def one_step(model: nn.Module, optimizer: Any, step: Any) -> list[int]:
    seen = []
    for micro in step:
        step.backward(model(micro.inputs).sum())
        seen += [] if micro.padding else micro.labels.tolist()
    step.update(optimizer)
    return seen


Events = list[tuple[Any, ...]]


def run(folder: str, kind: str, *, every: int = 0, dies_after: int = 0, limit: int | None = None) -> Events:
    """The loop of the docs; it ends without a word in the save number ``dies_after``."""
    session, model, optimizer = prepared(grad_accum=2)
    loader, events, saves = loader_of(kind), [], 0
    session.load(folder)
    for epoch in session.epochs(EPOCHS):
        for step in session.steps(loader, limit=limit):
            last = one_step(model, optimizer, step)
            events.append((epoch, *last))
            if every and step.number % every == 0:
                session.save(folder)
                saves += 1
                if saves == dies_after:
                    session.close()
                    return events
        events.append((epoch, f"evaluated after {len(last)}"))  # unbound if the epoch had no step
        session.save(folder)
        saves += 1
        if saves == dies_after:
            break
    session.close()
    return events


def interrupted(folder: str, kind: str, every: int, limit: int | None) -> list[str]:
    """Die in each of the saves in turn; a message for each that goes on otherwise than a whole run."""
    torch.manual_seed(7)
    whole, wrong = run(f"{folder}/whole", kind, every=every, limit=limit), []
    for dies_after in range(1, 40):
        torch.manual_seed(7)
        place = f"{folder}/{dies_after}"
        first = run(place, kind, every=every, dies_after=dies_after, limit=limit)
        rest = run(place, kind, every=every, limit=limit)
        expected = [event for event in whole if event not in first]
        if expected and isinstance(expected[0][1], str):  # the save inside of the last step has finished the epoch
            expected = expected[1:]
        if rest != expected:
            wrong.append(f"{kind}, every {every}, dead after save {dies_after}: {rest} and not {expected}")
        if first == whole:
            return wrong
    return ["never whole"]


CASES = [
    ("global generator", 0, None),
    ("global generator", 2, None),
    ("own generator", 1, None),
    ("own generator", 2, 2),
    ("unsized", 1, None),
    ("distributed", 3, None),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize("world", [1, 2])
def test_an_interrupted_run_goes_on_behind_what_is_finished(tmp_path: Path, world: int) -> None:
    cases = CASES if world > 1 else CASES[1::2]  # one rank does less of the same
    cases = by_turns(cases, 3, f"{world} ranks")
    calls = [(str(tmp_path / f"{number}"), *case) for number, case in enumerate(cases)]
    assert run_each(interrupted, world, calls) == [[[]] * world] * len(cases)


def test_a_finished_run_says_that_nothing_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(run(str(tmp_path), "global generator")) == EPOCHS * 5
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert run(str(tmp_path), "global generator") == []
    assert "session.epochs(3): the checkpoint has finished all of them, so nothing is left to train" in caplog.text


def test_a_loop_over_a_range_is_told_of_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(str(tmp_path), "global generator")
    session, _, _ = prepared(grad_accum=2)
    session.load(tmp_path)
    with caplog.at_level(logging.WARNING, "shardwise"):
        for _ in range(EPOCHS):
            assert not list(session.steps(loader_of("global generator")))
    session.close()
    assert caplog.text.count("was finished before the checkpoint and yields no steps") == 1
    assert "`for epoch in session.epochs(n)`" in caplog.text


def test_two_passes_in_an_epoch_are_refused_and_two_rows_of_epochs_are_not() -> None:
    session, model, optimizer = prepared()
    numbers = []
    for epoch in session.epochs(2):
        numbers.append(epoch)
        for step in session.steps(loader_of("own generator"), limit=1):
            one_step(model, optimizer, step)
        with pytest.raises(UserError, match="called twice in one epoch"):
            session.steps(loader_of("own generator"))
    assert numbers == [0, 1]
    assert list(session.epochs(3)) == [0, 1, 2]
    session.close()


def test_a_stop_ends_the_epochs() -> None:
    session, model, optimizer = prepared()
    seen = []
    for epoch in session.epochs(3):
        for step in session.steps(loader_of("own generator")):
            one_step(model, optimizer, step)
            session.stop()
        seen.append(epoch)
    session.close()
    assert seen == [0]


class Calls(DistributedSampler):
    """Records what ``set_epoch`` is given."""

    def __init__(self) -> None:
        super().__init__(DATA, seed=5)
        self.given: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.given.append(epoch)


def orders(by: str) -> tuple[int, list[int]]:
    """How many orders of the samples three passes have, and the epochs that the sampler was given."""
    session, model, optimizer = prepared()
    sampler = Calls()
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    seen = set()
    for epoch in session.epochs(3) if by == "epochs" else range(3):
        if by == "loop":
            sampler.set_epoch(epoch + 10)
        seen.add(tuple(i for step in session.steps(loader) for i in one_step(model, optimizer, step)))
    session.close()
    return len(seen), sampler.given


def test_a_sampler_that_shuffles_by_epoch_gets_it_unless_the_loop_gives_it() -> None:
    found = run_each(orders, 2, [("epochs",), ("range",), ("loop",)])
    assert found == [[(3, [0, 1, 2])] * 2, [(3, [0, 1, 2])] * 2, [(3, [10, 11, 12])] * 2]
