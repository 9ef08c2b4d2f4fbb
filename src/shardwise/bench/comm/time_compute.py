"""Seconds of a CPU rank's kernels, measured on all ranks at once: see `cost.compute_calibration`.

Each kernel is what a training step calls, with autograd's own work and allocation in it: a product as a linear layer
computes it, a gated activation with its residual, an RMS norm as transformers writes it, cross-entropy, causal
attention, fused AdamW. Rounds go over all kernels before the next one begins, so that drift affects all alike.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwise.cost.compute_calibration import Kernel, MeasuredCompute
from shardwise.cost.time.machine import HEAD_DIM
from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.hardware.cpu import cores_here

ROWS = (64, 256, 1024)
WIDTHS = (64, 256, 1024)
ELEMENTS = (2**12, 2**15, 2**18, 2**20, 2**22)
LENGTHS = (64, 128, 256, 512, 1024)
HEADS, WIDTH = 4, 256
STEPPED = (2**14, 2**17, 2**20, 2**22)
ROUNDS, LEAST_S = 7, 3e-3
COMM_ELEMENTS = 2**20


@dataclass
class Cell:
    """One kernel at one size, with its samples: seconds forward and, where it has one, backward."""

    kernel: Kernel | Literal["product", "launch"]
    size: tuple[int, ...]
    forward: Callable[[], object]
    inputs: tuple[torch.Tensor, ...] = ()
    samples: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._once()
        self._number = max(1, int(LEAST_S / max(sum(self._once()), 1e-7)))

    def sample(self) -> None:
        """Add the mean of a few calls."""
        ahead, back = zip(*(self._once() for _ in range(self._number)), strict=True)
        self.samples.append((sum(ahead) / self._number, sum(back) / self._number))

    @property
    def median_s(self) -> tuple[float, float]:
        """Median of the samples, forward and backward."""
        ahead, back = zip(*self.samples, strict=True)
        return statistics.median(ahead), statistics.median(back)

    def _once(self) -> tuple[float, float]:
        started = time.perf_counter()
        found = self.forward()
        between = time.perf_counter()
        if not isinstance(found, torch.Tensor) or not self.inputs:
            return between - started, 0.0
        given = torch.ones_like(found)
        between_s, started_back = between - started, time.perf_counter()
        torch.autograd.grad(found, self.inputs, given)
        return between_s, time.perf_counter() - started_back


def time_compute(ranks: Ranks, log: Callable[[str], None] = lambda text: None) -> MeasuredCompute:
    """Measure the kernels of this rank while the others measure theirs; the slowest rank's are returned. Collective."""
    log("products, memory-bound kernels and attention, on all ranks at once")
    cells = list(_cells())
    for _ in range(ROUNDS):
        if ranks.control is not None:
            dist.barrier(ranks.control)
        for cell in cells:
            cell.sample()
    turns = max(1.0, ranks.local_world_size * torch.get_num_threads() / cores_here())  # a median does not show them
    forward: dict[Kernel, list[tuple[int, float]]] = {}
    backward: dict[Kernel, list[tuple[int, float]]] = {}
    products, launch_s = [], 0.0
    for cell in cells:
        ahead, back = (turns * seconds for seconds in cell.median_s)
        if cell.kernel == "product":
            products.append((*cell.size, ahead))
        elif cell.kernel == "launch":
            launch_s = ahead
        else:
            each = HEADS if cell.kernel == "attention" else 1
            forward.setdefault(cell.kernel, []).append((cell.size[0], ahead / each))
            if cell.inputs:
                backward.setdefault(cell.kernel, []).append((cell.size[0], back / each))
    mine = MeasuredCompute.model_validate(
        {
            "threads": torch.get_num_threads(),
            "products": products,
            "forward": forward,
            "backward": backward,
            "launch_s": launch_s,
            "comm_busy": _comm_busy(ranks),
        }
    )
    everyone = [MeasuredCompute.model_validate_json(text) for text in gather_text(mine.model_dump_json(), ranks)]
    return max(everyone, key=lambda one: sum(row[3] for row in one.products))


def _cells() -> Iterator[Cell]:
    for rows, depth, columns in itertools.product(ROWS, WIDTHS, WIDTHS):
        operands = torch.randn(rows, depth), torch.randn(columns, depth)
        yield Cell("product", (rows, depth, columns), partial(functional.linear, *operands))
    for elements in ELEMENTS:
        rows = elements // WIDTH
        one, two = (torch.randn(rows, WIDTH, requires_grad=True) for _ in range(2))
        scale, labels = torch.ones(WIDTH, requires_grad=True), torch.arange(rows) % WIDTH
        yield Cell("copy", (3 * 4 * elements,), partial(torch.add, one.detach(), two.detach()))
        yield Cell("pointwise", (8 * 4 * elements,), partial(_gated, one, two), (one, two))
        yield Cell("norm", (2 * 4 * elements,), partial(_rms_norm, one, scale), (one, scale))
        loss = partial(functional.cross_entropy, one, labels, reduction="sum")
        yield Cell("loss", (5 * 4 * elements,), loss, (one,))
    for length in LENGTHS:
        q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
        attention = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        yield Cell("attention", (length,), attention, (q, k, v))
    for elements in STEPPED:
        weights = [nn.Parameter(torch.zeros(elements // 8)) for _ in range(8)]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-3)
        yield Cell("adamw", (28 * elements,), torch.optim.AdamW(weights, lr=1e-9, fused=True).step)
    yield Cell("launch", (1,), partial(_Shift(), torch.ones(8, requires_grad=True)))


class _Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


def _gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An activation, its product and a residual: 8 elements moved for each."""
    return functional.silu(x) * y + x


def _rms_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _comm_busy(ranks: Ranks) -> float:
    """CPU seconds over seconds and threads of a large all_reduce; 0 of a rank alone."""
    if ranks.world_size < 2:
        return 0.0
    message = torch.zeros(COMM_ELEMENTS)
    dist.all_reduce(message)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(3):
        dist.all_reduce(message)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return min(1.0, cpu / wall / torch.get_num_threads())
