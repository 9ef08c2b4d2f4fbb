"""Preference tuning as it is planned: pairs of sequences, and a frozen reference that runs forward only."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
from shardwise.cost.memory.local_shapes import layout_of
from shardwise.cost.time.estimate_time import step_time
from shardwise.cost.time.step_time import StepTime
from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.lora import with_adapters, without_adapters
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan, axis_problems, not_runnable, runnable
from shardwise.plan.program import SHARDWISE
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import data_traffic, sent_bytes
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Pins
from shardwise.search.cost_inputs_of_plan import adapted
from shardwise.search.memory_savers import orders
from shardwise.search.problem import ask
from shardwise.search.search import LOWER_BOUND_SLACK, search

CLUSTER = parse_cluster("4xA100-80GB")
WORK = Workload(seq_len=1024, global_batch=16)
WHOLE = ("ddp", "zero1", "zero2", "fsdp", "ddp+tp2", "fsdp+tp2", "fsdp+pp2", "fsdp+cp2")


def plan_of(strategy: str, objective: str, micro: int, **more: Any) -> Plan:
    given: dict[str, Any] = {"grad_accum": 4, "seq_len": 1024, "precision": "bf16", "device": "cuda", **more}
    dims = dims_for(parse_strategy(strategy), 4)
    return Plan(strategy=strategy, dims=dims, micro_batch=micro, objective=objective, **given)


def profile_of(plan: Plan) -> ModelProfile:
    profile = load_profile("llama-3.2-1b", seq_len=1024)
    return adapted(profile, plan.parsed, WORK, plan.precision) if plan.parsed.adapter != "none" else profile


def memory(plan: Plan) -> Estimate:
    return estimate(profile_of(plan), plan, WORK, CLUSTER)


def seconds(plan: Plan) -> StepTime:
    return step_time(profile_of(plan), plan, WORK, CLUSTER)


def both(strategy: str, **more: Any) -> tuple[Plan, Plan]:
    """Pairs under dpo, and as many sequences under lm."""
    return plan_of(strategy, "dpo", 1, **more), plan_of(strategy, "lm", 2, **more)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("strategy", WHOLE)
def test_the_reference_is_stored_as_the_policy_without_gradients_and_states(strategy: str, recompute: str) -> None:
    pairs, twice = both(strategy, recompute=recompute)
    dpo, lm = memory(pairs), memory(twice)
    assert (dpo.gradients, dpo.optimizer) == (lm.gradients, lm.optimizer)
    assert dpo.parameters == 2 * lm.parameters
    assert dpo.allocated >= lm.allocated + lm.parameters, "beside all that the policy needs"
    assert peak_lower_bound(profile_of(pairs), pairs, WORK) <= dpo.allocated * LOWER_BOUND_SLACK
    moment = max(sum(op.saved + op.temporary for op in unit.ops) for unit in profile_of(pairs).units) * 2 * 4
    assert dpo.activations <= lm.activations + moment, "its forward saves nothing"


@pytest.mark.parametrize("strategy", ["ddp+lora", "fsdp+lora", "fsdp+qlora"])
def test_with_adapters_the_reference_is_the_base_and_no_second_copy(strategy: str) -> None:
    dpo, lm = (memory(plan) for plan in both(strategy))
    assert (dpo.parameters, dpo.gradients, dpo.optimizer) == (lm.parameters, lm.gradients, lm.optimizer)
    assert lm.allocated <= dpo.allocated < lm.allocated + lm.parameters / 2


def test_an_offloaded_reference_is_the_hosts() -> None:
    dpo, lm = (memory(plan) for plan in both("fsdp+offload"))
    assert dpo.offloaded_bytes == lm.offloaded_bytes + lm.parameters
    slower, faster = (seconds(plan) for plan in both("fsdp+offload"))
    assert slower.offload_s > faster.offload_s, "its weights come over the bus, too"


@pytest.mark.parametrize("strategy", WHOLE)
def test_a_step_has_one_more_forward_and_nothing_else(strategy: str) -> None:
    pairs, twice = both(strategy, recompute="full")
    dpo, lm = seconds(pairs), seconds(twice)
    assert (dpo.recompute_s, dpo.optimizer_s) == (lm.recompute_s, lm.optimizer_s)
    assert dpo.compute_s / lm.compute_s == pytest.approx(4 / 3, rel=0.06), "a forward is a third of a step's products"
    tensor = dpo.exposed_tp_s / lm.exposed_tp_s if lm.exposed_tp_s else None
    assert tensor is None or 1.2 < tensor < 1.5, "forward, backward, recomputed forward, and the reference's"
    assert dpo.step_s > lm.step_s and dpo.tokens_per_s_per_device == pytest.approx(
        lm.tokens_per_s_per_device * lm.step_s / dpo.step_s
    )


def test_the_forward_of_a_base_has_no_adapters() -> None:
    pairs, twice = both("ddp+lora")
    base = without_adapters(profile_of(pairs))
    assert base.num_parameters == load_profile("llama-3.2-1b", seq_len=1024).num_parameters
    assert profile_of(pairs).num_parameters > base.num_parameters and base.num_trainable == 0
    extra = seconds(pairs).compute_s - seconds(twice).compute_s
    other = with_adapters(load_profile("llama-3.2-1b", seq_len=1024), "lora", targets=("attention",))
    fewer = step_time(other, pairs, WORK, CLUSTER).compute_s - step_time(other, twice, WORK, CLUSTER).compute_s
    assert extra == pytest.approx(fewer, rel=0.01), "whatever the adapters are"


def test_traffic_of_the_reference() -> None:
    pairs, twice = both("fsdp")
    assert (data_traffic(pairs).gathers, data_traffic(twice).gathers) == (12, 8)
    assert data_traffic(pairs).reduces == data_traffic(twice).reduces
    for axis in ("tp2", "cp2", "pp2"):
        dpo, lm = (sent_bytes(profile_of(plan), plan, SHARDWISE)[axis[:2]] for plan in both(f"fsdp+{axis}"))
        assert dpo == pytest.approx(1.5 * lm), "forward and backward, and a forward"


def test_tokens_are_those_of_both_sequences() -> None:
    asked = WORK.model_copy(update={"objective": "dpo", "tokens": 1e9})
    best = search(load_profile("llama-3.2-1b", seq_len=1024), asked, CLUSTER).candidates[0]
    assert best.hours == pytest.approx(1e9 / (16 * 2 * 1024) * best.time.step_s / 3600)
    assert best.plan.objective == "dpo" and "(16 × 2 × 1024 = 32,768 tokens a step)" in best.plan.batch_equation()


@pytest.mark.parametrize("objective", ["lm", "dpo"])
def test_the_loss_in_chunks_is_offered_for_text_only(objective: str) -> None:
    asked = WORK.model_copy(update={"objective": objective})
    question = ask(load_profile("llama-3.2-1b", seq_len=1024), asked, CLUSTER, Pins())
    offered = [options for _, options, _ in orders(question)]
    assert {"optimizer_in_backward": True} in offered
    assert any("loss_chunks" in options for options in offered) == (objective == "lm")
    wrong = axis_problems(plan_of("fsdp", objective, 1, loss_chunks=8))
    assert ["is not for objective dpo: its trainers" in text for text in wrong] == [True] * (objective == "dpo")


def test_it_is_planned_and_not_run() -> None:
    asked = WORK.model_copy(update={"objective": "dpo"})
    result = search(load_profile("llama-3.2-1b", seq_len=1024), asked, CLUSTER)
    assert not any(candidate.runnable for candidate in result.candidates)
    best = result.candidates[result.recommended or 0]
    assert best.why_not_runnable == "objective dpo (trainers such as TRL's DPOTrainer run it)"
    assert best.other_run, "what it says is not run is not recommended beside it"
    with pytest.raises(PlanError, match=r"objective dpo can be planned but is not run .* TRL's DPOTrainer"):
        runnable(best.plan)
    plain = best.plan.model_copy(update={"objective": "lm"})
    assert not not_runnable(plain) and runnable(plain) is plain


def test_a_plan_knows_its_objective() -> None:
    pairs, twice = both("fsdp")
    assert pairs.fingerprint != pairs.model_copy(update={"objective": "lm"}).fingerprint
    assert '"objective"' in pairs.to_json() and layout_of(pairs) == layout_of(twice)
    old = Plan(strategy="fsdp", micro_batch=1)
    assert old.objective == "lm" and old.reference == "none"
