"""Bytes of the state that a live optimizer keeps of one parameter on one rank: exact, and compared with tensors."""

from __future__ import annotations

import math

from shardwise.cost.memory.local_shapes import QUANTISED_BLOCK, QUANTISED_FROM
from shardwise.plan.workload import Workload

FP32 = 4
LEAN = ("adamw8bit", "adafactor")  # whose state is not some tensors of the parameter's shape and dtype


def lean_state_bytes(
    shape: tuple[int, ...], held: tuple[int, ...], fullest: tuple[int, ...], itemsize: int, workload: Workload
) -> int:
    """Bytes of the state with dimensions of ``adamw8bit`` or ``adafactor``; counters are left out.

    ``shape`` is the whole parameter's, ``held`` that of the rows on this rank, ``fullest`` of those on the rank that
    has most. 8-bit AdamW: two bytes an element and two fp32 scales for each block of 256, with room for as many blocks
    on each rank as the fullest has; fp32 where the whole parameter has less than 4096 elements. Adafactor: a matrix
    keeps a number for each row here and one for each column (on every rank), more dimensions keep those of their last
    two, a vector one for each element, in the parameter's dtype.
    """
    elements = math.prod(held)
    if workload.optimizer == "adamw8bit":
        if math.prod(shape) < QUANTISED_FROM:
            return 2 * elements * FP32
        return 2 * (elements + math.ceil(math.prod(fullest) / QUANTISED_BLOCK) * FP32)
    if len(shape) < 2:
        return elements * itemsize
    whole_columns = len(shape) == 2 and shape[0] > 1
    columns = shape[-1] if whole_columns else math.prod(held[:-2]) * min(held[-2], 1) * held[-1]
    return (math.prod(held[:-1]) + columns) * itemsize


def lean_dtypes(shapes: list[tuple[int, ...]], dtypes: set[str], workload: Workload) -> set[str]:
    """The dtypes of that state for parameters of these shapes and dtypes."""
    if workload.optimizer == "adafactor":
        return dtypes
    return {"float32"} | ({"uint8"} if any(math.prod(shape) >= QUANTISED_FROM for shape in shapes) else set())
