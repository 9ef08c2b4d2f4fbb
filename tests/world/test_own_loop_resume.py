"""A loop of one's own that is stopped and goes on: the same samples, the same weights, on other ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from shardwise.errors import UserError
from shardwise.run.start import start
from tests.worlds import run_world

SAMPLES, BATCH, EPOCHS = 46, 2, 3


class Noisy(Dataset):
    """Loading a sample draws from the global generator, as augmentations do."""

    loaded: list[int]

    def __init__(self) -> None:
        self.loaded = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        self.loaded.append(index)
        return torch.full((4,), float(index)) / SAMPLES + torch.randn(4) * 0.01, torch.tensor(index)


class Flow(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(SAMPLES).tolist():
            yield torch.full((4,), float(index)) / SAMPLES, torch.tensor(index)


def loader_of(kind: str):
    if kind == "flow":
        return DataLoader(Flow(), batch_size=BATCH)
    if kind == "list":
        return [(torch.full((BATCH, 4), float(n)), torch.full((BATCH,), n)) for n in range(SAMPLES // BATCH)]
    own = {"generator": torch.Generator().manual_seed(5)} if kind == "generator" else {}
    if kind == "distributed":
        return DataLoader(Noisy(), batch_size=BATCH, sampler=DistributedSampler(Noisy(), shuffle=True))
    return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, **own)


def net(dropout: float) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))


def train(
    folder: str,
    kind: str,
    strategy: str,
    *,
    stop_after: int | None = None,
    async_save: bool = False,
    dropout: float = 0.1,
):
    """One run of a script; returns the samples of each step on this rank, and the weights at the end."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    session = start(strategy, grad_accum=4 // world, receipts=False)
    model, loader = net(0.1), loader_of(kind)
    torch.manual_seed(11 + session.ranks.rank)
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    found = session.load(folder)
    assert (found is None) == (session.steps_done == 0)
    assert found is None or found == {"best": session.steps_done}
    seen: list[tuple[int, list[int]]] = []
    try:
        for _ in range(EPOCHS):
            for step in session.steps(loader):
                ids: list[int] = []
                for micro in step:
                    if not micro.padding:
                        ids += micro.labels.tolist()
                    step.backward((model(micro.inputs).squeeze(1) - micro.labels / SAMPLES).square().sum())
                step.update(optimizer)
                seen.append((step.number, ids))
                if step.number % 2 == 0 or step.number == stop_after:
                    session.save(folder, state={"best": step.number}, async_save=async_save)
                if step.number == stop_after:
                    return seen, None, len(getattr(getattr(loader, "dataset", None), "loaded", []))
        weights = [
            p.full_tensor().detach().clone() if hasattr(p, "full_tensor") else p.detach().clone()
            for p in model.parameters()
        ]
        return seen, weights, len(getattr(getattr(loader, "dataset", None), "loaded", []))
    finally:
        session.close()


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["shuffled", "generator", "flow", "list"])
def test_one_process_goes_on_bit_identically(tmp_path: Path, kind: str) -> None:
    full, weights, _ = train(str(tmp_path / "whole"), kind, "ddp")
    assert len(full) == 18  # 23 batches in windows of 4: 6 steps a pass
    assert len({tuple(ids) for _, ids in full}) == (6 if kind == "list" else 18)
    for stop in (3, 6, 7, 17):  # in a pass, at the end of one, early in one, late in the last
        folder = str(tmp_path / f"{kind}-{stop}")
        first, _, _ = train(folder, kind, "ddp", stop_after=stop, async_save=stop == 3)
        rest, ends, loaded = train(folder, kind, "ddp")
        assert first + rest == full
        assert all(torch.equal(a, b) for a, b in zip(weights, ends, strict=True))
        if kind == "shuffled":
            assert loaded == sum(len(ids) for _, ids in rest), "what was consumed is not loaded again"


def by_step(results) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for seen, *_ in results:
        for number, ids in seen:
            found.setdefault(number, []).extend(ids)
    return {number: sorted(ids) for number, ids in found.items()}


def run_part(folder: str, strategy: str, stop: int | None):
    return train(folder, "generator", strategy, stop_after=stop)


def test_other_ranks_go_on_with_the_same_samples(tmp_path: Path) -> None:
    full = by_step(run_world(run_part, 4, str(tmp_path / "whole"), "fsdp", None))
    assert len(full) == 18
    folder, found = str(tmp_path / "run"), {}
    for world, strategy, stop in ((4, "fsdp", 4), (2, "ddp", 9), (1, "ddp", 13), (2, "zero1", None)):
        found |= by_step(run_world(run_part, world, folder, strategy, stop))
    assert found == full
    for epoch in range(EPOCHS):
        ids = sorted(i for number, each in found.items() if (number - 1) // 6 == epoch for i in each)
        assert ids == list(range(SAMPLES))


def bit_identical(folder: str, strategy: str) -> bool:
    full, weights, _ = train(f"{folder}/whole", "shuffled", strategy)
    first, _, _ = train(f"{folder}/run", "shuffled", strategy, stop_after=8)
    rest, ends, _ = train(f"{folder}/run", "shuffled", strategy)
    return first + rest == full and all(torch.equal(a, b) for a, b in zip(weights, ends, strict=True))


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_go_on_bit_identically(tmp_path: Path, strategy: str) -> None:
    assert run_world(bit_identical, 2, str(tmp_path), strategy) == [True, True]


def another_number_of_ranks(folder: str) -> str:
    with pytest.raises(UserError, match="a loader with a DistributedSampler cannot resume there") as caught:
        train(folder, "distributed", "ddp")
    return str(caught.value)


def distributed_part(folder: str) -> None:
    train(folder, "distributed", "ddp", stop_after=3)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    run_world(distributed_part, 2, str(tmp_path))
    assert len(set(run_world(another_number_of_ranks, 4, str(tmp_path)))) == 1
    session = start("ddp", receipts=False)
    model = net(0.0)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(loader_of("list"), limit=1):
        with pytest.raises(UserError, match="in the middle of a step"):
            session.save(tmp_path / "x")
        for micro in step:
            step.backward(model(micro.inputs).sum())
        step.update(optimizer)
    session.save(tmp_path / "x")
    with pytest.raises(UserError, match=r"comes before the first session\.steps"):
        session.load(tmp_path / "x")
    session.close()
