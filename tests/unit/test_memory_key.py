"""Bytes are computed once for plans that need the same: what an earlier question asked changes no later answer."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from shardwise.cost.memory import memory_key
from shardwise.cost.memory.estimate_memory import _estimate, estimate
from shardwise.cost.memory.lower_bound import _lines, _moments, _stored
from shardwise.cost.memory.memory_key import MemoryKey, counted_micro_batches
from shardwise.cost.time.estimate_time import _stages, _traffics, _unit_times, step_time
from shardwise.cost.time.layer_time import _of_ops, _ops_s, op_s
from shardwise.cost.time.machine import machine_of
from shardwise.cost.time.work_split import WorkSplit
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.plan.dims import dims_for
from shardwise.plan.parallel_options import OPTION_SPECS
from shardwise.plan.plan import Plan
from shardwise.plan.program import find_program
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.web.answer import answer

PLANS = [
    ("ddp", {}, "shardwise"),
    ("fsdp", {"gradient_sync": "every"}, "shardwise"),
    ("zero1+tp2", {}, "megatron"),
    ("fsdp+pp4", {}, "shardwise"),
    ("fsdp+pp4", {"pipeline_schedule": "gpipe"}, "shardwise"),
    ("fsdp+pp4", {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}, "shardwise"),
    ("zero1+pp4", {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 4}, "megatron"),
    ("fsdp+pp4", {}, "torchtitan"),
]


@pytest.mark.parametrize(("strategy", "options", "program"), PLANS)
def test_plans_of_one_key_need_the_same_bytes(strategy, options, program):
    profile, cluster = load_profile("gpt2", seq_len=256), parse_cluster("8xA100-80GB")
    workload = Workload(program=find_program(program))
    dims = dims_for(parse_strategy(strategy), 8, devices_per_node=8)
    counted = set()
    for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 40):
        plan = Plan(
            strategy=strategy,
            dims=dims,
            micro_batch=2,
            grad_accum=number,
            seq_len=256,
            precision="bf16",
            device="cuda",
            **options,
        )
        key = MemoryKey(profile, plan, workload, cluster)
        assert estimate(profile, plan, workload, cluster) == _estimate.__wrapped__(key)
        bound = MemoryKey(profile, plan, workload)
        assert _lines(bound) == _lines.__wrapped__(bound)
        for recompute in ("none", "selective", "full"):
            for sync in ("last", "every"):
                stored = MemoryKey(
                    profile,
                    plan.model_copy(update={"recompute": recompute, "gradient_sync": sync}),
                    workload,
                    step=False,
                )
                assert _stored(stored) == _stored.__wrapped__(stored)
        counted.add(counted_micro_batches(plan, workload))
    assert len(counted) < 11 or options.get("pipeline_schedule") == "gpipe" or program == "torchtitan"


OF_PROFILE = {"seq_len", "adapter", "lora_rank", "lora_targets", "lora_dropout", "lora_dora", "double_quant"}
OF_PROFILE |= {"modules_to_save", "document_len"}
NO_BYTES = {"schema_version", "reason", "tp_styles", "global_batch", "tokens", "micro_batch", "program", "fp8_emulate"}
"""Sequences count in place of ``micro_batch``, the workload's program in place of the plan's. What emulates fp8 is not
planned."""
OF_PLAN = {"objective", "activation_bytes", "logits_bytes", "parameter_groups"}
"""The plan has the objective; what was measured on a live model counts in `estimate_memory`, which keeps nothing."""


def test_whatever_changes_bytes_is_in_the_key():
    source = inspect.getsource(memory_key)
    for kind, owner, beside in (("plan", Plan, set()), ("workload", Workload, OF_PLAN)):
        known = {name for name in owner.model_fields if f"{kind}.{name}" in source} | OPTION_SPECS.keys()
        assert set(owner.model_fields) - known - beside <= OF_PROFILE | NO_BYTES


def test_an_answer_does_not_depend_on_earlier_questions():
    question = {"model": "gpt2", "cluster": "8xRTX3090", "seq_len": "1k", "global_batch": "64"}
    first = answer(question)
    for changes in ({"global_batch": "512"}, {"seq_len": "512"}, {"cluster": "4xRTX3090"}, {"program": "torchtitan"}):
        answer(question | changes)
    again = answer(question)
    for cache in (_estimate, _lines, _moments, _stored, _ops_s, _unit_times, _stages, _traffics):
        cache.cache_clear()
    assert first == again == answer(question)


TIMED = (
    ("fsdp+tp2+cp2", "shardwise"),
    ("zero1", "shardwise"),
    ("zero1+tp2+ep4", "shardwise"),
    ("zero1+pp2", "deepspeed"),
    ("ddp", "megatron"),
)
CHANGES = ({}, {"recompute": "selective"}, {"recompute": "full"}, {"micro_batch": 2}, {"grad_accum": 1})


def test_a_step_time_does_not_depend_on_those_before():
    profile = load_profile("mixtral-8x7b", seq_len=2048)
    asked = []
    for cluster in map(parse_cluster, ("2x8xA100-80GB", "16x1xA100-80GB", "2x8xH100-SXM")):
        for name, program in TIMED:
            workload = Workload(program=find_program(program))
            plan = Plan(
                strategy=name,
                dims=dims_for(parse_strategy(name), 16, devices_per_node=cluster.devices_per_node),
                micro_batch=1,
                grad_accum=4,
                seq_len=2048,
                precision="bf16",
                device="cuda",
            )
            asked += [(profile, plan.model_copy(update=changes), workload, cluster) for changes in CHANGES]
    found = [step_time(*question) for question in asked]
    assert len({one.step_s for one in found}) > len(found) / 2
    for question, before in zip(asked, found, strict=True):
        for cache in (_ops_s, _unit_times, _stages, _traffics):
            cache.cache_clear()
        assert step_time(*question) == before


def test_what_the_seconds_of_an_op_are_kept_without_does_not_change_them():
    machine, profile = machine_of(parse_cluster("8xA100-80GB"), "bf16"), load_profile("mixtral-8x7b", seq_len=2048)
    split = WorkSplit(tp=2, cp=2, micro=2, precision="bf16", recompute="full", compiled=False, ep=4, host=2.0)
    for changes in ({}, {"hides_reduction": True}, {"ring": True}, {"weighs_early": True}, {"shards_ends": True}):
        other = replace(split, **changes)
        for unit in profile.units:
            for op in unit.ops:
                assert op_s(machine, unit, op, _of_ops(other)) == op_s(machine, unit, op, other)
