"""Clusters from strings, files and this machine."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from shardwise.errors import PlanError
from shardwise.hardware import cluster
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.hardware.gpus import find_gpu
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.hardware.topology import parse_topology
from tests.unit.test_topology import DGX, PCIE_BOX


def problems(text: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        parse_cluster(text)
    return list(caught.value.problems)


def rate(text: str) -> tuple[str, float | None]:
    link = parse_cluster(text).link
    assert link is not None
    return link.kind, link.bytes_per_s


def network(text: str) -> float | None:
    link = parse_cluster(text).network
    return None if link is None else link.bytes_per_s


@pytest.mark.parametrize(
    ("text", "name", "nodes", "devices"),
    [
        ("8xA100-80GB", "A100-SXM-80GB", 1, 8),
        ("2x8xH100-SXM", "H100-SXM-80GB", 2, 8),
        (" 2 x 8 x NVIDIA H100 80GB HBM3 ", "H100-SXM-80GB", 2, 8),
        ("4×RTX 4090", "RTX-4090", 1, 4),
        ("1xL4", "L4", 1, 1),
        ("H200", "H200-SXM-141GB", 1, 1),
        ("64xH100", "H100-SXM-80GB", 8, 8),
        ("2048x8xH100-SXM", "H100-SXM-80GB", 2048, 8),
        ("1x16xV100", "V100-SXM-16GB", 1, 16),
        ("72xGB200", "GB200-186GB", 1, 72),
    ],
)
def test_numbers_and_names(text, name, nodes, devices):
    found = parse_cluster(text)
    assert (found.device, found.device_name, found.nodes, found.devices_per_node) == ("cuda", name, nodes, devices)
    assert found.world_size == nodes * devices
    assert found.gpu == find_gpu(name) and found.gpu is not None
    assert (
        found.device_memory_bytes == found.gpu.memory_bytes and found.price_per_device_hour == found.gpu.price_per_hour
    )
    assert found.host_memory_bytes is None and found.cores_per_node is None


def test_what_joins_the_devices_where_nothing_is_said():
    assert rate("8xA100-80GB") == ("nvlink", 300e9)
    assert rate("8xMI300X") == ("xgmi", 448e9)
    assert rate("4xRTX4090") == ("pcie", pytest.approx(31.5e9, rel=1e-3))
    assert rate("8xH100-PCIe")[0] == "pcie", "a bridge is bought apart"
    assert parse_cluster("1xA100").link is None


def test_links_that_are_said():
    assert rate("4xRTX4090@pcie4") == ("pcie", pytest.approx(31.5e9, rel=1e-3))
    assert rate("4xRTX4090@pcie4x8") == ("pcie", pytest.approx(15.75e9, rel=1e-3))
    assert rate("8xH100@pcie") == ("pcie", pytest.approx(63e9, rel=1e-3))
    assert rate("8xA100@NVLink") == ("nvlink", 300e9)
    assert rate("4xA6000@nvlink3") == ("nvlink", 300e9)
    assert rate("2xA6000@nvlink") == ("nvlink", 56.25e9), "the bridge of a pair"
    assert rate("8xMI300X@xgmi") == ("xgmi", 448e9)


def test_networks():
    assert network("2x8xH100") == 50e9
    assert network("8xH100") is None, "one node has none"
    assert network("2x4xRTX4090") is None, "the table has no typical node for it"
    assert network("2x8xA100-80GB@nvlink/ib100") == 12.5e9, "for each device"
    assert network("2x8xA100-80GB@nvlink/1600g") == 25e9, "for each node"
    assert network("2x8xA100/roce200") == 25e9
    assert network("2x4xRTX4090@pcie4/eth10") == 1.25e9
    assert "800 Gbit/s for each node of 4" in (parse_cluster("2x4xA100/800g").network or pytest.fail()).source


def test_cpu():
    found = parse_cluster("2xcpu")
    assert found == detect("cpu", 2)
    assert parse_cluster("CPU") == detect("cpu")
    assert parse_cluster("3x2xcpu") == detect("cpu", 2).model_copy(update={"nodes": 3})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xA100-60GB", ["GPU 'A100-60GB' is not in the hardware table", "A100-SXM-80GB"]),
        ("8xRTX4009", ["did you mean 'RTX-4090'?"]),
        ("", ["is not understood", "2x8xH100-SXM"]),
        ("0xA100", ["must be 1 or more"]),
        ("12xH100", ["a node of H100-SXM-80GB holds 8", "2x6xH100-SXM-80GB"]),
        ("8xA100@nvlonk", ["'@nvlonk' is no link", "did you mean 'nvlink'?"]),
        ("8xA100@", ["'@' is no link", "pcie3 to pcie6"]),
        ("8xA100@pcie9", ["'@pcie9' is no link"]),
        ("8xA100@pcie4x7", ["'@pcie4x7' is no link"]),
        ("8xA100@nvlink7", ["'@nvlink7' is no link"]),
        ("8xA100@xgmi", ["only between AMD's MI GPUs"]),
        ("4xA6000@nvlink", ["NVLink only as a bridge between pairs of cards"]),
        ("2xRTX4090@nvlink", ["has no NVLink in the table"]),
        ("2x8xA100/foo", ["'/foo' is no network", "1600g"]),
        ("2x8xA100/ib", ["'/ib' is no network"]),
        ("2x8xA100/ib0", ["above 0"]),
        ("2x8xA100/ib9999", ["at most 3200"]),
        ("2xcpu@pcie", ["not planned between CPU ranks"]),
        ("8x8x8xA100", ["'8xA100'"]),
    ],
)
def test_what_cannot_be_is_refused(text, says):
    (problem,) = problems(text)
    assert all(word in problem for word in says), problem
    assert f"'{text}'" in problem


def test_all_problems_at_once():
    assert len(problems("8xA100-60GB@nvlonk/foo")) == 3


class TestFile:
    def write(self, tmp_path: Path, text: str, name: str = "c.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    def test_a_known_gpu_with_own_numbers(self, tmp_path):
        text = (
            'gpu = "H100-SXM"\nnodes = 2\ndevices_per_node = 8\nnetwork = "ib200"\n'
            "host_memory_bytes = 2e12\ncores_per_node = 192\nprice_per_device_hour = 2.2\n"
        )
        found = parse_cluster(self.write(tmp_path, text))
        expected = parse_cluster("2x8xH100-SXM/ib200")
        own = {"host_memory_bytes": 2 * 10**12, "cores_per_node": 192, "price_per_device_hour": 2.2}
        assert found == expected.model_copy(update=own)

    def test_an_own_gpu(self, tmp_path):
        gpu = {"name": "X1", "memory_bytes": 48e9, "peak_flops": {"bf16": 1e14}, "price_per_hour": 1.5}
        link = {"kind": "pcie", "bytes_per_s": 2e10}
        text = json.dumps({"gpu": gpu, "devices_per_node": 4, "link": link, "network": {"bytes_per_s": 1e9}})
        found = parse_cluster(self.write(tmp_path, text, "c.json"))
        assert (found.device_name, found.device_memory_bytes, found.price_per_device_hour) == ("X1", 48 * 10**9, 1.5)
        assert found.gpu is not None and found.gpu.peak_flops == {"bf16": 1e14} and found.gpu.memory_bytes_per_s is None
        assert found.link is not None and (found.link.kind, found.link.bytes_per_s) == ("pcie", 2e10)
        assert found.network is not None and (found.network.kind, found.network.bytes_per_s) == ("network", 1e9)

    def test_less_memory_than_the_gpu_has(self, tmp_path):
        found = parse_cluster(self.write(tmp_path, 'gpu = "A100"\ndevice_memory_bytes = 40e9\n'))
        assert found.device_memory_bytes == 40 * 10**9

    def test_a_gpu_like_another(self, tmp_path):
        text = 'devices_per_node = 2\n[gpu]\nname = "A100 with less"\nlike = "A100-80GB"\nmemory_bytes = 60e9\n'
        found = parse_cluster(self.write(tmp_path, text))
        base = find_gpu("A100-80GB")
        assert found.gpu is not None and base is not None
        assert (found.gpu.name, found.gpu.memory_bytes) == ("A100 with less", 60 * 10**9)
        assert found.gpu.peak_flops == base.peak_flops and found.link == base.nvlink

    def test_all_problems_at_once(self, tmp_path):
        text = (
            'nodez = 2\ndevices_per_node = 0\nlink = "nvlunk"\nnetwork = {bytes_per_s = -1}\n'
            'price_per_device_hour = "x"\nhost_memory_bytes = true\n[gpu]\nname = "Foo"\ntdp = 3\npeak_flops = 3\n'
        )
        path = self.write(tmp_path, text)
        found = problems(path)
        assert len(found) == 9 and all(path in problem for problem in found)
        text = "\n".join(found)
        for says in ("'nodez' (did you mean 'nodes'?)", "needs memory_bytes", "'tdp' (did you mean 'tdp_w'?)"):
            assert says in text
        for says in ("gpu.peak_flops", "devices_per_node is 0", "nvlunk", "is -1", "'x'", "host_memory_bytes is True"):
            assert says in text

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("nodes = 1", "gpu must be a name"),
            ('gpu = "A100-60GB"', "not in the hardware table"),
            ('gpu = {name = "x", like = "y", memory_bytes = 1}', "gpu.like"),
            ('gpu = "A100"\nlink = 3', "link must be a word"),
            ('gpu = "A100"\nnetwork = 3', "network must be a word"),
            ("gpu = ", "is not readable"),
        ],
    )
    def test_wrong_files(self, tmp_path, text, says):
        assert says in "\n".join(problems(self.write(tmp_path, text)))

    def test_no_file(self, tmp_path):
        assert "No such file" in problems(str(tmp_path / "none.toml"))[0]
        assert "a table with" in problems(self.write(tmp_path, "[1]", "c.json"))[0]


class TestThisMachine:
    @pytest.fixture
    def gpus(self, monkeypatch):
        found = [("NVIDIA A100-SXM4-80GB", 80 * 2**30)] * 8
        monkeypatch.setattr(cluster, "_nvml_devices", lambda: list(found))

    @pytest.mark.usefixtures("gpus")
    def test_the_row_and_the_links_are_known(self, monkeypatch):
        monkeypatch.setattr(cluster, "read_topology", lambda: parse_topology(DGX))
        found = detect()
        assert found.gpu == find_gpu("A100-80GB") and found.gpu is not None
        assert found.device_name == "NVIDIA A100-SXM4-80GB" and found.devices_per_node == 8
        assert found.device_memory_bytes == found.gpu.memory_bytes, "not what NVML counts with it"
        assert found.link is not None and (found.link.kind, found.link.bytes_per_s) == ("nvlink", 300e9)
        assert found.price_per_device_hour is None, "a machine of one's own is not rented"
        assert "nvidia-smi" in found.link.source and found.host_memory_bytes == psutil.virtual_memory().total

    @pytest.mark.usefixtures("gpus")
    def test_only_visible_gpus_count(self, monkeypatch):
        monkeypatch.setattr(cluster, "read_topology", lambda: parse_topology(PCIE_BOX))
        link = detect(visible=["2", "3"]).link
        assert link is not None and link.kind == "nvlink", "those two have a bridge"
        link = detect(visible=["0", "3"]).link
        assert link is not None and link.kind == "pcie" and "SYS" in link.source
        link = detect(visible=["GPU-aa", "GPU-bb"]).link
        assert link is not None and "nvidia-smi" not in link.source, "which ones is not known, so the table speaks"
        assert detect(visible=["1"]).link is None

    @pytest.mark.usefixtures("gpus")
    def test_without_a_matrix_the_table_speaks(self, monkeypatch):
        monkeypatch.setattr(cluster, "read_topology", lambda: None)
        link = parse_cluster("auto").link
        assert link is not None and (link.kind, link.bytes_per_s) == ("nvlink", 300e9)

    def test_an_unknown_gpu_stays_unknown(self, monkeypatch):
        monkeypatch.setattr(cluster, "_nvml_devices", lambda: [("Some GPU", 7)] * 2)
        monkeypatch.setattr(cluster, "read_topology", lambda: None)
        found = detect()
        assert found == ClusterSpec(
            device="cuda",
            device_name="Some GPU",
            devices_per_node=2,
            device_memory_bytes=7,
            host_memory_bytes=found.host_memory_bytes,
            cores_per_node=found.cores_per_node,
        )

    def test_nothing_is_asked_where_there_is_no_gpu(self, monkeypatch):
        monkeypatch.setattr(cluster, "_nvml_devices", list)
        monkeypatch.setattr(cluster, "read_topology", lambda: pytest.fail("asked"))
        assert detect("auto").device == "cpu"
