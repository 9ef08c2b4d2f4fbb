"""Types of a parameter's tensors under a plan: at rest, of its gradient, as it is reduced, and of its state.

Each takes the type that the parameter is built in or rests in. Only bf16 plans store anything in the compute type;
integers and 8-bit numbers stay as they are.
"""

from __future__ import annotations

from shardwise.model.facts import ParameterSpec
from shardwise.plan.plan import Plan

LOW = "bfloat16"
_WIDE = ("float32", "float64")
_ITEMSIZES = {LOW: 2, "float32": 4}


def stores_low(plan: Plan) -> bool:
    """Return whether weights rest in the compute type."""
    return plan.weights != "fp32" and plan.precision == "bf16"


def stored_dtype(plan: Plan, dtype: str) -> str:
    """Return the type of a parameter at rest."""
    return LOW if stores_low(plan) and dtype in _WIDE else dtype


def gradient_dtype(plan: Plan, dtype: str) -> str:
    """Return the type of its gradient at rest: its own, or fp32 beside masters."""
    wide = stores_low(plan) and plan.weights == "masters" and plan.accumulate == "fp32"
    return "float32" if wide and dtype in (LOW, *_WIDE) else stored_dtype(plan, dtype)


def reduced_dtype(plan: Plan, dtype: str) -> str:
    """Return the type in which its gradient is added up over ranks."""
    if plan.precision != "bf16" or dtype not in (LOW, *_WIDE):
        return dtype
    if plan.reduce == "compute":
        return LOW
    return "float32" if stores_low(plan) else dtype


def state_dtype(plan: Plan, dtype: str) -> str:
    """Return the type of the optimizer's state with dimensions."""
    wide = stores_low(plan) and plan.weights == "masters"
    return "float32" if wide and dtype in (LOW, *_WIDE) else stored_dtype(plan, dtype)


def extra_states(plan: Plan) -> int:
    """Count the tensors of state beside the optimizer's own: a master, or the bits that Kahan summation keeps."""
    return int(stores_low(plan) and (plan.weights == "masters" or plan.rounding == "kahan"))


def bytes_of(parameter: ParameterSpec, dtype: str) -> int:
    """Return the bytes of an element of a parameter's tensor of type ``dtype``."""
    return parameter.itemsize if dtype == parameter.dtype else _ITEMSIZES[dtype]
