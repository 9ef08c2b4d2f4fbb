"""The effects receipt on products in fp8: a layer that is left out, another recipe, scales that are not agreed on."""

from __future__ import annotations

from typing import Any

import torch

import shardwise.parallel.apply as apply_module
import shardwise.parallel.data_parallel.fsdp as fsdp_module
import shardwise.parallel.fp8 as fp8_module
import shardwise.train.session as session_module
from shardwise.receipts.effects import EffectsRecorder
from shardwise.train.loss import token_loss_sum
from tests.fp8 import use_torchao
from tests.models import ragged_batches
from tests.world.test_fp8 import plan_for, prepared
from tests.worlds import run_world

use_torchao()

LAYERS, MULTIPLY, SCALES = "fp8 layers", "layers that multiply in fp8", "scales of weights gathered in fp8"
real_unit, real_config = fp8_module.convert_unit, fp8_module.config_of


def false_lines(strategy: str, recipe: str) -> set[str]:
    session, model, optimizer = prepared(plan_for(strategy, recipe))
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    for step in session.steps(ragged_batches(2 * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    assert probe.receipt is not None
    session.close()
    return {line.name for line in probe.receipt.lines if line.ok is False}


def sabotaged(module: Any, name: str, value: Any, strategy: str, recipe: str) -> set[str]:
    real = getattr(module, name)
    setattr(module, name, value)
    try:
        return false_lines(strategy, recipe)
    finally:
        setattr(module, name, real)


def all_but_one(unit: Any, plan: Any) -> None:
    """Convert a unit, but for its layer ``down``."""
    del unit.down.__dict__[fp8_module._MARK]
    real_unit(unit, plan)


def on_rank_0(unit: Any, plan: Any) -> None:
    """The same on one rank only; the others convert all."""
    (all_but_one if torch.distributed.get_rank() == 0 else real_unit)(unit, plan)


def other_recipe(plan: Any) -> Any:
    return real_config(plan.model_copy(update={"fp8": "rowwise" if plan.fp8 == "tensorwise" else "tensorwise"}))


def wide_products(unit: Any, plan: Any) -> None:
    """Convert the layers, and multiply in bf16 all the same."""
    real_unit(unit, plan)
    for layer in fp8_module.float8_layers(unit).values():
        layer.forward = lambda x, layer=layer: torch.nn.functional.linear(x, layer.weight, layer.bias)


def nothing(*_: Any) -> None:
    """Leave out what should be done."""


def own_scales(optimizer: Any, module: Any, plan: Any) -> None:
    """Let each rank take the scale of its own shard."""

    def alone(*_: Any) -> None:
        for layer in fp8_module.float8_layers(module).values():
            shard = layer.weight._local_tensor
            shard._precomputed_scale = (448.0 / shard._tensor.abs().max().double()).float()

    optimizer.register_step_post_hook(alone)


def all_of_them() -> dict[str, set[str]]:
    return {
        "one layer stays, ddp": sabotaged(apply_module, "convert_unit", all_but_one, "ddp", "rowwise"),
        "one layer stays, fsdp": sabotaged(fsdp_module, "convert_unit", all_but_one, "fsdp", "tensorwise"),
        "one layer stays on a rank": sabotaged(apply_module, "convert_unit", on_rank_0, "zero1", "tensorwise"),
        "none is converted": sabotaged(fsdp_module, "convert_unit", nothing, "zero2", "tensorwise"),
        "another recipe": sabotaged(fp8_module, "config_of", other_recipe, "ddp", "tensorwise"),
        "products in bf16": sabotaged(apply_module, "convert_unit", wide_products, "ddp", "tensorwise"),
        "scales of earlier weights": sabotaged(session_module, "keep_scales", nothing, "fsdp", "tensorwise"),
        "scales of shards": sabotaged(session_module, "keep_scales", own_scales, "fsdp", "tensorwise"),
        "weights gathered in bf16": sabotaged(fp8_module, "gathers_fp8", lambda plan: False, "fsdp", "tensorwise"),
        "clean": false_lines("fsdp", "tensorwise") | false_lines("ddp", "rowwise"),
    }


def test_each_is_seen() -> None:
    for found in run_world(all_of_them, 2, timeout_s=120):
        assert not found.pop("clean")
        assert found["one layer stays, ddp"] == {LAYERS, MULTIPLY}
        assert found["one layer stays, fsdp"] == {LAYERS, MULTIPLY, SCALES, "all_gather per step"}
        assert found["one layer stays on a rank"] == {LAYERS, MULTIPLY}
        assert found["none is converted"] == {LAYERS, MULTIPLY, SCALES, "all_gather per step"}
        assert found["another recipe"] == {LAYERS}
        assert found["products in bf16"] == {MULTIPLY}
        assert found["scales of earlier weights"] == found["scales of shards"] == {SCALES}
        assert {SCALES, "all_gather per step"} <= found["weights gathered in bf16"]
