"""Pipeline parallel against one process: gradients in float64, whatever the family, the schedule and the data."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import PlanError, UserError
from shardwise.model.read import clean_name
from shardwise.parallel.pipeline_parallel.schedule import check_pipeline
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.contract import LIMIT, Case, Still, Watch, ragged, train, worst
from tests.families import FAMILIES, VOCAB, family
from tests.turns import by_turns
from tests.worlds import WorldError, run_each, run_world

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "interleaved-zero-bubble": 2,
    "zbv": 2,
}


def options(schedule: str, **more: Any) -> dict[str, Any]:
    return {"pipeline_schedule": schedule, "virtual_stages": SCHEDULES[schedule], **more}


def are_right(*cases: Case) -> None:
    """All of one world size."""
    for case, found in zip(cases, run_each(train, cases[0].world, [(case,) for case in cases]), strict=True):
        wrong = {rank: result["worst"] for rank, result in enumerate(found) if not result["worst"][0] <= LIMIT}
        held = {name for result in found for name in result["names"]}
        assert (wrong, held ^ set(found[0]["expected"])) == ({}, set()), case


def test_every_family_over_two_stages() -> None:
    are_right(*(Case(2, "ddp+pp2", name, accum=4) for name in FAMILIES))


@pytest.mark.turns(1)
def test_more_ranks() -> None:
    cases = [
        Case(4, "ddp+pp2", "own", accum=3),
        Case(4, "zero2+pp2", "llama"),
        Case(4, "hsdp+pp2", "bert"),
        Case(4, "fsdp+pp4", "own", accum=5),
        Case(4, "ddp+pp4", "gpt2", accum=4, options=options("gpipe")),
        Case(4, "fsdp+offload+pp2", "own"),
        Case(4, "ddp+tp2+pp2", "llama", accum=4, options=options("interleaved-zero-bubble", loss_parallel=True)),
        Case(4, "ddp+tp2+pp2", "own", accum=4, options=options("zbv")),
        Case(4, "ddp+pp2+cp2", "llama", accum=4, options=options("interleaved-zero-bubble")),
    ]
    are_right(*by_turns(cases, 2, "more ranks"))


@pytest.mark.turns(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_every_schedule_is_right_or_refused(strategy: str) -> None:
    allowed = []
    for schedule in SCHEDULES:
        case = Case(4, f"{strategy}+pp2", "own", accum=4, options=options(schedule))
        if strategy == "fsdp" and schedule in ("interleaved-zero-bubble", "zbv"):
            with pytest.raises(PlanError, match=r"zero2\+pp2"):
                check_pipeline(case.plan, 4)
        else:
            check_pipeline(case.plan, 4)
            allowed.append(case)
    are_right(*by_turns(allowed, 2, strategy))


def test_recompute_is_right_or_refused() -> None:
    allowed = []
    for schedule, recompute in itertools.product(
        ("1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"), ("full", "selective")
    ):
        strategy = "fsdp+pp2" if schedule.endswith("1f1b") else "zero2+pp2"
        case = Case(2, strategy, "own", 4, options(schedule, recompute=recompute))
        if schedule.endswith("1f1b"):
            allowed.append(case)
            continue
        with pytest.raises(PlanError, match="set recompute to none"):
            check_pipeline(case.plan, 4)
    are_right(*allowed)


def test_tied_embedding_over_one_data_rank() -> None:
    schedules = ("1f1b", "interleaved-zero-bubble", "zbv")
    are_right(*(Case(2, "ddp+pp2", "gpt2", accum=4, options=options(schedule)) for schedule in schedules))


def test_tied_embedding_that_one_rank_would_hold_twice_is_refused() -> None:
    with pytest.raises(WorldError, match="use interleaved-zero-bubble"):
        run_world(train, 4, Case(4, "ddp+pp2", "gemma", accum=4, options=options("zbv")))
    are_right(Case(4, "ddp+pp2", "gemma", accum=4, options=options("interleaved-zero-bubble")))


def test_a_window_that_the_schedule_cannot_run_is_filled_up() -> None:
    are_right(Case(2, "ddp+pp2", "own", accum=10, options=options("interleaved-1f1b")))  # the partial window has 5


class Head(nn.Module):
    """Says which parts of a model are trained."""

    def __init__(self, model: nn.Module, trained: list[str]) -> None:
        super().__init__()
        self.model = model
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(name.startswith(part) for part in trained))


def frozen(strategy: str, schedule: str, trained: list[str]) -> tuple[float, str]:
    world = torch.distributed.get_world_size()
    dims = dims_for(parse_strategy(strategy), world)
    plan = Plan(strategy=strategy, dims=dims, grad_accum=4, **options(schedule))
    batches, watch = ragged(4 * dims.dp), Watch()
    model = Head(family("own"), trained).model
    session = start(plan, receipts=False)
    session.observers.append(watch)
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0), batches[0][0])
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1e9)
    session.close()
    alone = Head(family("own"), trained).model
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    sum(token_loss_sum(alone(inputs), labels) / count for inputs, labels in batches).backward()
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    mine = {clean_name(n) for n, p in session_names(model) if p.requires_grad}
    assert set(watch.raw) == mine, (set(watch.raw), mine)
    return worst(watch.raw, expected)


def session_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_frozen_stages() -> None:
    two = [
        ("ddp+pp2", "1f1b", ["blocks.3", "head"]),
        ("ddp+pp2", "1f1b", ["tokens", "blocks.0"]),
        ("ddp+pp2", "zbv", ["tokens", "blocks.0"]),
    ]
    four = [
        ("fsdp+pp2", "1f1b", ["blocks.3", "head"]),
        ("fsdp+pp2", "1f1b", ["tokens", "blocks.0"]),
        ("zero2+pp2", "interleaved-zero-bubble", ["blocks.3", "head"]),
        ("zero2+pp2", "interleaved-zero-bubble", ["blocks.1", "head"]),
    ]
    for world, calls in ((2, two), (4, four)):
        for call, found in zip(calls, run_each(frozen, world, calls), strict=True):
            for error, name in found:
                assert error <= LIMIT, (call, name)


def shapes_and_evaluation(schedule: str) -> list[tuple[float, str]]:
    """Micro batches of every size and length in one run, evaluations in between."""
    plan = Plan(strategy="ddp+pp2", dims=dims_for(parse_strategy("ddp+pp2"), 2), grad_accum=4, **options(schedule))
    generator = torch.Generator().manual_seed(5)
    batches = []
    for samples, length in [(2, 8), (1, 5), (3, 9), (2, 8), (1, 5), (1, 5), (4, 12), (2, 8), (3, 7), (1, 2)]:
        ids = torch.randint(VOCAB, (samples, length + 1), generator=generator)
        batches.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    session, watch = start(plan, receipts=False), Watch()
    session.observers.append(watch)
    model = family("own")
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    errors, alone = [], family("own")
    pipeline = session.applied.pipeline
    assert pipeline is not None

    def evaluate(chosen: list[Any]) -> None:
        found = pipeline.evaluate([b[0] for b in chosen], [b[1] for b in chosen], token_loss_sum)
        torch.distributed.all_reduce(found)
        with torch.no_grad():
            expected = sum(float(token_loss_sum(alone(inputs), labels)) for inputs, labels in chosen)
        errors.append((abs(float(found) - expected) / expected, "evaluation"))

    evaluate(batches[:1])
    for index, step in enumerate(session.steps(batches)):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1e9)
        mine = batches[4 * index : 4 * index + 4]
        alone.zero_grad()
        count = sum(labels.numel() for _, labels in mine)
        sum(token_loss_sum(alone(inputs), labels) / count for inputs, labels in mine).backward()
        errors.append(worst(watch.raw, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}))
        model.eval()
        evaluate(batches[index : index + 3])
        model.train()
    session.close()
    return errors


def test_micro_batches_of_any_shape_and_evaluation_between_steps() -> None:
    found = run_each(shapes_and_evaluation, 2, [(schedule,) for schedule in SCHEDULES])
    for schedule, ranks in zip(SCHEDULES, found, strict=True):
        for errors in ranks:
            assert len(errors) == 7, schedule
            assert max(errors)[0] <= LIMIT, (schedule, errors)


def narrow(strategy: str, schedule: str = "1f1b", accum: int = 2) -> tuple[Any, Any]:
    """Gradients of one step in bf16, and those of one process in fp32."""
    dims = dims_for(parse_strategy(strategy), torch.distributed.get_world_size())
    plan = Plan(strategy=strategy, dims=dims, grad_accum=accum, precision="bf16", **options(schedule))
    batches, watch = ragged(accum * plan.dims.dp), Watch()
    session = start(plan, receipts=False)
    session.observers.append(watch)
    model = family("llama", dtype=torch.float32)
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    for step in session.steps(batches):
        step.run(model, token_loss_sum)
        step.update(optimizer, clip_norm=1e9)
    session.close()
    alone = family("llama", dtype=torch.float32)
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    sum(token_loss_sum(alone(inputs), labels) / count for inputs, labels in batches).backward()
    assert all(value.dtype == torch.float32 for value in watch.raw.values())
    return watch.raw, {name: p.grad for name, p in alone.named_parameters()}


def difference(found: Any, expected: Any) -> float:
    return max(float((value - expected[name]).norm() / expected[name].norm()) for name, value in found.items())


@pytest.mark.turns(3)
@pytest.mark.parametrize(("strategy", "world"), [("ddp+pp2", 2), ("ddp+pp2", 4), ("fsdp+pp2", 4)])
def test_bf16_is_close(strategy: str, world: int) -> None:
    for found, expected in run_world(narrow, world, strategy):
        assert 1e-5 < difference(found, expected) < 0.05


def test_bf16_gradients_add_up_in_fp32_when_the_backward_is_split() -> None:
    full: dict[str, torch.Tensor] = {}
    plain, split = run_each(narrow, 2, [("zero2+pp2", "1f1b", 8), ("zero2+pp2", "zbv", 8)])
    for found, _ in plain:
        full |= found
    for found, _ in split:
        assert difference(found, full) < 1e-5


def around() -> dict[str, Any]:
    """What surrounds the model: attributes, calls, spans, a loss that is wrong."""
    plan = Plan(strategy="ddp+pp2", dims=dims_for(parse_strategy("ddp+pp2"), 2), grad_accum=2)
    session, batches = start(plan, receipts=False), ragged(6)
    model = family("llama")
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    found: dict[str, Any] = {"hidden": model.config.hidden_size}
    with pytest.raises(UserError, match=r"step\.run"):
        model(batches[0][0])
    pipeline = session.applied.pipeline
    assert pipeline is not None
    pipeline.spans = []
    steps = iter(session.steps(batches))
    step = next(steps)
    with pytest.raises(UserError, match=r"step\.run"):
        next(iter(step))
    step.run(model, token_loss_sum)
    step.update(optimizer)
    found["spans"] = [(span.stage, span.kind, span.micro, span.end_s > span.start_s) for span in pipeline.spans]
    found["names"] = [name for name, _ in model.named_parameters()]
    session.close()
    return found


def test_what_surrounds_the_model() -> None:
    first, last = run_world(around, 2)
    assert first["hidden"] == last["hidden"] == 32
    assert first["spans"] == [
        (0, "forward", 0, True),
        (0, "forward", 1, True),
        (0, "backward", 0, True),
        (0, "backward", 1, True),
    ]
    assert [kind for _, kind, _, _ in last["spans"]] == ["forward", "backward"] * 2
    assert all(name.startswith("_stage_0.model.") for name in first["names"])
    assert "_stage_1.lm_head.weight" in last["names"]
    assert {name[9:] for name in first["names"]}.isdisjoint(name[9:] for name in last["names"])


def mistaken(kind: str) -> None:
    plan = Plan(strategy="ddp+pp2", dims=dims_for(parse_strategy("ddp+pp2"), 2), grad_accum=2)
    session = start(plan, receipts=False)
    model = family("own")
    model, _ = session.prepare(model, Still(model.parameters(), lr=0.0))
    losses = {
        "mean": lambda outputs, labels: nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten()),
        "shape": lambda outputs, labels: outputs.sum(0),
        "detached": lambda outputs, labels: outputs.detach().sum(),
        "raises": lambda outputs, labels: outputs.no_such_thing,
    }
    for step in session.steps(ragged(2)):
        step.run(model, losses[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [("mean", "pass the sum"), ("shape", "0-d"), ("detached", "does not depend"), ("raises", "no_such_thing")],
)
def test_a_loss_that_is_wrong_ends_all_ranks_at_once(kind: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorldError, match=message):
        run_world(mistaken, 2, kind)
    assert time.monotonic() - began < 60


def other_samples() -> None:
    plan = Plan(strategy="ddp+pp2", dims=dims_for(parse_strategy("ddp+pp2"), 2), grad_accum=2)
    session, model = start(plan, receipts=False), family("own")
    model, _ = session.prepare(model, Still(model.parameters(), lr=0.0))
    for step in session.steps(ragged(2, seed=torch.distributed.get_rank())):
        step.run(model, token_loss_sum)


def test_stages_that_got_other_samples_are_told_so() -> None:
    with pytest.raises(WorldError, match=r"ranks 0 and 1 must see the same samples under ddp\+pp2"):
        run_world(other_samples, 2)


def frozen_later() -> None:
    plan = Plan(strategy="ddp+pp2", dims=dims_for(parse_strategy("ddp+pp2"), 2), grad_accum=2)
    session, model = start(plan, receipts=False), family("own")
    model, optimizer = session.prepare(model, Still(model.parameters(), lr=0.0))
    for step in session.steps(ragged(4)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
        if session.place.pp == 0:
            model.requires_grad_(False)


def test_freezing_a_stage_later_is_refused_and_does_not_hang() -> None:
    with pytest.raises(WorldError, match=r"requires_grad may not change after session\.prepare"):
        run_world(frozen_later, 2)


def plan_of(**given: Any) -> Plan:
    strategy = given.pop("strategy", "ddp+pp2")
    parsed = parse_strategy(strategy)
    return Plan(strategy=strategy, dims=dims_for(parsed, 2 * parsed.pp), **given)


@pytest.mark.parametrize(
    ("given", "blocks", "message"),
    [
        ({"virtual_stages": 2}, 4, "1f1b needs virtual_stages 1, got 2; set it to 1"),
        ({"pipeline_schedule": "zbv", "virtual_stages": 3}, 8, "zbv needs virtual_stages 2, got 3"),
        ({"pipeline_schedule": "interleaved-1f1b"}, 8, "interleaved-1f1b needs virtual_stages 2 or more, got 1"),
        ({"strategy": "ddp+pp4"}, 3, r"pp 4 stages need as many blocks, and the model has 3; use \+pp3"),
        ({**options("interleaved-1f1b"), "strategy": "ddp+pp4"}, 6, r"pp 4 × virtual_stages 2 = 8 .* use \+pp3"),
        (
            {**options("interleaved-1f1b"), "grad_accum": 7},
            8,
            "cannot run 7 micro batches a step; set grad_accum to 6 or 8",
        ),
        ({**options("zbv"), "strategy": "fsdp+pp2"}, 8, r"use zero2\+pp2"),
        ({**options("zbv"), "strategy": "hsdp+pp2"}, 8, r"use zero2\+pp2"),
        ({**options("zbv"), "compile": True}, 8, "compile to false"),
        ({**options("interleaved-zero-bubble"), "recompute": "selective"}, 8, "recompute to none"),
    ],
)
def test_plans_that_cannot_be_are_refused_with_what_works(given: dict[str, Any], blocks: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_pipeline(plan_of(**given), blocks)
