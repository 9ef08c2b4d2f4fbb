"""Blocks that are compiled, and weights gathered ahead: the same gradients, and facts that say that it took effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from shardwise.errors import ModelError, PlanError
from shardwise.model.read import read_model
from shardwise.parallel.compile import check_compile, check_options
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.families import family
from tests.world.test_context_parallel import LAYERS, LIMIT, Case, Outcome, train
from tests.worlds import run_world

CASES = [
    (2, Case("ddp", "llama", 2, {"compile": True})),
    (2, Case("fsdp", "own", 2, {"compile": True, "recompute": "full", "prefetch": 2})),
    (2, Case("ddp+cp2", "qwen3", 2, {"compile": True, "recompute": "selective"})),
    (2, Case("fsdp+tp2", "llama", 1, {"compile": True}, layers=2)),
]
CHEAPEST = (2, Case("ddp", "own", 1, {"compile": True}, layers=2))


def without_kernels(case: Case) -> Outcome:
    """`train`: graphs are made as ever, and run by PyTorch's own kernels in place of Inductor's."""
    with mock.patch("torch._inductor.compile_fx.compile_fx", aot_eager):
        return train(case)


def right(outcome: Outcome, case: Case) -> None:
    assert outcome.error <= LIMIT, outcome
    compiled = outcome.compiled
    assert compiled is not None and compiled.blocks == case.layers, outcome
    alike = 1 if "tp2" not in case.strategy else 2  # the first cuts the sequence, and the last joins it
    assert compiled.graphs == alike, "equal blocks are compiled once"
    assert compiled.calls == compiled.runs > case.layers * case.accum, "every forward of a block ran its graph"
    if "cp2" in case.strategy:
        assert outcome.exchanged[:2] == [LAYERS * case.accum, LAYERS * (case.accum - 1)]  # a full window, and a part


@pytest.mark.turns(3)
@pytest.mark.parametrize(("world", "case"), CASES, ids=lambda value: str(getattr(value, "strategy", value)))
def test_compiled_blocks_have_the_gradient_of_one_process(world: int, case: Case) -> None:
    for outcome in run_world(without_kernels, world, case):
        right(outcome, case)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("world", "case"),
    [CHEAPEST, *(pytest.param(*each, marks=pytest.mark.soak) for each in CASES)],
    ids=lambda value: str(getattr(value, "strategy", value)),
)
def test_so_have_blocks_with_kernels_of_inductor(world: int, case: Case) -> None:
    for outcome in run_world(train, world, case, timeout_s=170):
        right(outcome, case)


@pytest.mark.turns(3)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "hsdp+cp2"])
def test_weights_gathered_ahead_give_the_same_gradient(strategy: str) -> None:
    world = 4 if "hsdp" in strategy else 2
    for outcome in run_world(train, world, Case(strategy, "llama", 2, {"prefetch": 2, "recompute": "full"})):
        assert outcome.error <= LIMIT and outcome.ahead == (2, 2), outcome


def test_one_ahead_is_left_to_fsdp() -> None:
    for outcome in run_world(train, 2, Case("fsdp", "own", 1)):
        assert outcome.error <= LIMIT and outcome.ahead == (1, 1), outcome


class Blocks(nn.Module):
    """Two blocks that do ``what``."""

    def __init__(self, what: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block(what) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, what: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self.inner(x))


def says(x: torch.Tensor) -> torch.Tensor:
    print("forward")
    return x


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def refusal(module: nn.Module) -> str:
    plan = Plan(strategy="ddp", compile=True)
    with pytest.raises(ModelError) as caught:
        check_compile(module, read_model(module), plan)
    return str(caught.value)


def test_what_breaks_the_graph_is_said_with_its_line() -> None:
    text = refusal(Blocks(says))
    assert text.startswith("'blocks.0' (Block) cannot be compiled as one graph: Failed to trace builtin operator")
    assert "print" in text and "test_compiled.py" in text and text.endswith("set parallel.compile to false")
    text = refusal(Blocks(branches))
    assert "DataDependent" in text and "test_compiled.py:" in text


def test_a_model_without_blocks_has_nothing_to_compile() -> None:
    assert "the model has none" in refusal(nn.Linear(2, 2))


def test_what_can_be_compiled_is_not_refused() -> None:
    with torch.device("meta"):
        module = family("gpt2")
    check_compile(module, read_model(module), Plan(strategy="ddp", compile=True))
    assert not any(part._forward_pre_hooks for part in module.modules())


def plan_with(strategy: str, world: int, **options: Any) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world), **options)


def test_options_that_cannot_be_had_are_refused() -> None:
    needed = r"needs parallel.device=cuda and parallel.compile=true; or set"
    with pytest.raises(PlanError, match=needed):
        check_options(plan_with("fsdp+tp2", 2, async_tp=True))
    with pytest.raises(PlanError, match=r"needs a strategy with \+tp and parallel.sequence_parallel=true"):
        check_options(plan_with("fsdp", 2, async_tp=True, device="cuda", compile=True, sequence_parallel=False))
    with pytest.raises(PlanError, match="prefetch 3 gathers sharded weights ahead, and ddp replicates them"):
        check_options(plan_with("ddp", 2, prefetch=3))
    check_options(plan_with("fsdp", 2, prefetch=3))


def test_a_machine_without_a_compiler_is_said() -> None:
    import torch._inductor.config
    from torch._inductor import cpp_builder

    check_options(plan_with("ddp", 1, compile=True))
    cpp_builder.cpp_compiler_search.cache_clear()
    none = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})  # pytest's own would remove the key
    with none, pytest.raises(PlanError, match=r"none works here \(tried: no-such-compiler\); install g\+\+, or set"):
        check_options(plan_with("ddp", 1, compile=True))
    cpp_builder.cpp_compiler_search.cache_clear()
    with pytest.raises(PlanError, match="needs Triton"):
        check_options(plan_with("ddp", 1, compile=True, device="cuda"))


def lengths_of_every_kind() -> str:
    """A block that is compiled anew for every value of an attribute: PyTorch stops at a limit."""
    from shardwise.parallel.compile import apply_compile

    module = Blocks(torch.sin)
    apply_compile(list(module.blocks), Plan(strategy="ddp", compile=True))
    torch._dynamo.config.recompile_limit = 2
    try:
        for number in range(8):
            module.blocks[0].what = functools.partial(torch.add, other=number)
            module(torch.zeros(1, 2, dtype=torch.int64))
    except ModelError as error:
        return str(error)
    return ""


def test_a_block_that_is_compiled_too_often_is_no_silent_fallback() -> None:
    (text,) = run_world(lengths_of_every_kind, 1)
    assert text.startswith("a block (Block) was compiled 2 times") and text.endswith("set parallel.compile to false")
