"""`StoredTypes`: keys of ``[parallel]`` that say in which types weights and gradients rest and are added up."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from shardwise.plan.fp8_recipes import PlannedRecipe
from shardwise.plan.optimizers import either
from shardwise.plan.plan import Plan, type_problems, unrun_types
from shardwise.plan.tensor_types import BARE_STRATEGIES, GradientType, Rounding, WeightType


class StoredTypes(BaseModel):
    """Types beside the compute type; see docs/precision.md."""

    weights: WeightType = Field(
        "fp32", description="at rest: fp32; compute: bf16 alone; masters: bf16, and fp32 masters as optimizer state"
    )
    accumulate: GradientType = Field("fp32", description="gradients at rest beside masters: fp32, or compute (bf16)")
    reduce: GradientType = Field("fp32", description="gradients added up over ranks: fp32, or compute (bf16)")
    rounding: Rounding = Field(
        "nearest", description="of the update of weights = 'compute': nearest, stochastic, kahan (one more bf16 tensor)"
    )
    fp8: PlannedRecipe = Field(
        "none", description="products of the blocks in fp8 by torchao: tensorwise (one scale a tensor) or rowwise"
    )
    fp8_emulate: bool = Field(
        False, description="computes fp8 products in fp32 on operands rounded to fp8, where no device has fp8"
    )

    @property
    def types(self) -> dict[str, Any]:
        """The types by their keys, as a plan stores them."""
        return {name: getattr(self, name) for name in StoredTypes.model_fields}

    def type_problems(self, strategy: str, precision: str, **options: bool) -> list[str]:
        """Return why types other than the defaults are not possible under a strategy and options of its plan."""
        if all(value == StoredTypes.model_fields[name].default for name, value in self.types.items()):
            return []
        given = " and ".join(f"'{name}'" for name in self.types if name in self.model_fields_set)
        able, unnamed = ", ".join(BARE_STRATEGIES), []
        if strategy == "auto":
            unnamed.append(f"{given} needs a named strategy: set parallel.strategy to one of {able}")
        if precision == "auto":
            unnamed.append(f"{given} needs a named precision: set parallel.precision to bf16")
        if unnamed:
            return unnamed
        facts = {"strategy": strategy, "precision": precision}
        plan = Plan.model_validate(facts | options | self.types)
        return type_problems(plan) or unrun_types(plan)

    def stored_problems(self, optimizer: str | None, ema_decay: float) -> list[str]:
        """Return what does not go with weights that rest in bf16; ``optimizer`` is ``None`` for a factory's."""
        if self.weights == "fp32":
            return []
        problems = []
        able = ["adamw"] if self.weights == "masters" or self.rounding != "nearest" else ["adamw", "sgd"]
        if optimizer is not None and optimizer not in able:
            problems.append(
                f"optimizer.name '{optimizer}' does not step weights = '{self.weights}' with rounding = "
                f"'{self.rounding}'; use {either(able)}, or set parallel.weights to fp32"
            )
        if ema_decay:
            problems.append(
                f"'train.ema_decay' is not for weights = '{self.weights}': an average in bf16 would lose most of its "
                "small steps; set parallel.weights to fp32, or remove ema_decay"
            )
        return problems
