"""A parameter that had a gradient and has none any more is named once; what is legitimately unused at times is not."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.receipts import lost_gradients
from shardwise.receipts.lost_gradients import LostGradients
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.families import family
from tests.models import ragged_batches
from tests.worlds import run_world

WIDTH, VOCAB, CHECKS = 8, 12, 4
STEPS = 3 * CHECKS
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
FAULTS = ("detached", "off", "one rank", "tiny")
FINE = ("none", "routed", "returns", "late", "adapter", "frozen", "rows")


class Net(nn.Module):
    """``kind`` says what becomes of `extra` once it has been called ``calls`` times."""

    def __init__(self, kind: str, calls: int) -> None:
        super().__init__()
        self.kind, self.calls, self.called = kind, calls, 0
        self.embed, self.extra, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.wide = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # with `narrow` as an adapter: at first only this one
        self.narrow = nn.Parameter(torch.randn(WIDTH, WIDTH))
        if kind == "frozen":
            self.extra.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.called += 1
        late = self.called > self.calls
        x = self.embed(
            ids % (VOCAB // 2) if self.kind == "rows" else ids
        )  # of the other rows another rank has the shard
        out = self.extra(x)
        if (self.kind == "detached" and late) or (self.kind == "one rank" and (late or torch.distributed.get_rank())):
            out = out.detach() + 0 * self.extra.bias.sum() * 0
        if self.kind == "off" and late:
            out = torch.relu(out - 1e6)
        if self.kind == "tiny" and late:
            out = out * 1e-200 * 1e-200
        if self.kind == "routed" and self.called % 3 == 0:
            out = out * 0.0
        if self.kind == "returns" and late and self.called % (2 * CHECKS):
            out = out * 0.0
        if self.kind == "late" and not late:
            out = out * 0.0
        x = x + out + x @ self.narrow @ self.wide
        return self.head(x)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "no gradient any more" in record.getMessage():
            self.texts.append(record.getMessage())


def train(model: nn.Module, strategy: str, **options: Any) -> tuple[int, list[str]]:
    """A run with a check in each step, which the last steps do not need: checks, and what was said."""
    said = Said()
    batches = [(ids[:, :7] % VOCAB, labels[:, :7] % VOCAB) for ids, labels in ragged_batches(2 * STEPS)]
    logging.getLogger("shardwise").addHandler(said)
    with mock.patch.object(lost_gradients, "CHECKS", CHECKS):
        session = start(strategy, receipts=False, **options)
        watch = LostGradients.attach(session, share=1e9)
        outer, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batches[0][0])
        for step in session.steps(batches):
            step.run(outer, token_loss_sum)
            step.update(optimizer)
    logging.getLogger("shardwise").removeHandler(said)
    session.close()
    return watch.checks, said.texts


def cases() -> dict[str, tuple[int, list[str]]]:
    found = {}
    for strategy in STRATEGIES:
        for kind in (*FAULTS, *FINE):
            torch.manual_seed(0)
            found[f"{strategy} {kind}"] = train(Net(kind, CHECKS + 1).double(), strategy)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[int, list[str]]]]:
    return run_world(cases, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_named_once(found: list[Any], strategy: str) -> None:
    for kind in FAULTS:
        checks, said = found[0][f"{strategy} {kind}"]
        assert checks == STEPS and len(said) == 1, (kind, said)
        first, last = CHECKS + 2, 2 * CHECKS + 1
        assert said[0].startswith(f"by step {last}, 'extra.weight', 'extra.bias': no gradient any more"), (kind, said)
        assert f"in {CHECKS} checks since step {first}; there was one in each of {CHECKS + 1} checks before" in said[0]
        assert found[1][f"{strategy} {kind}"][1] == [], "rank 0 speaks"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_unused_at_times_is_not(found: list[Any], strategy: str) -> None:
    assert {kind: found[0][f"{strategy} {kind}"][1] for kind in FINE} == {kind: [] for kind in FINE}


def in_stages() -> tuple[int, list[str]]:
    model = family("llama", layers=2)
    calls = 0

    def off(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output * float(calls <= 2 * (CHECKS + 1))  # of two micro batches

    model.model.layers[1].mlp.register_forward_hook(off)
    return train(model, "ddp+pp2", grad_accum=2)


def test_a_stage_of_a_pipeline_is_looked_at() -> None:
    [checks, said], _ = run_world(in_stages, 2)
    assert checks >= 2 * CHECKS + 1 and len(said) == 1
    assert "'model.layers.1.mlp." in said[0] and "layers.0" not in said[0]


def test_rare_checks_cost_little() -> None:
    """Only the first check comes at once; the next when the time that it took is a thousandth of the run's."""
    one = LostGradients()
    assert one.post() == [1]
    one.checks, one.spent_s, one._last_s = 1, 0.01, 0.01
    with mock.patch("time.perf_counter", return_value=100.0):
        one._begun = 81.0
        assert one.post() == [0]
        one._begun = 79.0
        assert one.post() == [1]


def test_what_is_frozen_begins_anew() -> None:
    one = LostGradients()
    values = [1] * 12 + [2] * 3 + [0] * 30 + [1] * 11 + [0] * 30 + [1] * 12 + [0] * 11 + [1] + [0] * 30
    assert not any(one._is_lost("weight", value, step) for step, value in enumerate(values))
    values = [1] * 12 + [0] * 30
    assert [step for step, value in enumerate(values) if one._is_lost("other", value, step)] == [23]
