"""Types of the tensors that a rank stores and sends, beside the compute type of a plan's ``precision``."""

from __future__ import annotations

from typing import Literal

WeightType = Literal["fp32", "compute", "masters"]
"""Weights at rest: fp32; in the compute type without a wider copy (pure bf16); or so, with fp32 masters as state."""
GradientType = Literal["fp32", "compute"]
Rounding = Literal["nearest", "stochastic", "kahan"]
"""How an update in the compute type is rounded; ``kahan`` keeps the lost bits in one more tensor."""

WEIGHT_WORDS: dict[str, str] = {
    "compute": "weights stored in the compute type",
    "masters": "weights in the compute type beside fp32 masters",
}

Fp8Recipe = Literal["none", "tensorwise", "rowwise"]
"""How fp8 products of a bf16 model are scaled, in torchao's words; `plan.fp8_recipes` says which are refused."""

TYPE_FIELDS = ("weights", "accumulate", "reduce", "rounding", "fp8")
"""Fields of a plan that name types beside its precision, in the order in which they are told."""

BARE_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
"""Strategies under which `train` runs other types than the defaults."""
