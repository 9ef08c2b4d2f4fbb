"""Runs that are right and that no receipt may stop: models that are called twice, share blocks or leave some out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.measure.collectives import CollectiveRecorder
from shardwise.receipts.effects import EffectsRecorder
from shardwise.receipts.lines.option_lines import compute_line
from shardwise.run.start import start
from tests.contract import Gradients, Watch, worst
from tests.kept import kept
from tests.models import VOCAB, Decoder
from tests.worlds import run_world

Loss = Callable[[nn.Module, Any, Any], torch.Tensor]


def tokens(model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")


def siamese(model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    """Two forwards on two inputs, whose results meet in the loss."""
    first, second = model(inputs), model(inputs.flip(1))
    return (first * second.roll(1, 0)).tanh().sum()


def twice(model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    """One input, two forwards, their distance beside the loss."""
    first, second = model(inputs), model(inputs)
    apart = (first - second.roll(1, 0)).square().sum()
    return functional.cross_entropy((first + second).flatten(0, 1), labels.flatten(), reduction="sum") + apart


def preferred(model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    """Chosen and rejected, beside a reference without gradients."""
    with torch.no_grad():
        before = model(inputs)
    chosen, rejected = model(inputs), model(inputs.flip(0))
    return -functional.logsigmoid((chosen - rejected - before).mean((1, 2))).sum()


def judged(model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    """A forward whose result is used as a number only, then one for the loss."""
    fake = model(inputs).detach().argmax(-1)
    return functional.cross_entropy(model(fake).flatten(0, 1), labels.flatten(), reduction="sum")


def evaluated(model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
    loss = tokens(model, inputs, labels)
    with torch.no_grad():
        model(inputs)
    return loss


class Shared(Decoder):
    """Each block runs twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x * self.scale)


class Leaving(Decoder):
    """Leaves blocks out in some steps: all ranks the same ones. ``passes`` counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[int, int] = {1: 1, 2: 2}
        self.step = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            if self.left_out.get(self.step) != index:
                x = block(x)
        return self.head(x * self.scale)


CASES: dict[str, tuple[type[Decoder], Loss]] = {
    "siamese": (Decoder, siamese),
    "twice": (Decoder, twice),
    "preferred": (Decoder, preferred),
    "judged": (Decoder, judged),
    "evaluated": (Decoder, evaluated),
    "shared": (Shared, tokens),
    "leaving": (Leaving, tokens),
}


def build(kind: type[Decoder]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(VOCAB, (2, 8), generator=generator) for _ in range(number)]
    return [(found[:, :-1].contiguous(), found[:, 1:].contiguous()) for found in ids]


def reference(name: str, window: list[Any], step: int) -> Gradients:
    kind, loss = CASES[name]
    model = build(kind)
    model.step = step
    count = sum(labels.numel() for _, labels in window)
    for inputs, labels in window:
        (loss(model, inputs, labels) / count).backward()
    return {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}


def alarms(name: str, strategy: str, accum: int, recompute: str) -> list[str]:
    """False lines, and gradients that are not those of one process."""
    kind, loss = CASES[name]
    session = start(strategy, grad_accum=accum, recompute=recompute, receipts=False)
    probe, watch = EffectsRecorder(strict=False), Watch()
    session.observers += [watch, probe]
    model = build(kind)
    outer, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    per_step = accum * session.dp
    given, found = batches((3 if kind is Leaving else 2) * per_step), []
    for index, step in enumerate(session.steps(given)):
        session.module.step = index
        for micro in step:
            step.backward(loss(outer, micro.inputs, micro.labels), count=micro.num_tokens)
        step.update(optimizer)
        window = given[index * per_step : (index + 1) * per_step]
        expected = kept(
            ("no false alarm", name, per_step, index), lambda window=window, step=index: reference(name, window, step)
        )
        off, where = worst(watch.raw, expected)
        found += [f"step {index + 1}: {where} off by {off:.1e}"] if off > 1e-9 else []
    assert probe.receipt is not None
    session.close()
    return found + [
        f"{line.name}: planned {line.planned}, found {line.found}" for line in probe.receipt.lines if line.ok is False
    ]


def all_alarms(strategy: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    found = {}
    for name, accum, recompute in itertools.product(names, (1, 2), ("none", "full")):
        try:
            found[f"{name} x{accum} {recompute}"] = alarms(name, strategy, accum, recompute)
        except Exception as error:
            found[f"{name} x{accum} {recompute}"] = [f"{type(error).__name__}: {error}"]
            if strategy in ("ddp", "zero1"):
                raise
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
def test_no_alarm(strategy: str) -> None:
    names = tuple(CASES)
    for found in run_world(all_alarms, 2, strategy, names):
        assert not {case: lines for case, lines in found.items() if lines}


def test_a_weight_that_was_not_cast_is_an_alarm() -> None:
    recorder = CollectiveRecorder(lambda: "forward")
    recorder.matmul_dtypes |= {"bfloat16", "float32"}
    recorder.weight_dtypes |= {"bfloat16"}
    assert compute_line({"bfloat16"}, recorder, casts_weights=True).ok  # two results in fp32: attention, on purpose
    recorder.weight_dtypes |= {"float32"}
    assert not compute_line({"bfloat16"}, recorder, casts_weights=True).ok
    recorder.matmul_dtypes.remove("bfloat16")
    assert not compute_line({"bfloat16"}, recorder, casts_weights=False).ok


def test_a_weight_is_told_from_its_copy() -> None:
    layer, x = nn.Linear(4, 4).bfloat16(), torch.randn(2, 4)
    with CollectiveRecorder(lambda: "forward") as recorder:
        functional.linear(x, layer.weight.float())
        layer(x.bfloat16())
    assert recorder.matmul_dtypes == {"float32", "bfloat16"}
    assert recorder.weight_dtypes == {"bfloat16"}
