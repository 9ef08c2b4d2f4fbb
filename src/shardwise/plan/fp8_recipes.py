"""Recipes of fp8 products: which are planned and run, and which weights of a block they convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator

from shardwise.model.profile import Op, Unit, Weight
from shardwise.plan.tensor_types import Fp8Recipe

RECIPES = ("tensorwise", "rowwise")
"""Recipes that torchao's `convert_to_float8_training` has: one scale for a tensor, or one for each row and column."""

_UNKNOWN = "what a step costs with it is unknown: no published run that predictions are compared with uses it"
UNPLANNED: dict[str, str] = {
    "blockwise": f"{_UNKNOWN}, and torchao trains with it in a prototype only (prototype.blockwise_fp8_training)",
    "mxfp8": f"{_UNKNOWN}, and torchao trains with it in a prototype only (prototype.moe_training)",
    "nvfp4": f"{_UNKNOWN}, and torchao trains with it in a prototype only (prototype.moe_training.nvfp4_training)",
}
"""Recipes of torchao that are refused, each with the reason."""

MULTIPLE = 16  # torch._scaled_mm: both sizes of the second operand (torchao/float8/config.py, pad_inner_dim)
CAPABILITY = (8, 9)  # of the first GPUs with fp8 products: Ada


def refused(recipe: object) -> str:
    """Return why a recipe of torchao is refused, with those that run; empty for any other value."""
    why = UNPLANNED.get(recipe) if isinstance(recipe, str) else None
    return f"'{recipe}' is refused: {why}; take {' or '.join(RECIPES)}" if why else ""


def _not_refused(recipe: object) -> object:
    if problem := refused(recipe):
        raise ValueError(problem)
    return recipe


PlannedRecipe = Annotated[Fp8Recipe, BeforeValidator(_not_refused)]
"""`Fp8Recipe` of a document, where a refused recipe gets the reason."""


def kept_wide(shape: Sequence[int]) -> str:
    """Return why a block's weight of ``shape`` stays in 16 bits; empty where its product is converted."""
    if len(shape) != 2:
        return "of other than two dimensions"
    if any(size % MULTIPLE for size in shape):
        return f"of a size that is no multiple of {MULTIPLE}"
    return ""


def no_products(recipe: str, what: str) -> str:
    """Say that a device has no fp8 products; ``what`` it is."""
    least = ".".join(map(str, CAPABILITY))
    return (
        f"fp8 = '{recipe}' needs a GPU of compute capability {least} or newer, and {what}; leave fp8 out, or set "
        "fp8_emulate = true for a test of correctness, which is slower than bf16"
    )


def converts(op: Op) -> bool:
    """Return whether a recipe converts an op of a block."""
    return op.kind == "matmul" and op.weight and not op.experts and not kept_wide((op.n, op.k))


def in_fp8(unit: Unit, weight: Weight) -> bool:
    """Return whether a recipe converts the product of a unit's weight."""
    return unit.kind == "block" and not weight.experts and weight.itemsize >= 2 and not kept_wide(weight.shape)
