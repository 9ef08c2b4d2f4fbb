"""`Machine`: speed of compute, memory and communication, from the catalogue or measured.

A GPU's values come from `cost.kernels` and `cost.collectives`. A device without a row in the hardware table (the CPU
with gloo among them) has only the values that a probe measured: `Rates`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwise.cost.time import collective_time as collectives
from shardwise.cost.time import kernels
from shardwise.cost.time.collective_time import Calibration, CollectiveKind, Group
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import GpuSpec, constants_of
from shardwise.plan.program import AttentionKernel

# 16-bit operands whose rows do not start on 16 bytes take other kernels: padding GPT-2's vocabulary of 50257 to 50304
# is known for a quarter off a small model's step (nanoGPT), of which the head is a third. An estimate from that.
MISALIGNED = {1: 1.7, 2: 1.4, 4: 1.15}
# For generations without a published step (`Generation.in_step`): the middle of those there are.
IN_STEP_OTHERS = (1.05, 1.15, 1.1, 1.0)
HEAD_DIM = 64  # of the attention that `Rates` has
POWER_EXPONENT = 0.5  # of the rate lost to a lack of power; from the 500 W H100 against the 700 W one
FP8_CASTS = 1.0  # casts for each operand under torch.compile; torchao's table of Llama 3.1 8B on 8 H100
FP8_FUSED_CASTS = 0.25  # the same of kernels fused by hand, whose norms and activations write fp8; an estimate
FP8_CAST_BYTES = 5.0  # an element cast to fp8 is read twice in 2 bytes (maximum, cast) and written once in 1
# An eager cast of torchao 0.18 (float8_utils.py: tensor_to_amax, to_fp8_saturated; float8_training_tensor.py): abs 2+2,
# max 2, to fp32 2+4, times the scale 4+4, clamp 4+4, to fp8 4+1. Of an fp32 weight it is as much: 4+4, 4, none, ...
FP8_EAGER_CAST_BYTES = 33.0
FP8_EAGER_LAUNCHES = 10  # kernels of one eager cast: these, and the scale from the maximum in float64
FP8_SHARD_CAST_BYTES = 21.0  # of an fp32 shard whose scale is known: times the scale, clamp, to fp8
# Seconds of rowwise products over those of tensorwise ones, which have another kernel (CUTLASS's, not cuBLAS's). From
# torchao's table of Llama 3.1 8B on 8 H100 (torchao/float8/README.md: 6768 tokens/s against 7690, and 6150 in bf16): a
# step 1.136 times as long, 1.148 with this. Taken for other GPUs, too; of MI300X it is 1.05 there, and 1.12 with this.
FP8_ROWWISE = 1.2


Curve = tuple[tuple[float, float], ...]  # (size, seconds), rising


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured seconds of a device's kernels, in fp32: see `cost.compute_calibration`.

    ``products`` are (m, k, n, seconds) on a full grid of shapes. ``forward`` and ``backward`` are curves by kernel over
    the bytes that it moves, for attention over the rows of one head of `HEAD_DIM`. ``launch_s`` starts an operation.
    ``contention`` is the fraction of hidden communication that slows the computation; 1 where both run on the same
    cores and the link is as fast as they are.
    """

    products: tuple[tuple[float, float, float, float], ...]
    forward: tuple[tuple[str, Curve], ...]
    backward: tuple[tuple[str, Curve], ...]
    launch_s: float = 0.0
    contention: float = 1.0

    def product_s(self, m: float, k: float, n: float) -> float:
        """Seconds of a product, at the FLOP rate between those of the shapes around it."""
        grid, rate = _grid(self.products), 0.0
        places = [_place(axis, size) for axis, size in zip(grid.axes, (m, k, n), strict=True)]
        for (h, a), (i, b), (j, c) in itertools.product(*places):
            rate += a * b * c * grid.log_rates[h, i, j]
        return 2.0 * m * k * n / math.exp(rate)

    def kernel_s(self, kernel: str, size: float, *, backward: bool = False) -> float:
        """Seconds of a kernel at ``size``, on the curve, and no less than its start.

        Beyond its end they are in proportion, those of attention a line and a square through the last two sizes.
        """
        curve = dict(self.backward if backward else self.forward)[kernel]
        if size <= curve[0][0]:
            return curve[0][1]
        index = next((i for i, (x, _) in enumerate(curve) if x >= size), 0)
        if not index:
            return (_attention_beyond if kernel == "attention" else _beyond)(curve, size)
        (x, y), (to_x, to_y) = curve[index - 1 : index + 1]
        part = math.log(size / x) / math.log(to_x / x)
        return float(y * (to_y / y) ** part)


def _beyond(curve: Curve, size: float) -> float:
    return curve[-1][1] * size / curve[-1][0]


