"""Kernel times: physics that must hold for every GPU, published points, and what is not known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardwise.cost.time.kernels import (
    ATTENTION_FIXED_S,
    FLASH_1,
    AttentionKernel,
    attention_s,
    known,
    launch_s,
    matmul_s,
    memory_s,
    supports,
)
from shardwise.cost.time.machine import machine_of
from shardwise.hardware.gpus import GpuSpec, find_gpu, generation_name, generation_of, generations, gpu_names
from shardwise.hardware.parse_cluster import parse_cluster

A100_PCIE = "A100-PCIe-80GB"
B200 = "B200-SXM-180GB"


def gpu(name: str) -> GpuSpec:
    found = find_gpu(name)
    assert found is not None, name
    return found


def attention(
    name: str, heads: int, rows: int, *, backward: bool = False, causal: bool = True, dim: int = 128
) -> float:
    return attention_s(
        gpu(name), batch=1, heads=heads, kv_heads=heads, head_dim=dim, rows=rows, causal=causal, backward=backward
    )


@pytest.mark.parametrize(
    ("name", "shape", "efficiency", "tolerance"),
    [  # SimuMax's operator tables
        (A100_PCIE, (4096, 8192, 28672), 0.7478, 0.04),
        (A100_PCIE, (4096, 4096, 4096), 0.7214, 0.04),
        (A100_PCIE, (4096, 1024, 4096), 0.6162, 0.12),
        (A100_PCIE, (4096, 5120, 576), 0.4968, 0.12),
        (B200, (4096, 8192, 28672), 0.4943, 0.05),
        (B200, (16384, 5120, 102400), 0.507, 0.05),
        (B200, (16384, 160, 5120), 0.158, 0.45),
    ],
)
def test_products_as_published(name: str, shape: tuple[int, int, int], efficiency: float, tolerance: float) -> None:
    measured = 2.0 * math.prod(shape) / (efficiency * gpu(name).peak_flops["bf16"])
    assert matmul_s(gpu(name), *shape) == pytest.approx(measured, rel=tolerance)


def test_attention_as_published() -> None:
    """SimuMax, A100 PCIe, 64 heads of 128 over 4096 rows: 1.187 and 1.005 of the peak when the whole square counts."""
    square = 4.0 * 64 * 4096**2 * 128 / 312e12
    assert attention(A100_PCIE, 64, 4096) == pytest.approx(square / 1.187, rel=0.06)
    assert attention(A100_PCIE, 64, 4096, backward=True) == pytest.approx(2.5 * square / 1.005, rel=0.06)


@pytest.mark.parametrize("name", gpu_names())
def test_nothing_beats_the_data_sheet(name: str) -> None:
    card = gpu(name)
    for precision, peak in card.peak_flops.items():
        if not known(card, precision):
            continue
        for m, k, n in ((8192, 8192, 8192), (65536, 16384, 28672), (256, 64, 256), (128 * 108, 512, 4096)):
            assert matmul_s(card, m, k, n, precision=precision) > 2.0 * m * k * n / peak
        for backward in (False, True):
            seconds = attention_s(
                card,
                batch=64,
                heads=64,
                kv_heads=8,
                head_dim=128,
                rows=8192,
                causal=True,
                precision=precision,
                backward=backward,
            )
            flops = 2.0 * 64 * 64 * 8192**2 * 128 * (2.5 if backward else 1)
            assert seconds > flops / card.peak_flops.get("bf16" if precision == "fp8" else precision, math.inf)
    if card.memory_bytes_per_s and generation_of(card):
        assert memory_s(card, 1e9) > 1e9 / card.memory_bytes_per_s


@pytest.mark.parametrize("name", [A100_PCIE, "H100-SXM-80GB", B200, "V100-SXM-32GB", "RTX-4090", "MI300X"])
def test_more_work_takes_longer(name: str) -> None:
    card = gpu(name)
    precision = "bf16" if supports(card, "bf16") else "fp16"
    sizes = [16, 100, 128, 500, 1024, 3000, 4096, 10_000, 16_384]
    for times in (
        [matmul_s(card, size, 4096, 4096, precision=precision) for size in sizes],
        [matmul_s(card, 4096, size, 4096, precision=precision) for size in sizes],
        [matmul_s(card, 4096, 4096, size, precision=precision) for size in sizes],
        [matmul_s(card, 512, 512, 512, precision=precision, batch=size) for size in sizes],
        [memory_s(card, 1e3 * size) for size in sizes],
        [
            attention_s(card, batch=1, heads=8, kv_heads=8, head_dim=64, rows=size, causal=True, precision=precision)
            for size in sizes
        ],
    ):
        assert times == sorted(times)
        assert times[-1] > times[0]


def test_shapes_that_fill_badly_are_less_efficient() -> None:
    card = gpu(A100_PCIE)

    def rate(m: int, k: int, n: int) -> float:
        return 2.0 * m * k * n / matmul_s(card, m, k, n)

    assert rate(4096, 4096, 4096) > 1.05 * rate(4096, 256, 4096)  # a short contraction does not get going
    assert rate(4096, 4096, 4096) > 1.5 * rate(128, 4096, 128)  # too few tiles
    assert rate(8192, 8192, 8192) > 10 * rate(1, 8192, 8192)  # memory-bound
    assert attention(A100_PCIE, 4, 2048) * 16 > 1.3 * attention(A100_PCIE, 64, 2048)  # few heads leave slots empty


def test_attention_follows_its_arithmetic() -> None:
    assert attention(A100_PCIE, 64, 8192, causal=False) == pytest.approx(2 * attention(A100_PCIE, 64, 8192), rel=0.05)
    assert 2.5 < attention(A100_PCIE, 64, 8192, backward=True) / attention(A100_PCIE, 64, 8192) < 4
    kernels: tuple[AttentionKernel, ...] = ("flash", "cudnn")
    hopper = [
        attention_s(
            gpu("H100-SXM-80GB"), batch=1, heads=64, kv_heads=8, head_dim=128, rows=8192, causal=True, kernel=kernel
        )
        for kernel in kernels
    ]
    assert hopper[0] / hopper[1] == pytest.approx(1.58, rel=0.05)
    unfused = attention_s(
        gpu(A100_PCIE), batch=1, heads=64, kv_heads=64, head_dim=128, rows=8192, causal=True, kernel="unfused"
    )
    assert unfused > 2 * attention(A100_PCIE, 64, 8192)
    per_flop = [attention(A100_PCIE, 64, 8192, dim=dim) / dim for dim in (64, 128, 192)]
    assert per_flop[1] == min(per_flop)


def test_precisions_by_generation() -> None:
    v100, a100, h100 = gpu("V100-SXM-32GB"), gpu("A100-SXM-80GB"), gpu("H100-SXM-80GB")
    assert [supports(card, "bf16") for card in (v100, a100, h100)] == [False, True, True]
    assert [supports(card, "fp8") for card in (v100, a100, h100)] == [False, False, True]
    assert not known(v100, "bf16") and known(v100, "fp16") and not known(None) and not known(h100, "int4")
    assert math.isnan(matmul_s(v100, 64, 64, 64, precision="bf16"))
    assert math.isnan(attention_s(v100, batch=1, heads=1, kv_heads=1, head_dim=64, rows=64, causal=True))
    assert (
        1.5 < matmul_s(h100, 8192, 8192, 8192) / matmul_s(h100, 8192, 8192, 8192, precision="fp8") < 2.2
    )  # fp8 is limited by power less


def test_power_limits_a_long_run() -> None:
    h100 = gpu("H100-SXM-80GB")
    weak = h100.model_copy(update={"tdp_w": 350.0})
    assert 1.1 < matmul_s(weak, 16384, 8192, 8192) / matmul_s(h100, 16384, 8192, 8192) < 1.4


def test_unknown_gpus_and_empty_work() -> None:
    nameless = GpuSpec(name="X", arch="Vapour", memory_bytes=1, memory_bytes_per_s=1e12, peak_flops={"bf16": 1e14})
    assert not known(nameless) and generation_of(nameless) is None
    assert math.isnan(matmul_s(nameless, 8, 8, 8)) and math.isnan(memory_s(nameless, 1.0)) and launch_s(nameless) > 0
    no_peak = gpu(A100_PCIE).model_copy(update={"peak_flops": {}})
    assert not known(no_peak) and math.isnan(matmul_s(no_peak, 8, 8, 8))
    assert matmul_s(gpu(A100_PCIE), 0, 8, 8) == 0.0 == attention(A100_PCIE, 8, 0)


def test_every_card_with_matrix_units_has_constants() -> None:
    missing = {name for name in gpu_names() if generation_of(gpu(name)) is None and gpu(name).arch != "Pascal"}
    assert not missing
    assert generation_name("Ampere", "GA102") == "ampere-consumer" and generation_name("Ampere", "GA100") == "ampere"
    for constants in generations().values():
        assert 0 < constants.best <= 1 and 0 < constants.stream <= 1 and 0 <= constants.wave <= 1


def test_flash_attention_1_and_a_lack_of_power() -> None:
    """The first is slower by its factor; watts count once, in what a long run sustains."""
    full, less = gpu("H100-SXM-80GB"), gpu("H100-SXM-96GB")
    size: dict[str, Any] = {"batch": 8, "heads": 32, "kv_heads": 32, "head_dim": 128, "rows": 8192, "causal": True}
    one, two = (attention_s(full, **size, kernel=kernel) - ATTENTION_FIXED_S for kernel in ("flash-1", "flash"))
    assert one / two == pytest.approx(FLASH_1)
    assert (full.tdp_w, less.tdp_w) == (700, 500)
    machines = [machine_of(parse_cluster(f"8x{name}"), "bf16") for name in ("H100-SXM-80GB", "H100-SXM-96GB")]
    fast, slow = (machine.matmul_s(16384, 8192, 8192, "bf16") for machine in machines)
    assert slow / fast == pytest.approx(math.sqrt(700 / 500), rel=0.03)
