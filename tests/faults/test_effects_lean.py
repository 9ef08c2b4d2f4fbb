"""The effects receipt on lean optimizers: each option that did not take effect makes a line false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardwise.optim.adamw8bit as adamw8bit_module
import shardwise.train.session as session_module
from shardwise.distributed.local_tensor import local_of
from shardwise.optim.adafactor import Adafactor
from shardwise.optim.adamw8bit import AdamW8bit
from shardwise.optim.in_backward import InBackward
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.receipts.effects import EffectsRecorder
from shardwise.receipts.lines.optimizer_lines import OptimizerRecorder, stepping_lines
from shardwise.run.start import start
from shardwise.train.hooks import ParameterHooks
from shardwise.train.loss import token_loss_sum
from tests.models import ragged_batches
from tests.world.test_lean_optimizers import shapes
from tests.worlds import run_world


def run(
    make: Callable[[Any], Any], strategy: str = "fsdp", after: Callable[[Any], None] | None = None, **plan: Any
) -> Any:
    """Three steps; the names of the receipt's false lines."""
    dims = dims_for(parse_strategy(strategy), dist.get_world_size())
    session = start(Plan(strategy=strategy, dims=dims, **plan), device="cpu", receipts=False)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = shapes()
    model, optimizer = session.prepare(model, make(model.parameters()))
    if after is not None:
        after(session)
    for step in session.steps(ragged_batches(3 * session.ranks.world_size)):
        for micro in step:
            step.backward(token_loss_sum(model(micro.inputs), micro.labels))
        step.update(optimizer)
    assert probe.receipt is not None
    session.close()
    return {line.name for line in probe.receipt.lines if line.ok is False}


def fused(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, fused=True)


def steps_after_all() -> Any:
    """``optimizer_in_backward`` was planned, and the optimizer steps at the end."""

    def after(session: Any) -> None:
        session.in_backward.remove()
        session.in_backward = None

    return run(fused, after=after, optimizer_in_backward=True)


def keeps_gradients() -> Any:
    """It steps in the backward, and gradients stay."""

    def step(self: InBackward, parameter: Any) -> None:
        kept = parameter.grad
        full(self, parameter)
        parameter.grad = kept

    full, InBackward._step = InBackward._step, step  # type: ignore[method-assign]
    return run(fused, optimizer_in_backward=True)


def misses_some() -> Any:
    """All but the first are stepped never, and their gradients stay."""

    def step(self: InBackward, parameter: Any) -> None:
        if not self.stepped:
            full(self, parameter)

    full, InBackward._step = InBackward._step, step  # type: ignore[method-assign]
    return run(fused, optimizer_in_backward=True)


def steps_unasked() -> Any:
    """Nothing was planned, and the backward steps."""

    def after(session: Any) -> None:
        session.in_backward = InBackward(session.optimizer)
        watch = next(one for one in session.observers if isinstance(one, ParameterHooks))
        session.observers.remove(watch)  # it refuses these hooks as a user's, in the first step
        session.header.remove(watch)

    return run(fused, after=after)


def eight_bits_are_32() -> Any:
    adamw8bit_module.is_quantized = lambda parameter: False
    return run(AdamW8bit)


class Fat(Adafactor):
    """It keeps the second moment of each element beside those of rows and columns."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter, state in self.state.items():
            state["exp_avg_sq"] = torch.zeros_like(parameter)


def state_is_not_factored() -> Any:
    return run(Fat)


def sums_are_of_one_rank() -> Any:
    """Each rank takes its part for the whole: no column sum over the ranks."""

    def step(self: Adafactor, parameter: torch.Tensor, *rest: Any) -> None:
        if local_of(parameter).numel():
            full(self, parameter, *rest)

    full, Adafactor._step_whole = Adafactor._step_whole, step  # type: ignore[method-assign]
    Adafactor.sharing = staticmethod(lambda parameter: None)  # type: ignore[method-assign]
    session_module.check_optimizer = lambda *_: None  # its trial would stop this before the first step
    return run(Adafactor)


def all_of_them() -> dict[str, Any]:
    cases = (steps_after_all, steps_unasked, eight_bits_are_32)
    found = {}
    for case in cases:
        found[case.__name__] = case()
        adamw8bit_module.is_quantized = IS_QUANTISED
    return found | {
        "clean": [
            run(make, optimizer_in_backward=early) for make in (fused, AdamW8bit, Adafactor) for early in (True, False)
        ]
    }


IS_QUANTISED = adamw8bit_module.is_quantized


def test_each_is_seen() -> None:
    for found in run_world(all_of_them, 2):
        assert found["clean"] == [set()] * 6
        assert found["steps_after_all"] == {"gradients held", "stepped during backward"}
        assert found["steps_unasked"] >= {"gradients held", "stepped during backward"}
        assert found["eight_bits_are_32"] == {"optimizer state dtype", "optimizer state held"}


def test_gradients_that_stay_are_seen() -> None:
    assert all(found == {"gradients held"} for found in run_world(keeps_gradients, 2))


def test_a_parameter_that_is_missed_is_seen() -> None:
    assert all(found >= {"gradients held", "stepped during backward"} for found in run_world(misses_some, 2))


def test_state_that_is_not_factored_is_seen() -> None:
    assert all("optimizer state held" in found for found in run_world(state_is_not_factored, 2))


def test_sums_of_one_rank_alone_are_seen() -> None:
    assert all("all_reduce per step" in found for found in run_world(sums_are_of_one_rank, 2))


def stepped_elsewhere() -> list[bool | None]:
    """``+offload`` was planned, and the optimizer steps on a GPU: as the line judges what the watch has seen."""
    dims = dims_for(parse_strategy("fsdp+offload"), 1)
    session = start(Plan(strategy="fsdp+offload", dims=dims), device="cpu", receipts=False)
    model = shapes()
    session.prepare(model, fused(model.parameters()))
    watch = OptimizerRecorder(session)
    for parameter in session.module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    session.optimizer.step()
    verdicts = [next(iter(stepping_lines(session, watch))).ok]
    watch.devices.add("cuda")
    verdicts.append(next(iter(stepping_lines(session, watch))).ok)
    session_module.leave(session.ranks)
    return verdicts


def test_an_optimizer_that_steps_elsewhere_is_seen() -> None:
    assert run_world(stepped_elsewhere, 1) == [[True, False]]