def _attention_beyond(curve: Curve, rows: float) -> float:
    """Seconds a · rows + b · rows², neither below 0; of two cores, 4 times the last size was within 5 % of it."""
    last, last_s = curve[-1]
    before, before_s = curve[-2] if len(curve) > 1 else (0.0, 0.0)
    square = (last_s / last - before_s / before) / (last - before) if before else last_s / last**2
    square = min(max(square, 0.0), last_s / last**2)
    return (last_s / last - square * last) * rows + square * rows**2


class _Grid(NamedTuple):
    axes: tuple[tuple[float, ...], ...]
    log_rates: dict[tuple[int, int, int], float]


@lru_cache(maxsize=8)
def _grid(products: tuple[tuple[float, float, float, float], ...]) -> _Grid:
    axes = tuple(tuple(sorted({row[axis] for row in products})) for axis in range(3))
    log_rates = {
        (axes[0].index(m), axes[1].index(k), axes[2].index(n)): math.log(2.0 * m * k * n / seconds)
        for m, k, n, seconds in products
    }
    return _Grid(axes, log_rates)


def _place(axis: tuple[float, ...], size: float) -> list[tuple[int, float]]:
    """Return the neighbours of ``size`` on an axis and their weights, by logarithm; the end's beyond it."""
    index = bisect.bisect_left(axis, size)
    if index == 0 or index == len(axis):
        return [(min(index, len(axis) - 1), 1.0)]
    part = math.log(size / axis[index - 1]) / math.log(axis[index] / axis[index - 1])
    return [(index - 1, 1.0 - part), (index, part)]


