"""Bytes are computed once for plans that need the same: what an earlier question asked changes no later answer."""

from __future__ import annotations

import inspect

import pytest

from shardwise.cost.memory import memory_key
from shardwise.cost.memory.estimate_memory import _estimate, estimate
from shardwise.cost.memory.lower_bound import _lines
from shardwise.cost.memory.memory_key import MemoryKey, counted_micro_batches
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
    _estimate.cache_clear()
    _lines.cache_clear()
    assert first == again == answer(question)
