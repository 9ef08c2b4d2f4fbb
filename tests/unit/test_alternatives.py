"""What else a step could be: one thing changed, the global batch kept, bytes and seconds of the planner's own model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.diagnosis import bytes_by_axis, other_plans, saves_of
from shardwise.measure.utilisation import AxisUse
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.search.alternatives import alternatives, changes
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.load import load_profile
from shardwise.spec.workload import Workload

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
    assert other_plans(None, workload, cluster, FSDP) == ()


def test_saves_are_read_from_the_metrics(tmp_path: Path) -> None:
    lines = [
        {"step": 2, "checkpoint_bytes": 5, "checkpoint_stall_s": 0.1, "checkpoint_write_s": 0.1},
        {"step": 3, "loss": 1.0},
        {"step": 4, "checkpoint_bytes": 5, "checkpoint_stall_s": 0.2, "checkpoint_write_s": 0.4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = saves_of(tmp_path, after=2, background=True)
    assert [(save.step, save.stall_s, save.background) for save in found] == [(4, 0.2, True)]


def test_data_parallel_axes_are_one() -> None:
    def use(axis: str, size: float) -> AxisUse:
        return AxisUse(
            axis=axis, ranks=2, wire_bytes=size, bytes_per_s=1.0, link="node", link_bytes_per_s=None, use=None
        )

    assert bytes_by_axis([use("dp_shard", 3.0), use("dp_replicate", 1.0), use("tp", 2.0)]) == {"dp": 4.0, "tp": 2.0}
