"""DeepSpeed under the same contract as every strategy: gradients, norms, updates and checkpoints, on real gloo ranks.

DeepSpeed keeps fp32 weights and reduces in fp32, so gradients are compared with one process in float64 up to what fp32
rounds: a few units in the last place of the largest element (`LIMIT`); a wrong factor would be off by a half or more.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.models import decoder, ragged_batches
from tests.worlds import WorldError, run_world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'shardwise[deepspeed]')",
)
STAGES = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
LIMIT = 5e-6
ROOT = Path(__file__).parents[2]
CLIP = 0.05
Weights = dict[str, torch.Tensor]


def plan_of(strategy: str, **options: Any) -> Plan:
    import torch.distributed as dist

    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), dist.get_world_size()), **options)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from shardwise.train.loss import token_loss_sum

    return token_loss_sum(outputs, labels)


def one_process(batches: list[Any], **options: bool) -> tuple[Weights, Weights, float, float]:
    """float64, without Shardwise: gradient, clipped gradient, norm, loss."""
    model = decoder(**options)
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    loss = sum(loss_of(model(inputs), labels) for inputs, labels in batches) / count
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    raw = {n: p.grad.clone() for n, p in trained.items()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return raw, {n: p.grad.clone() for n, p in trained.items()}, norm.item(), loss.item()


class Keeping:
    """An observer that keeps the whole gradients of a step."""

    def __init__(self) -> None:
        self.raw: Weights = {}

    def on_gradients(self, session: Any, step: Any) -> None:
        engine = session.applied.engine
        named = {name: engine.gradient(name) for name in engine.parameters}
        self.raw = {name: gradient for name, gradient in named.items() if gradient is not None}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def furthest(found: Weights, expected: Weights) -> float:
    """The largest error, over the largest element of the gradient of the whole model; a missing one is infinite."""
    scale = max(float(value.abs().max()) for value in expected.values())
    errors = [float((found[n].double() - v).abs().max()) if n in found else float("inf") for n, v in expected.items()]
    return max(errors) / scale


def contract(cases: list[tuple[str, int, dict[str, Any], str]]) -> list[str]:
    """Two steps of SGD with rate 1 for each case; the second window is short. Returns what was wrong."""
    import torch.distributed as dist

    from shardwise.run.start import start

    wrong = []
    for strategy, accum, variant, recompute in cases:
        world = dist.get_world_size()
        first, second = world * accum, max(1, world * accum - 1)
        drawn = ragged_batches(first + 1 + second)
        batches = drawn[:first] + drawn[first + 1 :]
        session = start(plan_of(strategy, grad_accum=accum, recompute=recompute), receipts=False)
        model = decoder(**variant).float()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        keeping = Keeping()
        session.observers.append(keeping)
        reference = decoder(**variant)
        for number, step in enumerate(session.steps(batches)):
            window = batches[:first] if number == 0 else batches[first:]
            before = dict(session.applied.engine.weights())
            raw, clipped, norm, loss = stepped(reference, window)
            step.run(model, loss_of)
            result = step.update(optimizer, clip_norm=CLIP)
            after = dict(session.applied.engine.weights())
            moved = {name: before[name] - after[name] for name in clipped}
            found = {
                "gradient": furthest(keeping.raw, raw),
                "update": furthest(moved, clipped),
                "norm": abs((result.grad_norm or 0.0) - norm) / norm,
                "loss": abs(result.loss - loss) / loss,
            }
            case = f"{strategy} x{accum} {variant} {recompute} step {number + 1}"
            limits = {"gradient": LIMIT, "update": 20 * LIMIT, "norm": LIMIT, "loss": LIMIT}  # weights are rounded, too
            wrong += [f"{case}: {what} off by {error:.1e}" for what, error in found.items() if not error < limits[what]]
            frozen = [n for n, p in reference.named_parameters() if not p.requires_grad]
            wrong += [f"{case}: {n} moved" for n in frozen if not torch.equal(before[n], after[n])]
        if session.steps_done != 2:
            wrong.append(f"{strategy}: {session.steps_done} steps")
        session.close()
    return wrong


def stepped(model: nn.Module, window: list[Any]) -> tuple[Weights, Weights, float, float]:
    """One step of the reference with rate 1, clipped; its gradients, norm and loss."""
    model.zero_grad()
    count = sum(int((labels != -100).sum()) for _, labels in window)
    loss = sum(loss_of(model(inputs), labels) for inputs, labels in window) / count
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    raw = {n: p.grad.clone() for n, p in trained.items()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    clipped = {n: p.grad.clone() for n, p in trained.items()}
    with torch.no_grad():
        for parameter in trained.values():
            parameter -= parameter.grad
    return raw, clipped, norm.item(), loss.item()


@pytest.mark.turns(3)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_gradient_and_the_update_are_those_of_one_process(world: int) -> None:
    stages = STAGES if world == 2 else STAGES[2:] if world == 3 else STAGES[:1]
    cases: list[Any] = [(stage, accum, {}, "none") for stage in stages for accum in (1, 2)]
    cases += [(stage, 2, {"tied": True, "frozen": True}, "full") for stage in stages]
    cases += [(f"{stage}+offload", 2, {"tied": True}, "none") for stage in stages]
    for wrong in run_world(contract, world, cases):
        assert not wrong, "\n".join(wrong)


def narrow(strategies: list[str]) -> dict[str, float]:
    """How far a bf16 gradient is from the one in float64, of the largest element; the norm that is told."""
    from shardwise.run.start import start

    found = {}
    batches = ragged_batches(4)
    raw, _, norm, _ = one_process(batches)
    for strategy in strategies:
        session = start(plan_of(strategy, grad_accum=2, precision="bf16"), receipts=False)
        model = decoder().float()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        keeping = Keeping()
        session.observers.append(keeping)
        start_weights = {name: value.double() for name, value in session.applied.engine.weights()}
        kept = all(torch.equal(start_weights[n], p.detach()) for n, p in decoder().float().double().named_parameters())
        for step in session.steps(batches):
            step.run(model, loss_of)
            result = step.update(optimizer, clip_norm=CLIP)
        found[strategy] = furthest(keeping.raw, raw) if kept else float("inf")
        found[f"{strategy} norm"] = abs((result.grad_norm or 0.0) - norm) / norm
        session.close()
    return found


def test_bf16_computes_narrow_and_keeps_the_fp32_weights_it_was_given() -> None:
    found = run_world(narrow, 2, [*STAGES, "deepspeed-zero1+offload"])[0]
    assert all(0 < error < 0.05 for error in found.values()), found  # bf16 has 8 bits


def round_trip(folder: str, saving: str, loading: list[str], precision: str) -> list[str]:
    """Save under one strategy after two steps; the next two are the same under another. Returns what was wrong."""
    from shardwise.run.start import start

    def run(strategy: str, first: int, save: bool) -> Weights:
        session = start(plan_of(strategy, grad_accum=2, precision=precision), receipts=False)
        model = decoder(frozen=True, tied=True).float()
        groups = [{"params": list(model.blocks.parameters()), "weight_decay": 0.1}]
        groups.append({"params": [model.embed.weight, model.scale], "lr": 0.02})
        model, optimizer = session.prepare(model, torch.optim.AdamW(groups, lr=0.01))
        if not save:
            assert session.load(folder) == {"note": 7}
        for step in session.steps(ragged_batches(16)[0 if save else 4 * first :]):
            step.run(model, loss_of)
            step.update(optimizer, clip_norm=1.0)
            if save and step.number == 2:
                session.save(folder, state={"note": 7})
        weights = full(session)
        session.close()
        return weights

    expected = run(saving, 0, True)
    wrong = []
    for strategy in loading:
        found = run(strategy, 0, False)
        if strategy == saving and not all(torch.equal(found[n], v) for n, v in expected.items()):
            wrong.append(f"{saving} did not go on bit for bit")
        error = furthest(found, {n: v.double() for n, v in expected.items()})
        if not error < (1e-5 if precision == "fp32" else 0.02):
            wrong.append(f"{saving} to {strategy}: off by {error:.1e}")
    return wrong


def full(session: Any) -> Weights:
    from torch.distributed.tensor import DTensor

    from shardwise.model.read import clean_name

    if session.applied.engine is not None:
        return {name: value.clone() for name, value in session.applied.engine.weights()}
    named = session.module.named_parameters()
    return {clean_name(n): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


@pytest.mark.turns(3)
@pytest.mark.parametrize("saving", ["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3+offload", "fsdp"])
def test_a_checkpoint_goes_on_bit_for_bit_and_under_any_other_strategy(saving: str, tmp_path: Path) -> None:
    others = {"fsdp": [*STAGES, "deepspeed-zero2+offload"]}.get(saving, [saving, "fsdp"])
    for wrong in run_world(round_trip, 2, str(tmp_path), saving, others, "fp32"):
        assert not wrong, "\n".join(wrong)


@pytest.mark.turns(3)
def test_under_bf16_the_fp32_weights_are_what_is_saved(tmp_path: Path) -> None:
    import json

    for stage in ("deepspeed-zero1", "deepspeed-zero3"):
        folder = tmp_path / stage
        for wrong in run_world(round_trip, 2, str(folder), stage, [stage, "fsdp"], "bf16"):
            assert not wrong, "\n".join(wrong)
        newest = sorted(folder.glob("step-*"))[-1]
        manifest = json.loads((newest / "manifest.json").read_text())
        dtypes = {entry["dtype"] for name, entry in manifest["tensors"].items() if name.startswith(("model", "opt"))}
        assert dtypes == {"F32"}


def other_world(folder: str, strategy: str, save: bool) -> Weights:
    from shardwise.run.start import start

    session = start(plan_of(strategy), receipts=False)
    model = decoder().float()
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if save:
        for step in session.steps(ragged_batches(6)):
            step.run(model, loss_of)
            step.update(optimizer)
        session.save(folder)
    else:
        session.load(folder)
    found = full(session)
    for name in session.applied.engine.parameters:
        found |= {f"{name}/{key}": value.clone() for key, value in session.applied.engine.states(name).items()}
    session.close()
    return found


@pytest.mark.turns(3)
def test_another_number_of_ranks_has_the_same_weights_and_states(tmp_path: Path) -> None:
    saved = run_world(other_world, 2, str(tmp_path), "deepspeed-zero3", True)[0]
    for world, strategy in ((3, "deepspeed-zero3"), (1, "deepspeed-zero2")):
        found = run_world(other_world, world, str(tmp_path), strategy, False)[0]
        assert found.keys() == saved.keys()
        steps = {name for name in found if name.endswith("/step")}
        assert steps and all(torch.equal(found[name], saved[name]) for name in saved)


def states_of(session: Any) -> Weights:
    engine = session.applied.engine
    return {f"{name}/{key}": v.clone() for name in engine.parameters for key, v in engine.states(name).items()}


def states_by_hash(folder: str) -> tuple[list[str], list[str]]:
    """The order that this process puts a set of keys in, and which states are others after a load, or once a rank has
    them in another order."""
    import torch.distributed as dist

    from shardwise.run.start import start

    wrong = []
    for strategy in STAGES:
        kept: list[Weights] = []
        for loads in (False, True):
            session = start(plan_of(strategy), receipts=False)
            model = decoder().float()
            model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            if loads:
                session.load(f"{folder}/{strategy}")
            else:
                for step in session.steps(ragged_batches(4)):
                    step.run(model, loss_of)
                    step.update(optimizer)
                session.save(f"{folder}/{strategy}")
            kept.append(states_of(session))
            if not loads and dist.get_rank() == 1:
                for flat, state in optimizer.state.items():
                    optimizer.state[flat] = dict(reversed(state.items()))
            kept += [] if loads else [states_of(session)]
            session.close()
        assert sum(name.endswith("/exp_avg") for name in kept[0]) == len(list(decoder().parameters()))
        for what, found in zip(("in another order", "after a load"), kept[1:], strict=True):
            wrong += [f"{strategy} {what}: {n}" for n, v in kept[0].items() if not torch.equal(v, found[n])]
    return list({"exp_avg", "exp_avg_sq"}), wrong


@pytest.mark.turns(3)
def test_states_are_gathered_alike_by_ranks_that_order_sets_differently(tmp_path: Path) -> None:
    """Strings hash differently in each process, so a set has its own order on each rank, as under any launcher."""
    code = "import sys; from tests.worlds import _rank_main; from tests.world import test_deepspeed_engine as here; "
    code += "_rank_main(int(sys.argv[1]), 2, sys.argv[2], here.states_by_hash, (sys.argv[2],))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        for rank, seed in enumerate("01")
    ]
    try:
        for process in processes:
            process.wait(120)
    finally:
        for process in processes:
            process.kill()
    assert not [file.read_text() for file in tmp_path.glob("*.err")]
    (first, wrong), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first != second, "the seeds of this test do not tell the ranks apart"
    assert not wrong, "\n".join(wrong)


def left_in_the_middle(strategy: str) -> float:
    """A loop that is left after one of two backwards; the next step's gradient, against one process."""
    from shardwise.run.start import start

    session = start(plan_of(strategy, grad_accum=2), receipts=False)
    model = decoder().float()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batches = ragged_batches(8)
    for step in session.steps(batches[4:]):
        for micro in step:
            step.backward(loss_of(model(micro.inputs), micro.labels))
            break
        break
    keeping = Keeping()
    session.observers.append(keeping)
    for step in session.steps(batches[:4]):
        step.run(model, loss_of)
        step.update(optimizer)
    session.close()
    return furthest(keeping.raw, one_process(batches[:4])[0])


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["deepspeed-zero2+offload", "deepspeed-zero3"])
def test_an_abandoned_step_leaves_nothing_behind(strategy: str) -> None:
    assert max(run_world(left_in_the_middle, 2, strategy)) < LIMIT


