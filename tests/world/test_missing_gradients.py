"""Models that decide by their samples what runs: a gradient that a rank lacks counts as zero, as in one process.

Weights after several steps with momentum are compared, in float64, with those of one process over the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.errors import ModelError, TrainingError, UserError
from shardwise.model.read import clean_name
from shardwise.parallel.data_parallel.unit_order import UnitOrder, orders_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.session import Session
from tests.contract import both_here, here
from tests.kept import kept
from tests.worlds import run_world

WIDTH, VOCAB, STEPS, LIMIT = 8, 11, 4, 1e-12
Batch = tuple[tuple[torch.Tensor, int], torch.Tensor]


class Expert(nn.Module):
    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@dataclass
class Box:
    hidden: torch.Tensor


class Boxed(Expert):
    def forward(self, x: torch.Tensor) -> Box:
        return Box(super().forward(x))


class Routed(nn.Module):
    """A layer with two experts of equal or of other sizes; ``route`` 2 enters both."""

    def __init__(self, uneven: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleDict({str(i): Expert(16 + uneven * 8 * i) for i in range(2)})

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        gates, out = torch.sigmoid(self.gate(x)), x
        for i in range(2):
            if route in (i, 2):
                out = out + self.experts[str(i)](x) * gates[..., i : i + 1]
        return out


class Model(nn.Module):
    """``kind`` says what a sample decides; `run` is between embedding and head. ``never`` takes no part in any loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head, self.never = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), nn.Linear(3, 3)
        if kind in ("experts in layers", "uneven experts"):
            self.blocks = nn.ModuleList(Routed(int(kind == "uneven experts")) for _ in range(3))
        else:
            expert = Boxed if kind == "dataclass blocks" else Expert
            self.blocks = nn.ModuleList(expert() for _ in range(4))

    def forward(self, ids: torch.Tensor, route: int) -> torch.Tensor:
        return self.head(getattr(self, f"run_{self.kind.replace(' ', '_')}")(self.embed(ids), route))

    def run_experts_in_layers(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, route)
        return x

    run_uneven_experts = run_experts_in_layers

    def run_experts_as_blocks(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return x + sum(block(x) for i, block in enumerate(self.blocks) if (route + i) % 3 or route == 2)

    def run_early_exit(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if route == 1 and i == 3:
                break
            if route != 0 or i != 1:  # and layer drop
                x = x + block(x)
        return x

    def run_detached_rest(self, x: torch.Tensor, route: int) -> torch.Tensor:
        states = []
        for block in self.blocks:
            x = x + block(x)
            states.append(x)
        return states[route]

    def run_skips_all(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for block in self.blocks if route != 1 else ():
            x = x + block(x)
        return x

    def run_inputs_without_gradients(self, x: torch.Tensor, route: int) -> torch.Tensor:
        x = x.detach() if route == 1 else x
        for block in self.blocks:
            x = x + block(x)
        return x

    def run_dataclass_blocks(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if route != i % 2:
                x = x + block(x).hidden
        return x

    def run_shared_blocks(self, x: torch.Tensor, route: int) -> torch.Tensor:
        for _ in range(3):
            for block in self.blocks[:2]:
                x = x + block(x)
        return x


KINDS = (
    "experts in layers",
    "uneven experts",
    "experts as blocks",
    "early exit",
    "detached rest",
    "skips all",
    "inputs without gradients",
    "dataclass blocks",
    "shared blocks",
)


def batches(dp: int, accum: int, alike: int, extra: int = 0) -> list[Batch]:
    """Micro batches whose routes are alike on all ranks in the first ``alike`` steps, and then are not."""
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        for micro in range(accum):
            for rank in range(dp):
                ids, labels = torch.randint(VOCAB, (2, 2, 5), generator=generator)
                same, apart = 2, rank % 2 if step < 3 else (rank + micro + step + 1) % 3
                found.append(((ids, same if step < alike else apart), labels))
    return found[: len(found) - extra]


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")


def model_and_optimizer(kind: str, adam: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(kind).double()
    if adam:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def one_process(kind: str, dp: int, accum: int, alike: int, adam: bool) -> dict[str, torch.Tensor]:
    case = (kind, dp, accum, alike, adam)
    return kept(("missing gradients", *case), lambda: _one_process(*case))


def _one_process(kind: str, dp: int, accum: int, alike: int, adam: bool) -> dict[str, torch.Tensor]:
    model, optimizer = model_and_optimizer(kind, adam)
    data, size = batches(dp, accum, alike), dp * accum
    for at in range(0, len(data), size):
        window = data[at : at + size]
        optimizer.zero_grad()
        (sum(loss_of(model(*i), y) for i, y in window) / sum(y.numel() for _, y in window)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def error_of(plan: Plan, kind: str, alike: int, adam: bool, *, strict: bool = True) -> float:
    """The largest difference in this rank's part of a weight after all steps; receipts must hold, too."""
    session = start(plan, receipts=False)
    probe = EffectsRecorder(strict=strict)
    session.observers.append(probe)
    model, optimizer = session.prepare(*model_and_optimizer(kind, adam))
    for step in session.steps(batches(plan.dims.dp, plan.grad_accum, alike)):
        for micro in step:
            step.backward(loss_of(model(*micro.inputs), micro.labels))
        step.update(optimizer)
    expected = one_process(kind, plan.dims.dp, plan.grad_accum, alike, adam)
    assert probe.receipt is not None
    return difference(session, expected)


def difference(session: Session, expected: dict[str, torch.Tensor]) -> float:
    """The largest, in this rank's part of a weight."""
    worst = 0.0
    for name, parameter in session.module.named_parameters():
        mine, theirs = both_here(here(parameter.detach()), expected[clean_name(name)])
        assert mine.shape == theirs.shape, name
        if mine.numel():
            worst = max(worst, float((mine - theirs).abs().max().nan_to_num(float("inf"))))
    return worst


def plan_of(strategy: str, world: int, accum: int = 1, **options: Any) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world), grad_accum=accum, **options)


WAYS: tuple[tuple[int, int, bool, dict[str, Any]], ...] = (
    (1, 1, False, {}),
    (2, 0, True, {}),
    (2, 2, False, {"recompute": "full"}),
)


def ways(strategy: str, kind: str) -> tuple[tuple[int, int, bool, dict[str, Any]], ...]:
    """All of them under ddp and fsdp; under the others, which share their code, each kind has one, by turns."""
    turn = (KINDS.index(kind) + ("zero1", "zero2", "hsdp", "ddp", "fsdp").index(strategy)) % 3
    return WAYS if strategy in ("ddp", "fsdp") else WAYS[turn : turn + 1]


def errors(strategies: tuple[str, ...], world: int) -> dict[str, float]:
    found = {}
    for strategy in strategies:
        for kind in KINDS:
            for accum, alike, adam, options in ways(strategy, kind):
                plan = plan_of(strategy, world, accum, **options)
                found[f"{strategy}, {kind}, x{accum}, alike {alike}"] = error_of(plan, kind, alike, adam)
    return found


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, ("ddp", "fsdp")),
        pytest.param(2, ("zero1", "zero2"), marks=pytest.mark.turns(3)),
        pytest.param(4, ("hsdp",), marks=pytest.mark.turns(3)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_weights_are_those_of_one_process(world: int, strategies: tuple[str, ...]) -> None:
    for found in run_world(errors, world, strategies, world):
        assert len(found) == sum(len(ways(strategy, kind)) for strategy in strategies for kind in KINDS)
        assert {case: error for case, error in found.items() if error > LIMIT} == {}


class Plain(nn.Module):
    """Nothing depends on samples; `loss` is a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self.forward(ids).sum()


def run(strategy: str, body: Callable[[Session, nn.Module, Any, Any], None], steps: int = 2) -> str:
    """One session over `Plain`; ``body`` does a step. Returns what was raised."""
    torch.manual_seed(0)
    module = Plain().double()
    session = start(strategy, receipts=False)
    model, optimizer = session.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    data = [(torch.full((2, 5), i % VOCAB), torch.zeros(2, 5, dtype=torch.int64)) for i in range(2 * steps)]
    try:
        for step in session.steps(data):
            body(session, model, optimizer, step)
    except (UserError, TrainingError) as error:
        return str(error)
    return ""


def ordinary(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    for micro in step:
        step.backward(loss_of(model(micro.inputs), micro.labels))
    step.update(optimizer)


def by_a_method(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    for micro in step:
        step.backward(model.loss(micro.inputs))
    step.update(optimizer)


def by_a_block(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    for _ in step:
        step.backward(session.module.blocks[0](torch.ones(2, WIDTH, dtype=torch.float64)).sum())
    step.update(optimizer)


def evaluated_on_rank_0(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    ordinary(session, model, optimizer, step)
    if session.ranks.is_main:
        with torch.no_grad():
            model(torch.zeros(2, 5, dtype=torch.int64))


def saved_on_rank_0(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    ordinary(session, model, optimizer, step)
    if session.ranks.is_main:
        session.save("never written")


def twice_on_rank_0(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    for micro in step:
        loss = loss_of(model(micro.inputs), micro.labels)
        if session.ranks.is_main:
            loss = loss + model(micro.inputs).sum()
        step.backward(loss)
    step.update(optimizer)


def evaluated_in_the_step_on_rank_0(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    for micro in step:
        loss = loss_of(model(micro.inputs), micro.labels)
        if session.ranks.is_main:
            with torch.no_grad():
                model(micro.inputs)
        step.backward(loss)
    step.update(optimizer)


def evaluated_on_all(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    ordinary(session, model, optimizer, step)
    with torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.int64))


def out_of_order(session: Session, model: nn.Module, optimizer: Any, step: Any) -> None:
    """One rank's reductions come in another order than the other's, as the record of them says."""
    if session.ranks.rank and step.number == 2:
        for order in orders_of(session.applied.outer):
            order._note = lambda unit, mask, order=order: order._events.append((unit.index % 2, mask))
    ordinary(session, model, optimizer, step)


def sentences() -> dict[str, str]:
    found = {}
    for body in (by_a_method, by_a_block):
        for strategy in ("ddp", "zero1", "fsdp"):
            found[f"{body.__name__} {strategy}"] = run(strategy, body)
    for strategy in ("ddp", "fsdp", "zero2"):
        found[f"all {strategy}"] = run(strategy, evaluated_on_all)
        found[f"one {strategy}"] = run(strategy, evaluated_on_rank_0)
        found[f"twice {strategy}"] = run(strategy, twice_on_rank_0)
        found[f"inside {strategy}"] = run(strategy, evaluated_in_the_step_on_rank_0)
        found[f"save {strategy}"] = run(strategy, saved_on_rank_0)
    found["order"] = run("fsdp", out_of_order)
    return found


def test_each_mistake_has_its_sentence_on_all_ranks() -> None:
    everyone = run_world(sentences, 2)
    for found in everyone:
        for strategy in ("ddp", "zero1"):
            assert "the prepared model was not called" in found[f"by_a_method {strategy}"]
            assert "the prepared model was not called" in found[f"by_a_block {strategy}"]
        assert "'Embedding' was called by itself" in found["by_a_method fsdp"]
        assert "'blocks.0' was called by itself" in found["by_a_block fsdp"]
        assert [found[f"all {strategy}"] for strategy in ("ddp", "fsdp", "zero2")] == [""] * 3
        for strategy in ("ddp", "fsdp", "zero2"):
            assert "rank 0 at session.save, rank 1 at the start of a step" in found[f"save {strategy}"]
        for strategy in ("fsdp", "zero2"):
            assert "rank 0 at a forward of a step, rank 1 at step.backward" in found[f"twice {strategy}"]
            assert "rank 0 at an evaluation, rank 1 at step.backward" in found[f"inside {strategy}"]
        assert found["inside ddp"] == found["one ddp"] == ""  # whole weights: rank 0 needs nobody
        for strategy in ("fsdp", "zero2"):
            assert "rank 0 at an evaluation, rank 1 at the start of a step" in found[f"one {strategy}"]
        assert "ranks 0 and 1 reduced other gradients under fsdp" in found["order"]
        assert "no weight was changed" in found["order"]


def without_zeros() -> dict[str, float]:
    """What the check of order is for: without zeros, gradients of different experts would be added up."""
    UnitOrder._fill = lambda self, unit: sum(  # type: ignore[method-assign]
        1 << at for at, p in enumerate(unit.group.fsdp_params) if p._unsharded_param.grad is not None
    )
    try:
        return {"": error_of(plan_of("fsdp", 2), "experts in layers", 2, False, strict=False)}
    except TrainingError as error:
        return {str(error): 0.0}


def test_a_reduction_without_the_zeros_is_stopped() -> None:
    (text,) = run_world(without_zeros, 2)[0]
    assert "ranks 0 and 1 reduced other gradients" in text


def others(strategy: str) -> dict[str, float | str]:
    """A last window that not all ranks have data for; a parameter that is frozen on the way; two losses, one used."""
    return {
        "filler": _run_beside(strategy, extra=1),
        "frozen": _run_beside(strategy, freeze="embed"),
        "pair": _run_beside(strategy, twice=True),
        "penalty": _run_beside(strategy, penalty=True),
    }


def _run_beside(
    strategy: str,
    *,
    kind: str = "experts in layers",
    extra: int = 0,
    freeze: str = "",
    twice: bool = False,
    penalty: bool = False,
) -> float | str:
    one, plain = model_and_optimizer(kind, False)
    model, optimizer = model_and_optimizer(kind, False)
    session = start(strategy, receipts=False)
    model, optimizer = session.prepare(model, optimizer)
    dp = session.dp
    data = batches(dp, 1, 2, extra)

    def loss(model: nn.Module, inputs: Any, labels: torch.Tensor, rank: int) -> torch.Tensor:
        found = loss_of(model(*inputs), labels)
        if twice:  # every rank calls the model twice, and one uses both
            second = loss_of(model(inputs[0].flip(0), inputs[1]), labels)
            found = found + second if rank == 0 else found
        if penalty:
            parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
            found = found + sum(part.square().sum() for part in parts)
        return found

    try:
        for step in session.steps(data):
            for index, micro in enumerate(step):
                step.backward(loss(model, micro.inputs, micro.labels, session.ranks.rank), count=micro.num_tokens)
                assert not index
            window = data[dp * step.number - dp : dp * step.number]
            plain.zero_grad()
            total = sum(loss(one, *pair, rank) for rank, pair in enumerate(window))
            (total / sum(labels.numel() for _, labels in window)).backward()
            step.update(optimizer)
            plain.step()
            if freeze and step.number == 3:
                for each in (one, session.module):
                    each.get_submodule(freeze).requires_grad_(False)
    except (UserError, TrainingError, ModelError) as error:
        return str(error)
    return difference(session, {name: p.detach() for name, p in one.named_parameters()})


def fillers(strategies: tuple[str, ...], extra: int) -> dict[str, float | str]:
    """The last window lacks batches of some ranks, for each kind of model."""
    return {
        f"{strategy}, {kind}": _run_beside(strategy, kind=kind, extra=extra)
        for strategy in strategies
        for kind in filled(strategy)
    }


def filled(strategy: str) -> tuple[str, ...]:
    """The kinds of models whose last window has fillers; zero1 and hsdp have every other one, by turns."""
    return {"zero1": KINDS[::2], "hsdp": KINDS[1::2]}.get(strategy, KINDS)


@pytest.mark.parametrize(
    ("world", "strategies", "extra"),
    [
        (4, ("fsdp",), 3),
        pytest.param(4, ("zero1", "hsdp"), 3, marks=pytest.mark.turns(3)),
        pytest.param(2, ("fsdp+offload",), 1, marks=pytest.mark.turns(3)),
    ],
)
def test_a_last_window_with_fillers(world: int, strategies: tuple[str, ...], extra: int) -> None:
    for found in run_world(fillers, world, strategies, extra):
        assert len(found) == sum(len(filled(strategy)) for strategy in strategies)
        assert {case: error for case, error in found.items() if isinstance(error, str) or error > LIMIT} == {}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_fillers_frozen_weights_two_forwards_and_penalties(strategy: str) -> None:
    for found in run_world(others, 2, strategy):
        for case in ("filler", "frozen", "pair"):
            assert found[case] < LIMIT, (case, found[case])
        if strategy == "fsdp":  # under zero2 weights are whole until the backward
            assert "blocks." in found["penalty"].partition(":")[0]
            assert "the loss uses sharded weights outside of the forward of their block" in found["penalty"]
        else:
            assert found["penalty"] < LIMIT
