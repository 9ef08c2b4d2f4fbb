"""Habits of loops written for DDP: each works, or is named with what to write instead."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import PlanError, UserError
from shardwise.parallel.data_parallel.ddp import Replicated
from shardwise.run.start import start
from shardwise.train.session import Session
from tests.models import decoder
from tests.worlds import run_each, run_world

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def prepared(strategy: str, model: nn.Module | None = None, **options: Any) -> tuple[Session, nn.Module, Any]:
    session = start(strategy, receipts=False, **options)
    model = decoder() if model is None else model
    return session, *session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def module_of(strategy: str) -> tuple[str, bool]:
    """What ``model.module`` says, and whether ``hasattr`` finds it."""
    session, model, _ = prepared(strategy)
    try:
        model.module(torch.zeros(1, 3, dtype=torch.int64))
    except AttributeError as error:
        return str(error), hasattr(model, "module")
    finally:
        with pytest.raises(AttributeError, match="has no attribute 'modul'"):
            _ = model.modul
        session.close()
    return "", hasattr(model, "module")


def test_the_module_inside_of_ddp_is_explained_where_there_is_none() -> None:
    found = run_each(module_of, 2, [("fsdp",), ("zero2",), ("ddp",)])
    for text, there in (*found[0], *found[1]):
        assert text.startswith("model.module is a habit of DDP: session.prepare has sharded your own model in place")
        assert "call model(inputs)" in text and not there
    assert found[2] == [("", True)] * 2


def traceback_of_module(strategy: str) -> tuple[bool, str]:
    """Whether ``session.module`` is the user's own, and the traceback of a script that ends in ``model.module``."""
    said = io.StringIO()
    session, model, _ = prepared(strategy)
    own = type(session.module).__name__.endswith("Decoder")
    try:
        model.module  # noqa: B018
    except AttributeError as error:
        with contextlib.redirect_stderr(said):
            sys.excepthook(type(error), error, error.__traceback__)
    session.close()
    return own, said.getvalue()


def test_on_one_rank_a_traceback_of_the_module_inside_of_ddp_says_what_to_write() -> None:
    for ((own, said),) in run_each(traceback_of_module, 1, [("ddp",), ("zero1",)]):
        *_, raised, note = said.splitlines()
        assert own and "AttributeError: " in raised and "'module'" in raised
        assert "model.module is a habit of DDP, and one rank has no wrapper; write session.module" in note
    assert run_each(traceback_of_module, 2, [("ddp",), ("zero1",)]) == [[(True, "")] * 2] * 2


def ce(outputs: torch.Tensor, labels: torch.Tensor, **how: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), **how)


REFUSED: dict[str, tuple[Loss, str]] = {
    "mean": (lambda x, y: ce(x, y), "got a mean (NllLossBackward0) over 14 labels"),
    "divided mean": (lambda x, y: ce(x, y) / 4, "got a mean (NllLossBackward0) divided by 4 over 14 labels"),
    "own mean, divided": (lambda x, y: x.square().mean() / 4, "got a mean (MeanBackward0) divided by 4"),
    "divided sum": (
        lambda x, y: ce(x, y, reduction="sum") / 4,
        "got a summed loss (NllLossBackward0) divided by 4, which is grad_accum; it normalises itself",
    ),
}
TAKEN: dict[str, Loss] = {
    "sum": lambda x, y: ce(x, y, reduction="sum"),
    "mean times its labels": lambda x, y: ce(x, y) * y.numel(),
    "mean by a share": lambda x, y: ce(x, y) / (1 / y.numel()),
    "half a squared error": lambda x, y: x.square().sum() / 2,
    "a quarter of it": lambda x, y: functional.mse_loss(x, torch.zeros_like(x), reduction="sum") / 4,
    "another temperature": lambda x, y: ce(x, y, reduction="sum") / 0.7,
    "two losses": lambda x, y: ce(x, y, reduction="sum") / 4 + x.square().sum() / 4,
    "by a tensor": lambda x, y: ce(x, y, reduction="sum") / torch.ones(()).requires_grad_(),
}


