"""The matrix of ``nvidia-smi topo -m``: read as it is printed, and what it means for a ring."""

from __future__ import annotations

import subprocess

import pytest

from shardwise.hardware import topology
from shardwise.hardware.gpus import find_gpu
from shardwise.hardware.topology import Topology, link_of, parse_topology, read_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def matrix(rows: list[str], extra: str = "") -> str:
    """A matrix as it is printed: tabs, underlined header, cells in blanks, affinities behind."""
    names = [f"GPU{i}" for i in range(len(rows))]
    header = "\t\x1b[4m" + "\t".join(names) + f"{extra}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    cells = [[" X " if cell == "X" else cell for cell in row.split()] for row in rows]
    lines = ["\t".join([name, *row, "0-47", "0", "", "N/A"]) for name, row in zip(names, cells, strict=True)]
    return "\n".join(
        [header, *lines, *(["NIC0\t" + "\t".join(["PXB"] * len(rows)) + "\t X "] if extra else []), LEGEND]
    )


def all_pairs(size: int, path: str) -> list[str]:
    return [" ".join("X" if i == j else path for j in range(size)) for i in range(size)]


DGX = matrix(all_pairs(8, "NV12"), "\tNIC0")
PCIE_BOX = matrix(["X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"])
# eight V100 without a switch: each has six links to four neighbours, the far ones over the sockets
DGX1 = matrix(
    [
        "X NV1 NV1 NV2 NV2 SYS SYS SYS",
        "NV1 X NV2 NV1 SYS NV2 SYS SYS",
        "NV1 NV2 X NV2 SYS SYS NV1 SYS",
        "NV2 NV1 NV2 X SYS SYS SYS NV1",
        "NV2 SYS SYS SYS X NV1 NV1 NV2",
        "SYS NV2 SYS SYS NV1 X NV2 NV1",
        "SYS SYS NV1 SYS NV1 NV2 X NV2",
        "SYS SYS SYS NV1 NV2 NV1 NV2 X",
    ]
)

TWO_RINGS = matrix(
    [
        "X NV4 NV4 SYS SYS SYS",
        "NV4 X NV4 SYS SYS SYS",
        "NV4 NV4 X SYS SYS SYS",
        "SYS SYS SYS X NV4 NV4",
        "SYS SYS SYS NV4 X NV4",
        "SYS SYS SYS NV4 NV4 X",
    ]
)


def read(text: str) -> Topology:
    found = parse_topology(text)
    assert found is not None
    return found


def link(text: str, gpu: str) -> tuple[str, float | None]:
    found = link_of(read(text), find_gpu(gpu))
    assert found is not None
    return found.kind, found.bytes_per_s


def test_the_matrix_is_read_without_what_surrounds_it():
    found = read(DGX)
    assert len(found.paths) == 8 and found.paths[0][:3] == ("X", "NV12", "NV12")
    assert read(PCIE_BOX).paths[1] == ("PIX", "X", "SYS", "SYS")
    assert read(matrix(["X"])).paths == (("X",),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found",
        LEGEND,
        matrix(["X FOO", "FOO X"]),
        matrix(["X N/A", "N/A X"]),
        DGX.replace("\nGPU7\t", "\nGPU9\t"),
        "\tGPU0\tGPU1\nGPU0\t X \n",
    ],
)
def test_what_is_no_matrix_is_none(text):
    assert parse_topology(text) is None


def test_rates():
    assert link(DGX, "A100-80GB") == ("nvlink", 300e9), "twelve links of 25 GB/s through the switch"
    assert link(matrix(all_pairs(8, "NV18")), "H100") == ("nvlink", 450e9)
    assert link(matrix(all_pairs(8, "NV12")), "H100") == ("nvlink", 300e9), "some of a switch's links are down"
    assert link(matrix(all_pairs(8, "NV18")), "B200") == ("nvlink", 900e9)
    assert link(matrix(all_pairs(4, "NV4")), "A100-40GB") == ("nvlink", 300e9), "four to each of three, no switch"
    assert link(matrix(all_pairs(2, "NV4")), "RTX 3090") == ("nvlink", 56.25e9), "a bridge"
    assert link(DGX1, "V100") == ("nvlink", 150e9), "a ring over NVLink is there, though some pairs have none"
    assert link(PCIE_BOX, "RTX A6000")[0] == "pcie", "bridged pairs make no ring"
    assert link(TWO_RINGS, "A100-80GB")[0] == "pcie"
    assert link(matrix(all_pairs(4, "PHB")), "RTX 4090") == ("pcie", pytest.approx(31.5e9, rel=1e-3))
    assert link_of(read(matrix(["X"])), find_gpu("A100")) is None


def test_an_unknown_gpu_has_unknown_rates():
    for text, kind in ((DGX, "nvlink"), (PCIE_BOX, "pcie")):
        found = link_of(read(text), None)
        assert found is not None and (found.kind, found.bytes_per_s) == (kind, None)


def test_the_farthest_path_is_told():
    assert read(PCIE_BOX).farthest == "SYS" and read(DGX).farthest is None
    found = link_of(read(PCIE_BOX), find_gpu("RTX A6000"))
    assert found is not None and "SYS" in found.source


def test_a_part_of_the_machine():
    part = read(PCIE_BOX).subset([2, 3])
    assert part is not None and part.paths == (("X", "NV4"), ("NV4", "X"))
    assert read(PCIE_BOX).subset([0, 4]) is None


class TestAsking:
    def answer(
        self, monkeypatch, returncode: int = 0, stdout: str = DGX, error: Exception | None = None
    ) -> list[list[str]]:
        asked: list[list[str]] = []

        def run(command, **options):
            asked.append(command)
            assert options["timeout"] and not options.get("shell")
            if error is not None:
                raise error
            return subprocess.CompletedProcess(command, returncode, stdout, "")

        monkeypatch.setattr(topology.subprocess, "run", run)
        return asked

    def test_what_it_prints_is_read(self, monkeypatch):
        asked = self.answer(monkeypatch)
        assert read_topology() == parse_topology(DGX)
        assert asked == [["nvidia-smi", "topo", "-m"]]

    @pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), subprocess.TimeoutExpired("x", 1)])
    def test_no_answer_is_none(self, monkeypatch, error):
        self.answer(monkeypatch, error=error)
        assert read_topology() is None

    def test_a_failure_is_none(self, monkeypatch):
        self.answer(monkeypatch, returncode=9)
        assert read_topology() is None
