"""What a recipe of fp8 products costs by the plan: bytes and seconds, by hand arithmetic and beside published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost.memory.activations import unit_bytes
from shardwise.cost.memory.local_shapes import layout_of, unit_weights
from shardwise.cost.time.estimate_time import step_time
from shardwise.cost.time.layer_time import WorkSplit, op_s, unit_time
from shardwise.cost.time.machine import FP8_ROWWISE, machine_of
from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.catalogue import find_architecture
from shardwise.model.profile import ModelProfile, Unit
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.fp8_recipes import converts, in_fp8, kept_wide
from shardwise.plan.plan import Plan, gathers_fp8
from shardwise.plan.program import SHARDWISE, find_program
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import sent_bytes
from shardwise.plan.workload import Workload

NODE = parse_cluster("8xH100-SXM")
# A Llama 3.1 8B block by hand: q and o, k and v, gate, up and down
LINEAR = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
NORMS, BLOCKS, ENDS = 2 * 4096, 32, 2 * 128256 * 4096 + 4096


def llama(seq_len: int = 8192) -> ModelProfile:
    architecture = find_architecture("llama-3.1-8b")
    assert architecture is not None
    return profile_of(architecture, seq_len)


def plan_of(strategy: str, recipe: str = "none", **options: Any) -> Plan:
    facts = {"strategy": strategy, "dims": dims_for(parse_strategy(strategy), 8), "precision": "bf16", "fp8": recipe}
    return Plan.model_validate(facts | {"micro_batch": 1, "seq_len": 8192, "device": "cuda"} | options)


def block() -> Unit:
    return next(unit for unit in llama().units if unit.kind == "block")


def test_what_is_converted() -> None:
    assert not kept_wide((64, 48)) and kept_wide((64, 47)) and kept_wide((8, 64)) and kept_wide((64,))
    weights = block().weights
    assert sum(w.num_elements for w in weights if in_fp8(block(), w)) == LINEAR
    assert sum(w.num_elements for w in weights if not in_fp8(block(), w)) == NORMS
    head = next(unit for unit in llama().units if unit.kind == "head")
    assert not any(in_fp8(head, w) for w in head.weights)


def test_sharded_weights_are_gathered_in_one_byte_where_one_scale_is_for_the_whole_weight() -> None:
    for strategy in ("zero2", "fsdp", "hsdp"):
        assert gathers_fp8(plan_of(strategy, "tensorwise")) and not gathers_fp8(plan_of(strategy, "rowwise"))
    assert not gathers_fp8(plan_of("ddp", "tensorwise"))
    sent = {recipe: unit_weights(block(), layout_of(plan_of("fsdp", recipe))).sent for recipe in RECIPES}
    assert sent == {"none": 2 * (LINEAR + NORMS), "rowwise": 2 * (LINEAR + NORMS), "tensorwise": LINEAR + 2 * NORMS}
    wire = {recipe: sent_bytes(llama(), plan_of("fsdp", recipe), SHARDWISE)["dp"] for recipe in RECIPES}
    weights = BLOCKS * (LINEAR + NORMS) + ENDS
    assert wire["none"] == wire["rowwise"] == 7 / 8 * (2 * 2 * weights + 4 * weights)
    assert wire["none"] - wire["tensorwise"] == 7 / 8 * 2 * BLOCKS * LINEAR


RECIPES = ("none", "tensorwise", "rowwise")


def test_autocast_copies_no_weight_whose_product_casts_it_itself() -> None:
    copies = {recipe: unit_weights(block(), layout_of(plan_of("ddp", recipe))).copies for recipe in RECIPES}
    assert copies == {"none": 2 * LINEAR, "tensorwise": 0, "rowwise": 0}


def test_nothing_is_saved_in_fp8_and_casts_take_memory_for_a_moment() -> None:
    plain, cast = (unit_bytes(block(), layout_of(plan_of("fsdp", r)), "none", True) for r in ("none", "rowwise"))
    assert [op.saved for op in plain.ops] == [op.saved for op in cast.ops]
    moments = [c.temporary - p.temporary for p, c in zip(plain.ops, cast.ops, strict=True)]
    down = max(moments)
    assert down == 8192 * (14336 + 4096) and moments.count(0) == len(moments) - 7
    eager = unit_bytes(block(), layout_of(plan_of("fsdp", "rowwise")), "none", False)
    assert max(op.temporary for op in eager.ops) >= down + 8192 * 8 * 14336


def split(recipe: str, **options: Any) -> WorkSplit:
    facts = {"tp": 1, "cp": 1, "micro": 1, "precision": "fp8", "recompute": "none", "compiled": True}
    return WorkSplit(**(facts | {"recipe": recipe, "compiled_host": options.get("compiled", True)} | options))


def test_seconds_of_a_product_are_those_of_the_three_in_fp8_and_of_their_casts() -> None:
    machine, op = machine_of(NODE, "fp8"), next(op for op in block().ops if converts(op) and op.n == 14336)
    m, k, n = 8192, 4096, 14336
    three = [machine.matmul_s(*shape, "fp8") for shape in ((m, k, n), (m, n, k), (k, m, n))]
    memory = machine.memory_s
    cases = [
        (split("tensorwise", compiled=False), 1.0, 33.0, m * k + k * n, 2 * m * n + k * n + m * k),
        (split("tensorwise"), 1.0, 5.0, m * k + k * n, m * n + k * n + m * k),
        (split("tensorwise", gathers_fp8=True), 1.0, 5.0, m * k, m * n + m * k),
        (split("rowwise"), FP8_ROWWISE, 5.0, m * k + k * n, 2 * m * n + k * n + m * k),
    ]
    for asked, slower, each, ahead, back in cases:
        found = op_s(machine, block(), op, asked)
        assert found[0] == pytest.approx(slower * three[0] + memory(each * ahead))
        assert found[1] == pytest.approx(slower * (three[1] + three[2]) + memory(each * back))


def test_what_is_not_converted_is_computed_in_bf16() -> None:
    machine, unit = machine_of(NODE, "fp8"), block()
    op = next(op for op in unit.ops if converts(op))
    odd = replace(op, n=op.n + 1)
    plain = op_s(machine, unit, odd, split("none", precision="bf16"))
    assert op_s(machine, unit, odd, split("rowwise")) == plain


def test_eager_casts_keep_the_host_busy() -> None:
    """Seven products: forward two casts of ten kernels each, backward four; one less each where weights are fp8."""
    machine = machine_of(NODE, "fp8")
    times = {
        name: unit_time(machine, block(), one)
        for name, one in (
            ("bf16", split("none", precision="bf16", compiled=False)),
            ("cast", split("tensorwise", compiled=False)),
            ("gathered", split("tensorwise", compiled=False, gathers_fp8=True)),
        )
    }
    for name, ahead, back in (("cast", 2, 4), ("gathered", 1, 3)):
        more = times[name].host_forward_s - times["bf16"].host_forward_s
        assert more == pytest.approx(7 * 10 * ahead * machine.launch_s())
        more = times[name].host_backward_s - times["bf16"].host_backward_s
        assert more == pytest.approx(7 * 10 * back * machine.launch_s())


PUBLISHED = {"none": 8192 / 6150, "tensorwise": 8192 / 7689.5, "rowwise": 8192 / 6768}
"""Seconds of a step of Llama 3.1 8B on 8 H100 (96 GB): torchao/float8/README.md, compiled, selective recompute."""


def test_published_steps_of_both_recipes() -> None:
    workload = Workload(program=find_program("torchtitan"), compiled=True)
    cluster = parse_cluster("8xH100-SXM-96GB")

    def seconds(recipe: str) -> float:
        plan = plan_of("fsdp", recipe, recompute="selective", program="torchtitan")
        return step_time(llama(), plan, workload, cluster).step_s

    found = {recipe: seconds(recipe) for recipe in RECIPES}
    assert all(abs(found[recipe] / PUBLISHED[recipe] - 1) < 0.12 for recipe in RECIPES), found
    assert found["tensorwise"] < found["rowwise"] < found["none"]


def test_a_gpu_without_fp8_has_no_time() -> None:
    with pytest.raises(PlanError, match="no known speed in fp8"):
        step_time(llama(), plan_of("fsdp", "tensorwise"), Workload(), parse_cluster("8xA100-80GB"))
