"""A plan with ``compile`` costs the same wherever it is costed: by ``plan``, by ``train`` and by a run's diagnosis."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.cost.memory.estimate_memory import ShardPlacement, estimate, peak_lower_bound
from shardwise.cost.time.estimate_time import step_time
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.run.job import _fixed_choice
from shardwise.search.candidate import Pins
from shardwise.search.search import search

CLUSTER = parse_cluster("4xA100-80GB")
WORK = Workload(seq_len=1024, global_batch=16)


def plan_of(strategy: str, *, compiled: bool, recompute: str = "none") -> Plan:
    return Plan(
        strategy=strategy, dims=dims_for(parse_strategy(strategy), 4), micro_batch=2, grad_accum=2, seq_len=1024,
        precision="bf16", recompute=recompute, compile=compiled, device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize(("strategy", "recompute"), list(product(["ddp", "fsdp", "fsdp+tp2"], ["none", "full"])))
def test_the_plan_alone_says_that_blocks_are_compiled(strategy: str, recompute: str) -> None:
    profile = load_profile("llama-3.2-1b", seq_len=1024)
    plan, told = plan_of(strategy, compiled=True, recompute=recompute), WORK.model_copy(update={"compiled": True})
    plain = plan_of(strategy, compiled=False, recompute=recompute)
    for cost in (estimate, step_time):
        assert cost(profile, plan, WORK, CLUSTER) == cost(profile, plan, told, CLUSTER)
        assert cost(profile, plan, WORK, CLUSTER) == cost(profile, plain, told, CLUSTER)
    assert step_time(profile, plan, WORK, CLUSTER).step_s < step_time(profile, plain, WORK, CLUSTER).step_s
    assert (
        peak_lower_bound(profile, plan, WORK)
        == peak_lower_bound(profile, plan, told)
        == peak_lower_bound(profile, plain, told)
    )


def test_train_predicts_a_compiled_plan_as_plan_does() -> None:
    profile = load_profile("llama-3.2-1b", seq_len=1024)
    spec = ModelSpec(
        parameters=(ParameterSpec(name="w", shape=(8, 8), itemsize=4, dtype="float32", trainable=True, block=None),),
        blocks=(),
    )
    pins = Pins(strategy=parse_strategy("ddp"), micro_batch=2, recompute="none", options={"compile": True})
    asked = WORK.model_copy(update={"compiled": True})
    planned = search(profile, asked, CLUSTER, pins).candidates[0]
    assert planned.plan.compile and planned.time is not None
    choice = _fixed_choice(planned.plan, spec, WORK, profile, CLUSTER, ShardPlacement())
    assert choice.time == planned.time
    assert choice.estimate.activations == planned.memory.activations
    assert choice.estimate.reserved == planned.memory.reserved