@dataclass(frozen=True, slots=True)
class Machine:
    """Device that runs the plan: a GPU of the table, or measured rates, which take precedence."""

    cluster: ClusterSpec
    gpu: GpuSpec | None
    rates: Rates | None
    calibration: Calibration | None = None

    def matmul_s(self, m: float, k: float, n: float, precision: str, *, batch: int = 1, operands: bool = True) -> float:
        """Seconds of ``batch`` products (m × k) · (k × n); ``operands`` as in `kernels.matmul_s`."""
        if not (m and k and n):
            return 0.0
        if self.rates is not None:
            return batch * self.rates.product_s(m, k, n)
        assert self.gpu is not None
        m, k, n = math.ceil(m), math.ceil(k), math.ceil(n)
        seconds = kernels.matmul_s(self.gpu, m, k, n, precision=precision, batch=batch, operands=operands)
        seconds *= in_step(self.gpu)[0]
        limit = lasting_flops(self.gpu) if precision in ("bf16", "fp16") else None
        if limit is not None:
            seconds = larger(seconds, 2.0 * batch * m * k * n / limit)
        if precision not in self.gpu.measured_flops and not _sustains(self.gpu):
            seconds *= power_factor(self.gpu)
        if precision in ("bf16", "fp16"):
            seconds *= MISALIGNED.get(math.gcd(k, n, 8), 1.0)
        return seconds

    def cast_s(self, elements: float, *, compiled: bool = True, fused: bool = False) -> float:
        """Seconds to cast ``elements`` of operands to fp8; ``fused`` by kernels that are written for it."""
        casts = FP8_CAST_BYTES * (FP8_FUSED_CASTS if fused else FP8_CASTS)
        return self.memory_s((casts if compiled or fused else FP8_EAGER_CAST_BYTES) * elements)

    def attention_s(
        self,
        *,
        batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        causal: bool,
        precision: str,
        backward: bool,
        kernel: AttentionKernel = "flash",
    ) -> float:
        """Seconds of one attention over all rows, forward or backward."""
        if self.rates is not None:
            of_one = self.rates.kernel_s("attention", rows, backward=backward) * head_dim / HEAD_DIM
            return batch * heads * of_one * (1.0 if causal else 2.0)
        assert self.gpu is not None
        return (
            power_factor(self.gpu)
            * in_step(self.gpu)[2 if kernel == "unfused" else 1]
            * kernels.attention_s(
                self.gpu,
                batch=batch,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                rows=rows,
                causal=causal,
                precision=precision,
                backward=backward,
                kernel=kernel,
            )
        )

    def memory_s(self, moved_bytes: float) -> float:
        """Seconds of a kernel that moves ``moved_bytes`` and does almost no arithmetic."""
        if moved_bytes <= 0:
            return 0.0
        if self.rates is not None:
            return self.rates.kernel_s("copy", moved_bytes)
        assert self.gpu is not None
        return kernels.memory_s(self.gpu, moved_bytes) * in_step(self.gpu)[2]

    def op_s(self, kind: str, moved_bytes: float, backward_moves: float) -> tuple[float, float]:
        """Seconds of a memory-bound op forward and backward, of which backward moves so many times as much."""
        if self.rates is None or not moved_bytes:
            ahead = self.memory_s(moved_bytes)
            return ahead, ahead * backward_moves
        kernel = kind if kind in ("norm", "loss", "pointwise") else "copy"
        if kernel == "copy":
            return self.memory_s(moved_bytes), self.memory_s(moved_bytes * backward_moves)
        ahead, back = (self.rates.kernel_s(kernel, moved_bytes, backward=after) for after in (False, True))
        return ahead, back

    def optimizer_s(self, moved_bytes: float) -> float:
        """Seconds of an optimizer step that moves ``moved_bytes``."""
        if self.rates is None or not moved_bytes:
            return self.memory_s(moved_bytes)
        return self.rates.kernel_s("adamw", moved_bytes)

    def launch_s(self) -> float:
        """Seconds of host time that eager PyTorch needs to start one operation."""
        if self.rates is not None:
            return self.rates.launch_s
        assert self.gpu is not None
        return kernels.launch_s(self.gpu)

    def tp_factor(self) -> float:
        """Ratio of a tensor-parallel collective's seconds in a step to those in an isolated sweep."""
        return in_step(self.gpu)[3] if self.gpu is not None and self.rates is None else 1.0

    def collective_s(self, kind: CollectiveKind, message_bytes: float, ranks: int, per_node: int) -> float:
        """Seconds of a collective over ``ranks``, of which ``per_node`` share a node.

        Message sizes are those of nccl-tests.
        """
        if ranks <= 1 or message_bytes <= 0:
            return 0.0
        group = Group(ranks, min(ranks, per_node))
        sharing = max(1, self.cluster.devices_per_node // group.per_node) if group.per_node < ranks else 1
        return collectives.collective_s(
            kind, message_bytes, group, self.cluster, sharing=sharing, calibration=self.calibration
        )

    def gather_s(self, message_bytes: float, ranks: int, per_node: int) -> float:
        """Seconds to gather ``message_bytes`` of sharded weights, by the collective that does it here."""
        kind = collectives.sharded_gather(self.cluster, self.calibration, ranks)
        return self.collective_s(kind, message_bytes, ranks, per_node)

    def reduce_scatter_s(self, message_bytes: float, ranks: int, per_node: int) -> float:
        """Seconds to reduce ``message_bytes`` of sharded gradients, by the collective that does it here."""
        kind = collectives.sharded_reduction(self.cluster, self.calibration)
        return self.collective_s(kind, message_bytes, ranks, per_node)


def in_step(gpu: GpuSpec) -> tuple[float, float, float, float]:
    """Factors in a training step: products, attention, memory-bound kernels, tp collectives."""
    found = constants_of(gpu)
    return IN_STEP_OTHERS if found is None or found.in_step is None else found.in_step


def lasting_flops(gpu: GpuSpec) -> float | None:
    """Sustained 16-bit FLOP/s of products in a step; None where the step does not limit them."""
    found = constants_of(gpu)
    if found is None or found.lasting_flops is None or found.lasting_watts is None:
        return None
    watts = gpu.tdp_w or found.lasting_watts
    return float(found.lasting_flops * (watts / found.lasting_watts) ** kernels.POWER_EXPONENT)


def larger(one_s: float, other_s: float) -> float:
    """Smooth maximum of two seconds, with a rounded corner where they meet."""
    longest = max(one_s, other_s)
    return float(longest * ((one_s / longest) ** 8 + (other_s / longest) ** 8) ** 0.125)


def _sustains(gpu: GpuSpec) -> bool:
    """Return whether the sustained rate of products already says what power allows."""
    found = constants_of(gpu)
    return found is not None and found.sustained_flops is not None


def power_factor(gpu: GpuSpec) -> float:
    """Slowdown of matrix work on a card with less power than its peak needs; 1 where unknown."""
    found, peak = constants_of(gpu), gpu.peak_flops.get("bf16")
    if found is None or not found.full_power_flops or not found.full_power_watts or peak is None or not gpu.tdp_w:
        return 1.0
    full = found.full_power_flops / found.full_power_watts
    return max(1.0, float((peak / gpu.tdp_w / full) ** POWER_EXPONENT))


def machine_of(
    cluster: ClusterSpec, precision: str, rates: Rates | None = None, calibration: Calibration | None = None
) -> Machine:
    """Build the machine that ``cluster`` describes.

    Raises:
        PlanError: the device's speed in ``precision`` is not in the hardware table and was not measured.
    """
    if rates is None and (cluster.gpu is None or not kernels.known(cluster.gpu, precision)):
        raise PlanError(
            f"'{cluster.device_name}' has no known speed in {precision}, so no time can be predicted; name a GPU of "
            "the table, take another precision, or measure the machine and pass its rates"
        )
    return Machine(cluster=cluster, gpu=cluster.gpu, rates=rates, calibration=calibration)
