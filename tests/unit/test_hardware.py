"""The hardware table: found by the names people, drivers and publications use, and sane in every cell."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from shardwise.hardware import gpus as hardware
from shardwise.hardware.gpus import find_gpu, generations, gpu_names, pcie_bytes_per_s, unknown_gpu_message
from shardwise.units import GIB

NAMES = [
    ("A100", "A100-SXM-80GB"),
    ("a100-80gb", "A100-SXM-80GB"),
    ("A100-80", "A100-SXM-80GB"),
    ("a100sxm480gb", "A100-SXM-80GB"),
    ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
    ("A100-80GB (capped to A6000)", "A100-SXM-80GB"),
    ("A100-SXM-40GB", "A100-SXM-40GB"),
    ("A100-40GB", "A100-SXM-40GB"),
    ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
    ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
    ("A100-PCIe-80GB", "A100-PCIe-80GB"),
    ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
    ("H100", "H100-SXM-80GB"),
    ("h100_sxm", "H100-SXM-80GB"),
    ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
    ("H100-SXM-80GB (DGX H100)", "H100-SXM-80GB"),
    ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
    ("NVIDIA H100 NVL", "H100-NVL-94GB"),
    ("H100-96GB", "H100-SXM-96GB"),
    ("H100-SXM-95GB", "H100-SXM-96GB"),
    ("H100-SXM-94GB-HBM2e (lower TDP)", "H100-SXM-96GB"),
    ("H100-SXM-96GB-HBM2e-500W", "H100-SXM-96GB"),
    ("H200-SXM-141GB", "H200-SXM-141GB"),
    ("NVIDIA H200", "H200-SXM-141GB"),
    ("NVIDIA GH200 480GB", "GH200-96GB"),
    ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
    ("B200-SXM", "B200-SXM-180GB"),
    ("NVIDIA B200", "B200-SXM-180GB"),
    ("GB200 (184.3 GiB)", "GB200-186GB"),
    ("NVIDIA B300 SXM6 AC", "B300-SXM-288GB"),
    ("V100-SXM2-16GB", "V100-SXM-16GB"),
    ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
    ("Tesla P100-PCIE-16GB", "P100-PCIe-16GB"),
    ("Tesla T4", "T4"),
    ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ("RTX4090", "RTX-4090"),
    ("4090", "RTX-4090"),
    ("NVIDIA GeForce RTX 3090", "RTX-3090"),
    ("rtx 3090 ti", "RTX-3090-Ti"),
    ("NVIDIA GeForce GTX 1080 Ti", "GTX-1080-Ti"),
    ("RTX A6000", "RTX-A6000"),
    ("A6000", "RTX-A6000"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Blackwell"),
    ("NVIDIA A10", "A10"),
    ("NVIDIA A10G", "A10G"),
    ("L4", "L4"),
    ("L40", "L40"),
    ("NVIDIA L40S", "L40S"),
    ("AMD Instinct MI300X OAM", "MI300X"),
    ("mi250x", "MI250X"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
    ("NVIDIA GeForce RTX 4070 Ti", "RTX-4070-Ti"),
    ("RTX-4060-Ti-16GB", "RTX-4060-Ti-16GB"),
    ("NVIDIA TITAN RTX", "Titan-RTX"),
]
# what PyTorch reports, GiB, for what was seen in logs; drivers differ by a few tenths
REPORTED = [
    ("A100-80GB", 79.25),
    ("A100-40GB", 39.39),
    ("H100", 79.19),
    ("H100-96GB", 94.99),
    ("H200", 139.8),
    ("B200", 178.35),
    ("V100-16GB", 15.77),
    ("V100-32GB", 31.73),
    ("T4", 14.6),
    ("A10G", 22.0),
    ("RTX 4090", 23.65),
    ("RTX 3090", 23.65),
    ("GB200", 184.3),
]


@pytest.mark.parametrize(("written", "name"), NAMES)
def test_names_as_they_are_written(written, name):
    found = find_gpu(written)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "written",
    [
        "",
        "gpu",
        "A100-60GB",
        "A100X",
        "H100-SXM-64GB",
        "RTX-4060-Ti-8GB",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "RTX 4070 SUPER",
        "H200 NVL",
        "h1000",
        "V100-NVL",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "RTX 6000",
        "3080 Ti",
    ],
)
def test_another_card_is_not_taken_for_one_of_the_table(written):
    assert find_gpu(written) is None


@pytest.mark.parametrize("name", gpu_names())
def test_every_row_is_whole(name):
    found = find_gpu(name)
    assert found is not None and found.name == name, "a name of the table finds its own row"
    assert found.source and found.memory_source and found.arch and found.chip and found.compute_capability
    assert 7.5 * GIB < found.memory_bytes < 300 * GIB
    assert found.memory_bytes_per_s is not None and 2e11 < found.memory_bytes_per_s < 1e13
    assert found.peak_flops and all(1e13 * 0.7 < peak < 1e16 for peak in found.peak_flops.values())
    assert all(best < found.peak_flops[precision] for precision, best in found.measured_flops.items())
    assert all(
        rate is None or 15e9 < rate < 1e12 for rate in (link.bytes_per_s for link in (found.nvlink, found.pcie) if link)
    )
    assert found.network is None or (found.network.source and 1e9 < (found.network.bytes_per_s or 0) <= 100e9)
    assert found.tdp_w is None or 50 < found.tdp_w <= 1500
    prices = [found.price_per_hour, found.spot_price_per_hour, found.purchase_price]
    assert bool(found.price_source) == any(price is not None for price in prices)
    assert not found.spot_price_per_hour or found.spot_price_per_hour < (found.price_per_hour or 0)


@pytest.mark.parametrize(("name", "gib"), REPORTED)
def test_memory_is_what_pytorch_reports(name, gib):
    found = find_gpu(name)
    assert found is not None and -0.25 < found.memory_bytes / GIB - gib < 0.01, "the lower of what was seen"


def test_units_and_missing_cells():
    found = find_gpu("A100-80GB")
    assert found is not None
    assert found.memory_bytes_per_s == 2039e9 and found.peak_flops["bf16"] == 312e12 and "fp8" not in found.peak_flops
    assert found.measured_flops == {"bf16": 271.2e12}
    assert found.nvlink is not None and found.nvlink.bytes_per_s == 300e9 and found.bridge is None
    assert found.pcie is not None and found.pcie.bytes_per_s == pytest.approx(31.5e9, rel=1e-3)
    assert found.network is not None and found.network.bytes_per_s == 25e9, "8 x 200 Gbit/s for 8 GPUs"
    card = find_gpu("RTX 4090")
    assert card is not None and card.nvlink is None and card.network is None
    old = find_gpu("V100")
    assert old is not None and "bf16" not in old.peak_flops and old.peak_flops["fp16"] == 125e12
    grace = find_gpu("GB200")
    assert grace is not None and grace.pcie is not None and grace.pcie.bytes_per_s == 450e9


def test_cards_have_a_bridge_and_no_nvlink():
    for name in ("A100-PCIe-80GB", "H100-PCIe", "RTX A6000", "A40", "RTX 3090"):
        found = find_gpu(name)
        assert found is not None and found.nvlink is None and found.bridge is not None


def test_pcie():
    assert pcie_bytes_per_s(4) == pytest.approx(31.5e9, rel=1e-3)
    assert pcie_bytes_per_s(3, 8) == pytest.approx(7.88e9, rel=1e-3)


def test_messages():
    text = unknown_gpu_message("A100-60GB")
    assert "'A100-60GB'" in text and "known are A100-SXM-80GB, A100-SXM-40GB" in text and "memory_bytes" in text
    assert "did you mean 'RTX-4090'?" in unknown_gpu_message("RTX 4009")
    far = unknown_gpu_message("zzz")
    assert f"shardwise plan --list gpus prints its {len(gpu_names())} names" in far and len(far) < 200


def test_the_table_is_read_once_and_numbers_are_plain():
    assert find_gpu("A100") is find_gpu("A100-SXM")
    document = tomllib.loads((Path(hardware.__file__).parent / "gpus.toml").read_text())
    assert len(document["gpus"]) == len(gpu_names()) > 40
    for name, row in (*document["gpus"].items(), *document["generations"].items()):
        for key, value in row.items():
            if not isinstance(value, str | list | bool):
                assert value > 0, (name, key)


def test_every_key_of_the_table_is_read():
    document = tomllib.loads((Path(hardware.__file__).parent / "gpus.toml").read_text())
    read = {*hardware.GpuSpec.model_fields} - {
        "name",
        "peak_flops",
        "measured_flops",
        "nvlink",
        "pcie",
        "network",
        "bridge",
    }
    read |= {"keys", "form", "sizes", "multiprocessors", "pcie_generation", "pcie_lanes", "link_kind", "network_source"}
    read |= {f"{link}_bytes_per_s" for link in ("link", "bridge", "host", "network")}
    read |= {f"{p}_flops" for p in ("fp32", "tf32", "bf16", "fp16", "fp8", "measured_bf16", "measured_fp8")}
    assert {key for row in document["gpus"].values() for key in row} <= read
    archs = {found.arch for found in generations().values()} | {"pascal"}
    assert {row["arch"].lower() for row in document["gpus"].values()} <= archs
