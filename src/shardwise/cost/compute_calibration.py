"""Measured seconds of a CPU rank's kernels: products by shape, the others by the bytes that they move.

No table has these: they depend on the cores that a rank has, on its neighbours' use of the same memory, and on the
libraries under PyTorch. ``bench comm`` measures them on all ranks at once, as a step uses them.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from shardwise.cost.time.machine import Rates

Kernel = Literal["copy", "pointwise", "norm", "loss", "attention", "adamw"]
LONGEST_S = 3600.0  # of one measured call
Positive = Annotated[float, Field(gt=0, le=LONGEST_S)]
AHEAD: tuple[Kernel, ...] = get_args(Kernel)
BACK: tuple[Kernel, ...] = ("pointwise", "norm", "loss", "attention")


# Of a kernel's seconds in a step, where caches have other tensors, over those of one that is called again and again.
# Fitted on `benchmarks/choice`.
IN_STEP = 1.15


class MeasuredCompute(BaseModel):
    """Median seconds of kernels on one rank while all ranks compute.

    ``products`` are rows (m, k, n, seconds) of (m × k) · (k × n). ``forward`` and ``backward`` have rows (size,
    seconds) by kernel, rising: bytes moved, as the profile counts them, and for ``attention`` the rows of one causal
    head of 64. ``launch_s`` is the call of a module that does almost nothing, forward. ``comm_busy`` is the part of a
    rank's cores that a large collective uses while it lasts.
    """

    model_config = ConfigDict(frozen=True)

    precision: Literal["fp32"] = "fp32"
    threads: int = Field(ge=1)
    products: tuple[tuple[int, int, int, Positive], ...] = Field(min_length=1)
    forward: dict[Kernel, tuple[tuple[int, Positive], ...]]
    backward: dict[Kernel, tuple[tuple[int, Positive], ...]]
    launch_s: Positive
    comm_busy: float = Field(ge=0, le=1)

    def problems(self) -> list[str]:
        """List what the cost model needs and does not find: kernels, sizes above 0, a full grid of products."""
        found = []
        for name, curves, kernels in (("forward", self.forward, AHEAD), ("backward", self.backward, BACK)):
            found += [f"{name}: there is no {kernel}" for kernel in kernels if not curves.get(kernel)]
            found += [f"{name}.{kernel}: {wrong}" for kernel, rows in curves.items() if (wrong := _wrong_sizes(rows))]
        shapes = [row[:3] for row in self.products]
        full = math.prod(len({shape[axis] for shape in shapes}) for axis in range(3))
        if min(map(min, shapes)) <= 0:
            found.append("products: sizes must be above 0")
        elif not len(shapes) == len(set(shapes)) == full:
            found.append(f"products: {len(set(shapes))} shapes in {len(shapes)} rows, and their grid has {full}")
        return found

    def rates(self) -> Rates:
        """Convert to the cost model's `Rates`."""
        return Rates(
            products=tuple((float(m), float(k), float(n), IN_STEP * s) for m, k, n, s in self.products),
            forward=_curves(self.forward),
            backward=_curves(self.backward),
            launch_s=self.launch_s,
            contention=self.comm_busy,
        )


def _wrong_sizes(rows: tuple[tuple[int, float], ...]) -> str:
    sizes = [size for size, _ in rows]
    if min(sizes, default=1) <= 0:
        return "sizes must be above 0"
    return "a size is there twice" if len(set(sizes)) != len(sizes) else ""


def _curves(
    measured: dict[Kernel, tuple[tuple[int, float], ...]],
) -> tuple[tuple[str, tuple[tuple[float, float], ...]], ...]:
    curves = ((name, sorted(rows)) for name, rows in sorted(measured.items()))
    return tuple((name, tuple((float(x), IN_STEP * seconds) for x, seconds in rows)) for name, rows in curves)
