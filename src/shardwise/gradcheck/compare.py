"""Compare the gradients of one process with those of a strategy: plain functions.

`compare` measures, parameter by parameter. `shardwise.gradcheck.causes` explains differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict

TOLERANCE = 1e-9
FLOOR = 1e-5  # of the model's largest gradient: smaller ones are compared with that, not with their own rounding

Gradients = Mapping[str, torch.Tensor | None]
"""Full gradients in float64 by parameter name, in the model's order; ``None`` where there is none."""


class Difference(BaseModel):
    """Difference of one parameter, with the ``factor`` if one number explains all elements.

    It is the number by which the reference is multiplied to give the found gradient. ``error`` is the largest
    difference of an element over the largest element of the reference; infinite where a gradient is missing.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    name: str
    error: float
    factor: float | None = None
    missing: bool = False


class GradientVerdict(BaseModel):
    """Verdict on one strategy; ``first`` is the first differing parameter in the model's order."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    ok: bool
    error: float
    norm_error: float
    loss_error: float
    tolerance: float
    first: Difference | None = None
    differing: int = 0
    explanations: tuple[str, ...] = ()


def compare(reference: Gradients, found: Gradients) -> list[Difference]:
    """Compare every parameter of ``reference`` that is a key of ``found``, in its order."""
    floor = FLOOR * max((float(g.abs().max()) for g in reference.values() if g is not None and g.numel()), default=0.0)
    return [_difference(name, full, found[name], floor) for name, full in reference.items() if name in found]


def _difference(name: str, expected: torch.Tensor | None, found: torch.Tensor | None, floor: float) -> Difference:
    if expected is None and found is None:
        return Difference(name=name, error=0.0)
    if found is None:
        lost = expected is not None and bool(expected.count_nonzero())
        return Difference(name=name, error=float("inf") if lost else 0.0, missing=lost)
    if expected is None:
        expected = torch.zeros_like(found)
    if expected.shape != found.shape:
        return Difference(name=name, error=float("inf"))
    if not found.numel():
        return Difference(name=name, error=0.0)
    scale = max(float(expected.abs().max()), floor, 1e-300)
    worst = float((found - expected).abs().max()) / scale
    return Difference(name=name, error=worst if worst == worst else float("inf"), factor=factor_of(expected, found))


def factor_of(expected: torch.Tensor, found: torch.Tensor, within: float = 1e-6) -> float | None:
    """Return the factor f with ``found`` = f · ``expected``; ``None`` where there is none."""
    power = float((expected * expected).sum())
    if power == 0.0:
        return None
    factor = float((expected * found).sum()) / power
    rest = float((found - factor * expected).norm())
    return factor if rest <= within * power**0.5 * max(abs(factor), 1e-3) else None


def judge(
    differences: Sequence[Difference],
    *,
    norm: tuple[float, float],
    loss: tuple[float, float],
    clipped_error: float,
    tolerance: float,
) -> GradientVerdict:
    """Combine the measurements into a verdict; ``norm`` and ``loss`` are (found, expected)."""
    norm_error, loss_error = max(_relative(*norm), clipped_error), _relative(*loss)
    wrong = [d for d in differences if not d.error <= tolerance]
    return GradientVerdict(
        ok=not wrong and norm_error <= tolerance and loss_error <= tolerance,
        error=max((d.error for d in differences), default=0.0),
        norm_error=norm_error,
        loss_error=loss_error,
        tolerance=tolerance,
        first=wrong[0] if wrong else None,
        differing=len(wrong),
    )


def _relative(found: float, expected: float) -> float:
    error = abs(found - expected) / max(abs(expected), 1e-300)
    return error if error == error else float("inf")
