"""Measured seconds of a CPU rank's kernels: products by shape, the others by the bytes that they move.

No table has these: they depend on the cores that a rank has, on its neighbours' use of the same memory, and on the
libraries under PyTorch. ``bench comm`` measures them on all ranks at once, as a step uses them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.cost.time.machine import Rates

Kernel = Literal["copy", "pointwise", "norm", "loss", "attention", "adamw"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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

    def rates(self) -> Rates:
        """Convert to the cost model's `Rates`."""
        return Rates(
            products=tuple((float(m), float(k), float(n), IN_STEP * s) for m, k, n, s in self.products),
            forward=_curves(self.forward),
            backward=_curves(self.backward),
            launch_s=self.launch_s,
            contention=self.comm_busy,
        )


def _curves(
    measured: dict[Kernel, tuple[tuple[int, float], ...]],
) -> tuple[tuple[str, tuple[tuple[float, float], ...]], ...]:
    curves = ((name, sorted(rows)) for name, rows in sorted(measured.items()))
    return tuple((name, tuple((float(x), IN_STEP * seconds) for x, seconds in rows)) for name, rows in curves)
