"""`Case`: a small model, its data, its loss and its optimizer; the zoo is a table of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WIDTH, VOCAB = 8, 11
Data = Callable[[torch.Generator, int], tuple[Any, Any]]
Loss = Callable[[Any, Any, Any], torch.Tensor]
CASES: dict[str, Case] = {}


class Net(nn.Module):
    """A module of ``parts`` (a list is a ModuleList) whose forward is ``run(self, ...)``."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def floats(*shape: int, out: tuple[int, ...] = (WIDTH,), rows: int = 2) -> Data:
    """Inputs and targets of reals; a sample is a loss term."""

    def data(generator: torch.Generator, index: int) -> tuple[Any, Any]:
        x = torch.randn(rows, *(shape or (WIDTH,)), generator=generator, dtype=torch.float64)
        return x, torch.randn(rows, *out, generator=generator, dtype=torch.float64)

    return data


def tokens(length: int = 5, rows: int = 2) -> Data:
    """Token ids and labels."""

    def data(generator: torch.Generator, index: int) -> tuple[Any, Any]:
        ids, labels = torch.randint(VOCAB, (2, rows, length), generator=generator)
        return ids, labels

    return data


def routed(data: Data, kinds: int = 2) -> Data:
    """The inputs and a number that says which parts of the model they use: all at first, then one by chance."""

    def with_route(generator: torch.Generator, index: int) -> tuple[Any, Any]:
        inputs, labels = data(generator, index)
        route = kinds if index < 4 else zlib.crc32(f"route {index}".encode()) % (kinds + 1)
        return (inputs, route), labels

    return with_route


def changed(data: Data, change: Callable[[Any, int], Any]) -> Data:
    """The inputs as ``change(inputs, index)`` has them."""

    def other(generator: torch.Generator, index: int) -> tuple[Any, Any]:
        inputs, labels = data(generator, index)
        return change(inputs, index), labels

    return other


def call(model: Any, inputs: Any) -> Any:
    """The model's output for inputs of any kind."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def squares(model: Any, inputs: Any, labels: Any) -> torch.Tensor:
    """Summed squares, the ordinary loss."""
    return (call(model, inputs) - labels).square().sum()


def cross_entropy(model: Any, inputs: Any, labels: Any) -> torch.Tensor:
    """Summed cross-entropy over the labels that count."""
    logits = call(model, inputs)
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=-100)


def through(take: Callable[[Any], torch.Tensor], loss: Loss = squares) -> Loss:
    """The loss of what ``take`` finds in the outputs."""
    return lambda model, inputs, labels: loss(lambda *a, **k: take(model(*a, **k)), inputs, labels)


def returned(model: Any, inputs: Any, labels: Any) -> torch.Tensor:
    """The loss as the model's own forward has it."""
    return call(model, (*inputs, labels) if isinstance(inputs, tuple) else (inputs, labels))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay over what trains."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One model of the zoo. ``ragged`` micro batches are missing in the last window.

    ``steps`` are three where samples are alike in kind, and four where they are not: the first of those is ordinary.

    ``decides``: its samples decide what sharding cannot follow, which nothing can know before they come; it may stop in
    a later step, with no weight changed in that step. ``counts``: each of its forwards changes it, whatever the
    samples; one process then has as many forwards in a step as a rank, each on the micro batches of all ranks.
    ``asks`` says what a model computes from the world's size: one process is told the size that the ranks have.
    """

    name: str
    make: Callable[[], nn.Module]
    data: Data = field(default_factory=floats)
    loss: Loss = squares
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum
    dtype: torch.dtype | None = torch.float64
    steps: int | None = None
    ragged: int = 0
    limit: float = 1e-9
    count: Callable[[Any], int] | None = None
    decides: bool = False
    counts: bool = False
    asks: str = ""

    def model(self) -> nn.Module:
        """The model with its first weights."""
        torch.manual_seed(0)
        model = self.make()
        return model if self.dtype is None else model.to(self.dtype)

    def batches(self, window: int) -> list[tuple[Any, Any]]:
        """The micro batches of all steps, in their order."""
        generator = torch.Generator().manual_seed(1)
        alike = not self.decides and self.data.__qualname__.startswith(("floats.", "tokens."))
        steps = self.steps or (3 if alike else 4)
        return [self.data(generator, index) for index in range(steps * window - self.ragged)]

    def forwards(self, window: list[tuple[Any, Any]], world: int) -> list[tuple[Any, Any]]:
        """What one process computes in turn for the micro batches of a step on ``world`` ranks."""
        if not self.counts:
            return window
        rounds = [window[at : at + world] for at in range(0, len(window), world)]
        return [(torch.cat([x for x, _ in one]), torch.cat([y for _, y in one])) for one in rounds]


def zoo(name: str, make: Callable[[], nn.Module], data: Data = floats(), loss: Loss = squares, **more: Any) -> None:
    """Add a case."""
    assert name not in CASES, name
    CASES[name] = Case(name, make, data, loss, **more)
