"""Convolutions, in both memory layouts, and weights that are set anew in the middle of a run: those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.model.read import clean_name
from shardwise.run.start import start
from tests.turns import by_turns
from tests.worlds import run_world

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "zero2+offload", "fsdp+offload")
CASES = [(anew, layout) for anew in (False, True) for layout in (torch.contiguous_format, torch.channels_last)]


class Convolutions(nn.Module):
    """Three residual blocks and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(4, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=generator), torch.randint(5, (2,), generator=generator))
        for _ in range(16)
    ]


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def set_anew(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "head" in name:
            nn.init.constant_(parameter, 0.1)


def trained(strategy: str, anew: bool, layout: torch.memory_format) -> dict[str, torch.Tensor]:
    batches = data()
    session = start(strategy, grad_accum=2, receipts=False)
    model = Convolutions().to(memory_format=layout)
    model, optimizer = session.prepare(model, optimizer_of(model), batches[0][0])
    for step in session.steps(batches):
        for micro in step:
            step.backward(loss_of(model(micro.inputs), micro.labels))
        step.update(optimizer)
        if anew and step.number == 2:
            set_anew(session.module)
    found = {clean_name(name): p.detach() for name, p in session.module.named_parameters()}
    found = {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in found.items()}
    session.close()
    return found


def plain(anew: bool) -> dict[str, torch.Tensor]:
    model, batches = Convolutions(), data()
    optimizer = optimizer_of(model)
    for step in range(4):
        optimizer.zero_grad()
        window = batches[4 * step : 4 * step + 4]
        (sum(loss_of(model(x), y) for x, y in window) / 8).backward()
        optimizer.step()
        if anew and step == 1:
            set_anew(model)
    return {name: p.detach() for name, p in model.named_parameters()}


def errors() -> dict[str, float]:
    found: dict[str, Any] = {}
    for strategy in by_turns(STRATEGIES, 3, "convolutions"):
        for anew, layout in CASES:
            weights, expected = trained(strategy, anew, layout), plain(anew)
            worst = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
            found[f"{strategy} anew={anew} {layout}"] = worst
    return found


@pytest.mark.turns(1)
def test_weights_are_those_of_one_process() -> None:
    for found in run_world(errors, 2):
        assert not {case: error for case, error in found.items() if not error < 1e-12}
        assert len(found) == len(by_turns(STRATEGIES, 3, "convolutions")) * len(CASES)
