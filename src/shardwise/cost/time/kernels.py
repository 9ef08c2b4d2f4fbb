"""Seconds of one kernel on one GPU, from its shape, by formulas fitted per GPU generation.

A matrix product is split into tiles and the tiles fill the multiprocessors in waves; a tile pays a ramp before its
first and after its last multiply (``ramp`` columns of the contraction). That is what the shape allows at full clocks;
the power limit allows only a fraction of it in a long run (``sustained_flops``), and the operands must pass through
memory. The slowest of the three counts. Flash attention is the same with blocks of 128 query rows.
``benchmarks/accuracy/fit_kernels.py`` fits the constants on published sweeps (SimuMax's operator tables of A100-PCIe
and B200) and prints their errors; a generation that no sweep covers has ``fitted=False`` and takes its rates from the
sources that ``hardware/gpus.toml`` names.

Not modelled: layouts (transposed operands differ by some 3 %), clocks that drift with temperature (the same B200 shape
is published at 0.45 and at 0.64 of the peak), hits in the L2 between kernels, kernels shorter than their launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from shardwise.hardware.gpus import Generation, GpuSpec, generation_of, generations, multiprocessors
from shardwise.plan.program import AttentionKernel

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Rows, columns, and how often the area was halved.
TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2), (64, 64, 3))
SPLITS = (1, 2, 4, 8)  # parts of the contraction, where there are too few tiles to fill the multiprocessors
BACKWARD_FLOPS = 2.5  # flash attention's backward: five products for the forward's two (FlashAttention-2)
FLASH_1 = 1.6  # seconds of FlashAttention 1 in Triton over 2's, which is 1.3 to 2.5 times as fast (arXiv 2307.08691)
QUERY_BLOCK = 128  # rows of a block of queries
ATTENTION_FIXED_S = 5e-6  # start and end of an attention kernel on the device; an estimate
# Passes over the scores beside the two products, forward and backward, with Megatron-LM's kernels of before flash
# attention: one reads and writes for scale, mask and softmax, dropout reads, writes and keeps a byte of mask; backward
# reads the gradient and what was saved, and writes, twice.
UNFUSED_PASSES = (4.5, 5.5)
ACCUMULATE_COST = 1.05  # of a product that adds into fp32 (both GPUs of the operator tables)
WIDE_HEAD = 0.80  # efficiency of heads wider than 128 against 128 (192/128 rows of the operator tables, both GPUs)
NARROW_HEAD_POWER = 0.2  # (head_dim / 128) ** this below 128: 0.87 at 64; an estimate
POWER_EXPONENT = 0.5  # of the sustained rate against watts: steps of a 500 W H100 against those of the 700 W one


def supports(gpu: GpuSpec, precision: str) -> bool:
    """Return whether the matrix units of ``gpu`` compute in ``precision``.

    bf16 from Ampere on, fp8 from Ada on.
    """
    name = generation_of(gpu)
    return name is not None and precision in generations()[name].precisions


def known(gpu: GpuSpec | None, precision: str = "bf16") -> bool:
    """Return whether kernel times are available.

    Generation, memory bandwidth and a peak for ``precision`` must be known.
    """
    return (
        gpu is not None
        and gpu.memory_bytes_per_s is not None
        and gpu.peak_flops.get(precision) is not None
        and supports(gpu, precision)
    )


def matmul_s(
    gpu: GpuSpec,
    m: int,
    k: int,
    n: int,
    *,
    precision: str = "bf16",
    batch: int = 1,
    accumulate: bool = False,
    operands: bool = True,
) -> float:
    """Seconds of ``batch`` products of (m × k) and (k × n); nan where `known` is false.

    ``accumulate`` adds into an fp32 result that is read and written, as fused weight gradients do; otherwise the result
    is written once in ``precision``, an fp8 product's in 16 bits. Casting the operands to fp8 is not included. Without
    ``operands`` the memory that operands and result pass through is left out: a convolution's never have that shape.
    """
    machine = _machine(gpu, precision)
    if machine is None:
        return math.nan
    if not (m and k and n and batch):
        return 0.0
    return _matmul_s(machine, m, k, n, batch, accumulate, machine.found.operand if operands else math.inf)


def attention_s(
    gpu: GpuSpec,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rows: int,
    causal: bool,
    precision: str = "bf16",
    backward: bool = False,
    kernel: AttentionKernel = "flash",
) -> float:
    """Seconds of attention over ``rows`` × ``rows``; nan where `known` is false.

    ``cudnn`` is cuDNN's kernel (used by Transformer Engine, and by torch on request) instead of FlashAttention-2; it
    makes a difference on Hopper. Blackwell's constants are cuDNN's already. ``flash-1`` is FlashAttention before
    version 2, in Triton or CUDA (`FLASH_1`). ``unfused`` is the program before flash attention: two products, and the
    square of scores read and written by softmax and dropout (`UNFUSED_PASSES`); causality saves nothing there. Under
    fp8 all run in bf16.
    """
    machine = _machine(gpu, "bf16" if precision == "fp8" else precision)
    if machine is None:
        return math.nan
    if not (batch and heads and rows):
        return 0.0
    return _attention_s(machine, batch, heads, kv_heads, head_dim, rows, causal, backward, kernel)


def memory_s(gpu: GpuSpec, moved_bytes: float) -> float:
    """Seconds of a kernel that moves ``moved_bytes`` (read plus write) in device memory, or nan."""
    name = generation_of(gpu)
    if name is None or gpu.memory_bytes_per_s is None:
        return math.nan
    found = generations()[name]
    return found.fixed_s + moved_bytes / (gpu.memory_bytes_per_s * found.stream)


def launch_s(gpu: GpuSpec) -> float:
    """Host seconds of one kernel in eager PyTorch: dispatch, autograd record and launch.

    It depends on the host more than on the GPU: 5 to 8 µs on the servers that carry these GPUs. A graph or a compiled
    region launches faster.
    """
    name = generation_of(gpu)
    return generations()[name].launch_s if name else 6e-6


@dataclass(frozen=True, slots=True)
class _Machine:
    found: Generation
    burst: float  # FLOP/s that a shape without losses reaches at full clocks
    sustained: float  # sustained FLOP/s of a long run, limited by power
    peak: float
    memory: float  # bytes/s of the data sheet
    itemsize: int
    multiprocessors: int
    key: int  # hash of the rest; a machine is a key of the caches below

    def __hash__(self) -> int:
        return self.key


def _machine(gpu: GpuSpec, precision: str) -> _Machine | None:
    name = generation_of(gpu)
    peak, bandwidth = gpu.peak_flops.get(precision), gpu.memory_bytes_per_s
    if name is None or peak is None or bandwidth is None or precision not in generations()[name].precisions:
        return None
    measured = gpu.measured_flops.get(precision)
    return _machine_of(name, gpu.name, precision, peak, measured, bandwidth, gpu.tdp_w, gpu.sustained_flops)


@lru_cache(maxsize=256)
def _machine_of(
    generation: str,
    name: str,
    precision: str,
    peak: float,
    measured: float | None,
    bandwidth: float,
    watts: float | None,
    lasting: float | None,
) -> _Machine:
    found = generations()[generation]
    best = min(peak, measured) if measured else peak * found.best
    sustained = best
    if found.sustained_flops is not None and precision != "fp32":
        power = (watts / found.watts) ** POWER_EXPONENT if watts else 1.0
        held = lasting or found.sustained_flops * power
        sustained = min(best, held * (found.sustained_fp8 if precision == "fp8" else 1.0))
    return _Machine(
        found=found,
        burst=min(peak, best * found.burst),
        sustained=sustained,
        peak=peak,
        memory=bandwidth,
        itemsize=ITEMSIZE[precision],
        multiprocessors=multiprocessors(name) or found.multiprocessors,
        key=hash((generation, name, precision, peak, measured, bandwidth, watts, lasting)),
    )


@lru_cache(maxsize=65536)
def _matmul_s(machine: _Machine, m: int, k: int, n: int, batch: int, accumulate: bool, operand: float) -> float:
    found, cores = machine.found, machine.multiprocessors
    # A convolution's contraction may be shorter than the ramp, which was fitted on long ones: the next tile is loaded
    # meanwhile. An assumption, seen on ResNet-50 alone.
    start = min(found.ramp, k) if operand == math.inf else found.ramp
    shortest = math.inf
    for rows, columns, halvings in TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch / cores
        area = rows * columns * (1 + found.halving * halvings)
        for parts in SPLITS if tiles < 2 else (1,):
            waves = tiles * parts
            waves = found.wave * math.ceil(waves) + (1 - found.wave) * max(waves, 1.0)
            ramp = start * (1 if parts == 1 else 2)  # and the parts are added up
            shortest = min(shortest, waves * area * (k / parts + ramp))
    shape = 2 * shortest * cores / machine.burst
    sustained = 2.0 * m * k * n * batch / machine.sustained
    if accumulate:
        shape, sustained = shape * ACCUMULATE_COST, sustained * ACCUMULATE_COST
    result = 8 if accumulate else max(machine.itemsize, 2)
    moved = batch * ((m * k + k * n) * machine.itemsize + m * n * result) / (machine.memory * operand)
    longest = max(shape, sustained, moved)
    # a maximum with a rounded corner
    rounded = ((shape / longest) ** 8 + (sustained / longest) ** 8 + (moved / longest) ** 8) ** 0.125
    return found.fixed_s + longest * float(rounded)


@lru_cache(maxsize=16384)
def _attention_s(
    machine: _Machine,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rows: int,
    causal: bool,
    backward: bool,
    kernel: AttentionKernel,
) -> float:
    found = machine.found
    moved = 2.0 * batch * (heads + kv_heads) * rows * head_dim * machine.itemsize * (2 if backward else 1)
    bandwidth = machine.memory * found.stream
    if kernel == "unfused":
        scores = batch * heads * rows * rows * machine.itemsize
        products = 4 if backward else 2
        compute = products * _matmul_s(machine, rows, head_dim, rows, batch * heads, False, found.stream)
        return compute + (moved + UNFUSED_PASSES[1 if backward else 0] * scores) / bandwidth
    share = (0.5 if causal else 1.0) * (BACKWARD_FLOPS if backward else 1.0)
    flops = 4.0 * batch * heads * rows * rows * head_dim * share
    width = WIDE_HEAD if head_dim > QUERY_BLOCK else (head_dim / QUERY_BLOCK) ** NARROW_HEAD_POWER
    forward_backward = found.cudnn if kernel == "cudnn" and found.cudnn else (found.flash, found.flash_backward)
    efficiency = forward_backward[1 if backward else 0] * width / (FLASH_1 if kernel == "flash-1" else 1.0)
    longest = flops / (batch * heads * math.ceil(rows / QUERY_BLOCK)) * (2.0 if causal else 1.0)
    compute = (flops + found.idle * longest * machine.multiprocessors) / (machine.peak * efficiency)
    return ATTENTION_FIXED_S + max(compute, moved / bandwidth)