def one_step(loss_of: Loss) -> str:
    session, model, optimizer = prepared("ddp", grad_accum=4)
    try:
        for step in session.steps([(torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64))] * 4):
            for inputs, labels in step:
                step.backward(loss_of(model(inputs), labels))
            return repr(step.update(optimizer, clip_norm=1.0))
    finally:
        session.close()
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_divided_already_is_refused(name: str) -> None:
    loss_of, words = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(words)):
        one_step(loss_of)


@pytest.mark.parametrize("name", TAKEN)
def test_what_may_be_a_sum_is_taken(name: str) -> None:
    assert re.fullmatch(r"StepResult\(number=1, tokens=56, loss=[\d.]+, grad_norm=[\d.e+]+\)", one_step(TAKEN[name]))


class Sometimes(nn.Module):
    """One of its layers is used for odd samples alone, another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.odd, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x)
        return self.odd(x) if int(x.shape[0]) % 2 else x


def weights(options: dict[str, Any], accum: int, samples: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    session, model, optimizer = prepared("ddp", Sometimes().double(), options=options, grad_accum=accum)
    data = [(torch.full((n, 4), 0.1 * at).double(), torch.ones(n)) for at, n in enumerate(samples)]
    for step in session.steps(data):
        for inputs, _ in step:
            step.backward(model(inputs).square().sum())
        step.update(optimizer)
    found = [p.detach().clone() for p in session.module.parameters()]
    session.close()
    return found


def alike(options: dict[str, Any], accum: int) -> bool:
    samples = [2, 3] * 6 if options.get("static_graph") else [2, 3, 2, 2, 4, 2, 3, 3, 2, 2, 2, 5]
    plain, other = weights({}, accum, samples), weights(options, accum, samples)
    return all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(plain, other, strict=True))


def test_options_of_ddp_change_no_weight() -> None:
    calls = [
        (options, accum)
        for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"bucket_cap_mb": 1})
        for accum in ((1,) if options.get("static_graph") else (1, 2, 3))
    ]
    assert run_each(alike, 2, calls) == [[True, True]] * len(calls)


def options_of_ddp() -> tuple[Any, ...]:
    session, model, _ = prepared("ddp", options={"static_graph": True, "bucket_cap_mb": 50})
    assert isinstance(model, Replicated)
    found = model.static_graph, model.find_unused_parameters, model.bucket_bytes_cap // 2**20
    session.close()
    return found


def test_start_passes_options_on() -> None:
    assert run_world(options_of_ddp, 2) == [(True, False, 50)] * 2


def test_start_refuses_options_without_effect_all_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        start("fsdp", options={"static_graph": True, "bucket_cap_mb": 50})
    assert str(caught.value).splitlines() == [
        f"start('fsdp', options=...): '{name}' does nothing without full parameters (ddp, zero1; not with +tp or +pp); "
        "remove it"
        for name in ("static_graph", "bucket_cap_mb")
    ]
    with pytest.raises(PlanError, match=r"static_grap: no such key \(did you mean 'static_graph'\?\)"):
        start("ddp", options={"static_grap": True})
    session = start("ddp", grad_accum=2, options={"static_graph": True}, receipts=False)
    model = nn.Linear(1, 1)
    with pytest.raises(PlanError, match="static_graph with grad_accum 2: PyTorch's DDP fails"):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.close()
    with pytest.raises(PlanError, match="belongs to a named strategy"):
        start("auto", options={"static_graph": True})


def clears(strategy: str, each: bool) -> str:
    """``zero_grad`` in each micro batch, or as tutorials have it, once before a step."""
    session, model, optimizer = prepared(strategy, grad_accum=2)
    batches = [(torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64))] * 8
    try:
        for step in session.steps(batches):
            optimizer.zero_grad()
            for inputs, labels in step:
                if each:
                    optimizer.zero_grad()
                step.backward(ce(model(inputs), labels, reduction="sum"))
            step.update(optimizer)
    except UserError as error:
        return str(error)
    finally:
        session.close()
    return ""


def test_gradients_that_are_cleared_within_a_step_are_missed() -> None:
    calls = [(strategy, each) for strategy in ("ddp", "zero1", "fsdp") for each in (False, True)]
    found = run_each(clears, 2, calls)
    for (strategy, each), texts in zip(calls, found, strict=True):
        assert all(("leave it out: step.update clears them" in text) == (each and strategy != "fsdp") for text in texts)
        assert each or texts == ["", ""]