def one_step(kind: str, strategy: str) -> None:
    from shardwise.run.start import start

    session = start(plan_of(strategy), receipts=False)
    model: nn.Module = nn.Linear(4, 4)
    if kind == "bf16 weights":
        model = model.bfloat16()
    kinds = {"adagrad": torch.optim.Adagrad}
    model, optimizer = session.prepare(model, kinds.get(kind, torch.optim.SGD)(model.parameters(), lr=0.1))
    inputs = torch.ones(2, 4)
    if kind == "not a number":
        inputs[0, 0] = 1e38
    for step in session.steps([(inputs, torch.zeros(2, dtype=torch.int64))] * 2):
        for micro in step:
            out = model(micro.inputs)
            loss = (out * 1e30).square().sum() * 0 + out.sum() if kind == "not a number" else out.square().sum()
            step.backward(loss)
        step.update(optimizer)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("bf16 weights", "keeps fp32 weights with the optimizer, and the model has parameters of bfloat16"),
        ("adagrad", "rebuilds Adagrad"),
        ("not a number", "the loss is nan|the gradient norm is (nan|inf)"),
    ],
)
def test_what_deepspeed_would_get_wrong_is_refused(kind: str, said: str) -> None:
    with pytest.raises(WorldError, match=said):
        run_world(one_step, 2, kind, "deepspeed-zero3")
