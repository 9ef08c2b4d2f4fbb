"""The effects receipt on types in bf16: each that is not as planned makes a line false."""

from __future__ import annotations

from typing import Any

import torch

import shardwise.optim.low_precision as low_precision_module
import shardwise.parallel.apply as apply_module
import shardwise.parallel.data_parallel.ddp as ddp_module
import shardwise.parallel.data_parallel.fsdp as fsdp_module
import shardwise.train.session as session_module
from shardwise.receipts.effects import EffectsRecorder
from shardwise.run.start import start
from shardwise.train.loss import token_loss_sum
from tests.models import ragged_batches
from tests.world.test_low_precision import KAHAN, LOW_GRADIENTS, MASTERS, NEAREST, REDUCE, built, plan_for
from tests.worlds import run_world


def false_lines(strategy: str, types: dict[str, str]) -> set[str]:
    session = start(plan_for(strategy, types), device="cpu", receipts=False)
    probe = EffectsRecorder(strict=False)
    session.observers.append(probe)
    model = built()
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    for step in session.steps(ragged_batches(2 * session.ranks.world_size)):
        step.run(model, token_loss_sum)
        step.update(optimizer)
    assert probe.receipt is not None
    session.close()
    return {line.name for line in probe.receipt.lines if line.ok is False}


def sabotaged(module: Any, name: str, value: Any, strategy: str, types: dict[str, str]) -> set[str]:
    real = getattr(module, name)
    setattr(module, name, value)
    try:
        return false_lines(strategy, types)
    finally:
        setattr(module, name, real)


def policy_without_types(plan: Any, *, is_root: bool) -> Any:
    return real_policy(
        plan.model_copy(update={"reduce": "fp32" if plan.reduce == "compute" else "compute"}), is_root=is_root
    )


real_policy = fsdp_module.mixed_precision_policy
REAL = low_precision_module.LowPrecisionAdamW


class ForgetsTheRest(REAL):
    """It is asked for Kahan summation, and rounds to nearest."""

    def _step_one(self, parameter: Any, gradient: Any, group: dict[str, Any]) -> None:
        super()._step_one(parameter, gradient, {**group, "keeps": "nearest"})


class WideMoments(REAL):
    """Its moments are fp32."""

    @staticmethod
    def _begin(parameter: Any, state: dict[str, Any], keeps: Any) -> None:
        REAL._begin(parameter, state, keeps)
        state["exp_avg"] = state["exp_avg"].float()


def nothing(*_: Any) -> None:
    """Leave out what should be done."""


def first(optimizer: Any, *_: Any) -> Any:
    """Return the optimizer as it is."""
    return optimizer


def all_of_them() -> dict[str, set[str]]:
    kinds, kept = low_precision_module, "LowPrecisionAdamW"
    return {
        "weights stay fp32, ddp": sabotaged(apply_module, "store_low", nothing, "ddp", NEAREST),
        "weights stay fp32, fsdp": sabotaged(apply_module, "store_low", nothing, "fsdp", NEAREST),
        "ddp reduces in its own type": sabotaged(ddp_module, "reduction_dtype", nothing, "ddp", NEAREST),
        "ddp reduces fp32 as it is": sabotaged(ddp_module, "reduction_dtype", nothing, "zero1", REDUCE),
        "fsdp reduces in bf16": sabotaged(fsdp_module, "mixed_precision_policy", policy_without_types, "fsdp", NEAREST),
        "fsdp reduces in fp32": sabotaged(fsdp_module, "mixed_precision_policy", policy_without_types, "zero2", REDUCE),
        "gradients rest in bf16": sabotaged(fsdp_module, "accumulate_in_fp32", nothing, "fsdp", MASTERS),
        "no rest is kept": sabotaged(kinds, kept, ForgetsTheRest, "ddp", KAHAN),
        "moments are fp32": sabotaged(kinds, kept, WideMoments, "fsdp", KAHAN),
        "no masters": sabotaged(session_module, "low_precision", first, "fsdp", LOW_GRADIENTS),
        "clean": false_lines("fsdp", KAHAN) | false_lines("zero1", REDUCE),
    }


def test_each_is_seen() -> None:
    for found in run_world(all_of_them, 2, timeout_s=100):
        assert not found.pop("clean")
        assert all(found.values()), found
        for case in ("weights stay fp32, ddp", "weights stay fp32, fsdp"):
            assert {"parameter dtype", "gradient dtype", "optimizer state dtype"} <= found[case], case
        for case in [case for case in found if " reduces " in case]:
            assert "reduction dtype" in found[case], case
        assert found["gradients rest in bf16"] == {"gradient dtype"}
        assert found["no rest is kept"] == {"optimizer state held"}
        assert found["moments are fp32"] == {"optimizer state dtype"}
        assert {"optimizer state dtype", "optimizer state held"} <= found["no masters"]
