"""A parameter that had a gradient and has none any more is named once; what is legitimately unused at times is not."""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.receipts import lost_gradients
from shardwise.receipts.lost_gradients import LostGradients
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.cli.configs import ROOT
from tests.contract import decided_once
from tests.experts import mixture
from tests.families import FAMILIES, family
from tests.models import ragged_batches
from tests.world.zoo.exact import Float64
from tests.worlds import run_world

WIDTH, VOCAB, CHECKS = 8, 12, 3  # with two, what returns would be called lost
STEPS = 3 * CHECKS + 1  # what a check has found is judged a step later
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
FAULTS = ("detached", "off", "one rank", "tiny")
FINE = ("none", "routed", "returns", "late", "adapter", "frozen", "rows", "left expert")
CUT = ("hsdp", "fsdp+tp2", "ddp+tp2", "fsdp+pp2")


class Net(nn.Module):
    """``kind`` says what becomes of `extra` once it has been called ``calls`` times."""

    def __init__(self, kind: str, calls: int) -> None:
        super().__init__()
        self.kind, self.calls, self.called = kind, calls, 0
        self.embed, self.extra, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.wide = nn.Parameter(torch.zeros(WIDTH, WIDTH))  # with `narrow` as an adapter: at first only this one
        self.narrow = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 if kind == "left expert" else 0))
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
        if self.kind == "gaps" and late:
            out = out.detach()
        x = x + out + x @ self.narrow @ self.wide
        for expert in self.experts[late:]:
            x = x + expert(x)
        off = (self.kind == "gaps" and self.called % 3 == 0) or (self.kind == "all" and late)
        return self.head(x) * (0.0 if off else 1.0)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "no gradient any more" in record.getMessage():
            self.texts.append(record.getMessage())


def train(model: nn.Module, strategy: str, steps: int = STEPS, **options: Any) -> tuple[int, list[str]]:
    """A run with a check in each step, few of which decide: how many there were, and what was said."""
    said = Said()
    batches = [(ids[:, :6] % VOCAB, labels[:, :6] % VOCAB) for ids, labels in ragged_batches(2 * steps)]
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
        for kind in (*FAULTS, *FINE, "all", "gaps"):
            torch.manual_seed(0)
            times = 2 if kind == "gaps" else 1
            found[f"{strategy} {kind}"] = train(Net(kind, times * (CHECKS + 1)).double(), strategy, times * STEPS)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_without_any_gradient_say_nothing_of_one_parameter(found: list[Any], strategy: str) -> None:
    """Each third step has none: the others find what is detached, and that it is not just unused at times."""
    (said,) = found[0][f"{strategy} gaps"][1]
    assert "'extra.weight', 'extra.bias': no gradient any more" in said
    (said,) = found[0][f"{strategy} all"][1]
    assert "'wide', 'narrow', 'embed.weight' and 4 more: no gradient any more" in said
    assert f"since step {CHECKS + 2};" in said


def cut(strategies: tuple[str, ...]) -> dict[str, tuple[int, list[str]]]:
    """A layer of a model that is cut over ranks is switched off."""
    found = {}
    for strategy in strategies:
        model, calls = family("llama", layers=2), 0
        micros = 2 if "pp" in strategy else 1

        def off(module: nn.Module, args: Any, output: torch.Tensor, last: int = micros * (CHECKS + 1)) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return output * float(calls <= last)

        model.model.layers[1].mlp.register_forward_hook(off)
        pairs = 2 if strategy in ("hsdp", "fsdp+pp2") else 1  # of micro batches in a step
        with decided_once("lost gradients"):
            found[strategy] = train(model, strategy, pairs * STEPS, grad_accum=micros)
    return found


@pytest.mark.parametrize(("world", "strategies"), [(2, ("ddp+pp2",)), (4, CUT)])
def test_a_model_that_is_cut_over_ranks_is_looked_at(world: int, strategies: tuple[str, ...]) -> None:
    for strategy, (checks, said) in run_world(cut, world, strategies)[0].items():
        assert checks >= 2 * CHECKS + 1 and len(said) == 1, (strategy, said)
        assert "'model.layers.1.mlp." in said[0] and "layers.0" not in said[0], (strategy, said)


def healthy() -> dict[str, list[str]]:
    """Families and mixtures of experts, one with an expert that never has a token, with a check in each step.

    Fewer checks decide than in a run, which only makes an alarm easier.
    """
    found = {}
    for strategy in ("zero1", "fsdp"):
        for name in FAMILIES:
            found[f"{strategy} {name}"] = train(family(name, layers=2), strategy)[1]
        for name in ("mixtral", "glm4_moe"):
            model = mixture(name, starved=name == "glm4_moe")
            model.config._experts_implementation = "eager"
            with Float64():
                found[f"{strategy} {name}"] = train(model, strategy)[1]
    return found


def test_no_alarm_for_healthy_families() -> None:
    assert {name: said for name, said in run_world(healthy, 2)[0].items() if said} == {}


def detached_run(folder: str) -> list[str]:
    """A loop of one's own whose layer is detached in the middle, with a check in each step and twelve to be sure."""
    said = Said()
    logging.getLogger("shardwise").addHandler(said)
    attach = functools.partial(LostGradients.attach, share=1e9)
    with mock.patch.object(LostGradients, "attach", attach):
        session = start("fsdp", output=folder)
    torch.manual_seed(0)
    model = Net("detached", 12)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)
    for step in session.steps([torch.randint(VOCAB, (2, 2, 6), generator=generator).unbind() for _ in range(52)]):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    session.report()
    return said.texts


def test_the_run_keeps_what_was_said_and_the_page_shows_it(tmp_path: Path) -> None:
    [said], _ = run_world(detached_run, 2, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["lost_gradients"] for line in lines if "lost_gradients" in line] == [
        [{"parameters": ["extra.weight", "extra.bias"], "since": 13}]
    ]
    findings = json.loads((tmp_path / "summary.json").read_text())["findings"]
    [found] = [one for one in findings if one["kind"] == "lost-gradient"]
    assert found["text"] == "2 parameters have no gradient any more: the loss stopped depending on them in step 13."
    assert found["evidence"] == ["since step 13: extra.weight, extra.bias"]
    page = " ".join((ROOT / "docs" / "when-numbers-go-bad.md").read_text().split())
    for text in (said, found["text"], found["evidence"][0], found["fix"]):
        assert re.sub(r"\d+", "N", text) in re.sub(r"\d+", "N", page)


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
