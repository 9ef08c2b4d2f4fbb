"""What else a step could be: one thing changed, the global batch kept, bytes and seconds of the planner's own model."""

from __future__ import annotations

import pytest

from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.search import alternatives as module
from shardwise.search.alternatives import alternatives, changes

FSDP = Plan(
    strategy="fsdp", dims=ParallelDims(dp_shard=8), micro_batch=1, grad_accum=8, seq_len=2048, precision="bf16",
    recompute="full", gradient_sync="every", device="cuda",
)  # fmt: skip


def test_one_thing_is_changed_and_the_global_batch_stays() -> None:
    found = changes(FSDP)
    assert [kind for kind, _ in found] == ["micro batch"] * 3 + ["recompute"] * 2 + ["schedule", "strategy"]
    assert {plan.global_batch for _, plan in found} == {FSDP.global_batch}
    assert {plan.dims.world_size for _, plan in found} == {8}
    assert found[-1][1].strategy == "ddp"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp+offload"])
def test_what_is_whole_or_asked_for_otherwise_has_no_whole_alternative(strategy: str) -> None:
    dims = ParallelDims(dp_replicate=8) if strategy == "ddp" else ParallelDims(dp_shard=8)
    plan = Plan(strategy=strategy, dims=dims, micro_batch=4, device="cuda")
    assert changes(plan) == []


def test_a_step_in_the_backward_has_no_whole_alternative() -> None:
    plan = FSDP.model_copy(update={"grad_accum": 1, "gradient_sync": "last", "optimizer_in_backward": True})
    assert [kind for kind, _ in changes(plan)] == ["recompute"] * 2
    assert changes(plan.model_copy(update={"optimizer_in_backward": False}))[-1][0] == "strategy"


def test_each_is_costed_and_recompute_costs_time_and_saves_bytes() -> None:
    profile, cluster = load_profile("llama-3.2-1b", seq_len=2048), parse_cluster("8xA100-80GB")
    workload = Workload(seq_len=2048, global_batch=FSDP.global_batch)
    found = alternatives(profile, workload, cluster, FSDP)
    by_kind = {one.kind: one for one in found}  # the last of each kind
    none = by_kind["recompute"]
    assert none.plan.recompute == "none"
    assert none.gain is not None
    assert none.gain > 0.1
    assert none.memory_bytes is not None
    assert by_kind["strategy"].fits is True
    tiny = alternatives(profile, workload, parse_cluster("8xRTX3090"), FSDP)
    assert {one.kind: one for one in tiny}["strategy"].fits is False


def test_what_cannot_be_costed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module.cost_of

    def picky(question: object, plan: Plan) -> object:
        if plan.strategy == "ddp":
            raise PlanError("no")
        return plain(question, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "cost_of", picky)
    profile = load_profile("llama-3.2-1b", seq_len=2048)
    found = alternatives(profile, Workload(seq_len=2048, global_batch=64), parse_cluster("8xA100-80GB"), FSDP)
    assert {one.kind for one in found} == {"micro batch", "recompute", "schedule"}
