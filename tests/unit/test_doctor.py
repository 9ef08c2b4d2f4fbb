"""What `shardwise doctor` makes of facts: recorded machines, and hosts with one thing wrong at a time."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.doctor.cgroup import Allowed, allowed
from shardwise.doctor.check import Check
from shardwise.doctor.checks.disk import inspect_disk
from shardwise.doctor.checks.ranks import check_ranks_test
from shardwise.doctor.checks.versions import numbers
from shardwise.doctor.machine_facts import Limit, _visible, inspect_host
from shardwise.doctor.rank_self_test import RankAnswer, RanksTest, judged
from shardwise.doctor.run_checks import examine
from shardwise.doctor.table import print_doctor, summary, to_document
from shardwise.environment import settings
from shardwise.errors import UserError
from shardwise.hardware.topology import explain_path, explain_topology, nearest_nic, parse_cores
from shardwise.measure.gpu.gpu_load import DeviceLoad
from shardwise.measure.gpu.xids import Xid
from shardwise.units import GIB, MIB
from tests.machines import MACHINES, plenty, recorded

HEALTHY = ("8xa100-sxm", "8xh100-hgx", "8xv100-cube", "2xrtx3090-nvlink", "1xt4")


def wrong(facts) -> dict[str, Check]:
    """The checks that are not ok, by name; two of one name are joined by their order."""
    found: dict[str, Check] = {}
    for check in examine(facts):
        if check.level != "ok":
            found[check.name if check.name not in found else f"{check.name} too"] = check
    return found


def only(facts, name: str, level: str) -> Check:
    found = wrong(facts)
    assert list(found) == [name], found
    assert found[name].level == level and found[name].text
    assert found[name].fix or level == "unknown", "what is wrong has a fix"
    return found[name]


@pytest.mark.parametrize("machine", HEALTHY)
def test_nothing_is_wrong_with_a_healthy_machine(machine):
    assert not wrong(recorded(machine))


def test_nothing_is_wrong_with_a_healthy_host():
    assert not wrong(plenty())


class TestGpus:
    def test_a_hot_card(self):
        found = wrong(recorded("1xh100-hot"))
        assert set(found) == {"clocks", "sharing"}, "a hardware slowdown that heat explains is said once"
        check = found["clocks"]
        assert check.level == "error" and "too hot" in check.text and "cool it" in check.fix
        assert any("660 of 1755 MHz" in line and "90 °C" in line for line in check.evidence)
        assert "4242" in found["sharing"].text and found["sharing"].level == "warning"

    def test_a_bad_riser(self):
        found = wrong(recorded("1xrtx3090-gen1"))
        assert set(found) == {"PCIe", "PCIe too"}
        assert "x8 of x16" in found["PCIe"].text and "PCIe 1" in found["PCIe too"].text

    def test_an_idle_link_is_no_finding(self):
        facts = recorded("1xt4")
        assert facts.gpus.gpus[0].pcie_generation == 1 and "PCIe" not in wrong(facts)
        busy = {"nvmlDeviceGetUtilizationRates": {"gpu": 90, "memory": 1}, "nvmlDeviceGetCurrentClocksEventReasons": 0}
        only(recorded("1xt4", nvml=busy), "PCIe", "warning")
        resting = {**busy, "nvmlDeviceGetUtilizationRates": {"gpu": 3, "memory": 0}}
        assert not wrong(recorded("1xt4", nvml=resting)), "nothing holds the clock, and still nobody works"

    def test_an_old_slot(self):
        check = only(recorded("1xt4", nvml={"nvmlDeviceGetGpuMaxPcieLinkGeneration": 4}), "PCIe", "warning")
        assert "slot of PCIe 3" in check.text

    @pytest.mark.parametrize(
        ("bits", "level", "says"),
        [
            (0x80, "error", "power brake"),
            (0x8, "error", "slowed down"),
            (0x20, "error", "driver lowers"),
            (0x4, None, ""),
        ],
    )
    def test_what_holds_the_clock(self, bits, level, says):
        facts = recorded("8xh100-hgx", nvml={"nvmlDeviceGetCurrentClocksEventReasons": bits})
        if level is None:
            assert not wrong(facts), "a power cap is how a loaded GPU runs"
        else:
            assert says in only(facts, "clocks", level).text

    def test_almost_hot(self):
        facts = recorded("1xt4", nvml={"nvmlDeviceGetTemperature": {"0": 90}})
        assert "within 5 °C" in only(facts, "clocks", "warning").text
        assert not wrong(recorded("1xt4", nvml={"nvmlDeviceGetTemperature": {"0": 87}}))

    def test_a_lowered_power_limit(self):
        facts = recorded("8xa100-sxm", nvml={"nvmlDeviceGetEnforcedPowerLimit": 300000})
        check = only(facts, "clocks", "warning")
        assert "300 W of 400 W" in check.text and "-pl 400" in check.fix

    def test_application_clocks(self):
        nvml = {"nvmlDeviceGetCurrentClocksEventReasons": 2, "nvmlDeviceGetClockInfo": {"1": 1000, "2": 1593}}
        assert "nvidia-smi -rac" in only(recorded("8xa100-sxm", nvml=nvml), "clocks", "warning").fix

    @pytest.mark.parametrize(
        ("nvml", "level", "says"),
        [
            ({"nvmlDeviceGetRemappedRows": [0, 1, 1, 0]}, "warning", "wait to be remapped"),
            ({"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]}, "error", "could not be remapped"),
            ({"nvmlDeviceGetTotalEccErrors": {"1,0": 3}}, "error", "3 uncorrectable"),
        ],
    )
    def test_memory_errors(self, nvml, level, says):
        assert says in only(recorded("1xa100-mig", nvml={"nvmlDeviceGetMigMode": [0, 0], **nvml}), "health", level).text

    def test_xids(self):
        log = (Xid(bus="0000:5d:00", number=79, times=2), Xid(bus="0000:3b:00", number=31))
        check = only(recorded("8xh100-hgx", xids=log), "health", "error")
        assert "fallen off the bus" in check.text and "2 ×" in check.text

    def test_a_log_that_may_not_be_read_is_said(self):
        health = next(c for c in examine(recorded("8xh100-hgx", xids=None)) if c.name == "health")
        assert health.level == "ok" and "may not be read" in health.text
        blind = only(recorded("2xrtx3090-nvlink", xids=None), "health", "unknown")
        assert "count no memory errors" in blind.text

    def test_mig(self):
        assert "MIG" in only(recorded("1xa100-mig"), "devices", "warning").text

    def test_a_closed_gpu(self):
        assert only(recorded("1xt4", nvml={"nvmlDeviceGetComputeMode": 2}), "sharing", "error").fix == "nvidia-smi -c 0"

    def test_fewer_gpus_than_ranks(self):
        assert "3 ranks" in only(recorded("2xrtx3090-nvlink", ranks=3), "devices", "error").text

    def test_unequal_gpus(self):
        facts = recorded("2xrtx3090-nvlink")
        first = facts.gpus.gpus[0].model_copy(update={"name": "NVIDIA GeForce RTX 3080"})
        mixed = facts.model_copy(update={"gpus": facts.gpus.model_copy(update={"gpus": (first, facts.gpus.gpus[1])})})
        assert "slowest sets the pace" in only(mixed, "devices", "warning").text

    def test_no_gpu_under_a_torch_for_cuda(self):
        assert "built for CUDA 12.6" in only(plenty(torch_cuda="12.6"), "devices", "warning").text


class TestDriver:
    def test_an_old_driver(self):
        check = only(recorded("1xt4", torch_cuda="13.0"), "driver", "error")
        assert "needs driver 580" in check.text and check.evidence

    def test_torch_without_cuda(self):
        assert "without CUDA" in only(recorded("1xt4", torch_cuda=None), "driver", "error").text

    def test_no_kernels_for_the_card(self):
        assert "sm_75" in only(recorded("1xt4", torch_archs=("sm_80", "sm_90")), "driver", "error").text
        assert not wrong(recorded("1xt4", torch_archs=("sm_70", "sm_90"))), "kernels of the same major number run"
        assert not wrong(recorded("1xt4", torch_archs=("sm_90", "compute_60"))), "PTX is compiled for newer cards"
        assert wrong(recorded("1xt4", torch_archs=("compute_90",)))
        assert wrong(recorded("8xa100-sxm", torch_archs=("sm_86",))), "kernels of a higher minor number do not run"

    def test_switches_that_were_not_set_up(self):
        facts = recorded("8xh100-hgx", cuda_problem="Error 802: system not yet initialized")
        assert "fabricmanager" in only(facts, "driver", "error").fix
        other = recorded("8xh100-hgx", cuda_problem="CUDA unknown error")
        assert "fabricmanager" not in only(other, "driver", "error").fix

    def test_an_unknown_generation(self):
        assert "not known" in only(recorded("1xt4", torch_cuda="99.0"), "driver", "unknown").text


class TestVersions:
    @pytest.mark.parametrize(
        ("changes", "level"),
        [
            ({"nccl": (2, 29, 2)}, "error"),
            ({"nccl": (2, 28, 9), "machine": "aarch64"}, "warning"),
            ({"kernel": "4.18.0-553.el8"}, "warning"),
            ({"versions": {"torch": "2.10.1"}}, "error"),
        ],
    )
    def test_known_to_be_broken(self, changes, level):
        check = only(recorded("8xh100-hgx", **changes), "versions", level)
        assert any("source:" in line for line in check.evidence)

    def test_what_is_not_broken(self):
        for changes in ({"nccl": (2, 28, 9)}, {"nccl": (2, 29, 3), "machine": "aarch64"}, {"kernel": "5.5.1"}):
            assert not wrong(recorded("8xh100-hgx", **changes))

    def test_two_nccls(self):
        both = {"torch": "2.13.0", "nvidia-nccl-cu12": "2.29.3", "nvidia-nccl-cu13": "2.29.3"}
        assert "both installed" in only(plenty(versions=both), "versions", "warning").text

    def test_numbers(self):
        assert numbers("2.13.0+cpu") == (2, 13, 0) and numbers("6.18.44-fc") == (6, 18, 44) and numbers("x") == ()


class TestLinks:
    def test_cards_without_peer_access(self):
        found = wrong(recorded("4xrtx4090"))
        assert set(found) == {"topology", "topology too"}
        assert "cannot read each other's memory" in found["topology"].text and "SYS" not in found["topology"].text
        assert "across CPU sockets" in found["topology too"].text

    def test_a_ring_over_nvlink_needs_no_other_peers(self):
        facts = recorded("8xv100-cube")
        peers = {pair: pair != "0-5" for pair in facts.gpus.peers or {}}
        assert not wrong(facts.model_copy(update={"gpus": facts.gpus.model_copy(update={"peers": peers})}))

    def test_a_bridge_is_explained(self):
        facts = recorded("2xrtx3090-nvlink")
        assert facts.topology is not None
        assert explain_topology(facts.topology) == ["NV4: 4 NVLinks (0-1)"]

    def test_switches_and_network_cards_are_explained(self):
        facts = recorded("8xh100-hgx")
        assert facts.topology is not None
        lines = explain_topology(facts.topology)
        assert lines[0] == "NV18: 18 NVLinks (all 8 GPUs)"
        assert "GPU 5: nearest network card mlx5_5, PIX (one PCIe switch between them)" in lines
        nic = nearest_nic(facts.topology, 6)
        assert nic is not None and (nic.name, nic.device, nic.paths[0]) == ("NIC6", "mlx5_6", "SYS")

    def test_every_path_is_explained(self):
        assert explain_path("NV1") == "1 NVLink" and "host bridge" in explain_path("PHB")
        assert len({explain_path(path) for path in ("PIX", "PXB", "PHB", "NODE", "SYS")}) == 5
        with pytest.raises(KeyError):
            explain_path("FOO")

    def test_affinities_are_read(self):
        facts = recorded("8xa100-sxm")
        assert facts.topology is not None
        assert facts.topology.cores[0] == "48-63,176-191" and facts.topology.numa == tuple("33117755")
        assert parse_cores("0-2,8") == {0, 1, 2, 8} and parse_cores("N/A") is None and parse_cores(None) is None
        part = facts.topology.subset([6, 7])
        assert part is not None and part.numa == ("5", "5") and part.nics[6].paths == ("PXB", "PXB")

    def test_a_far_network_card(self):
        facts = recorded("8xa100-sxm")
        assert facts.topology is not None
        nics = facts.topology.nics[:2]
        far = facts.model_copy(
            update={"topology": type(facts.topology)(facts.topology.paths, nics, facts.topology.cores)}
        )
        check = only(far, "network cards", "warning")
        assert "GPU 2, 3, 4, 5, 6, 7: SYS" in check.text

    def test_cores_far_from_the_gpus(self):
        check = only(recorded("8xh100-hgx", core_numbers=tuple(range(32))), "core affinity", "warning")
        assert "GPU 4, 5, 6, 7" in check.text

    def test_a_matrix_that_is_not_understood_is_unknown(self):
        only(recorded("8xa100-sxm", topology=None), "topology", "unknown")

    def test_a_missing_fabric(self):
        facts = recorded("8xh100-hgx")
        paths = tuple(tuple("X" if i == j else "SYS" for j in range(8)) for i in range(8))
        none = facts.model_copy(update={"topology": type(facts.topology)(paths)})  # type: ignore[call-arg]
        found = wrong(none)
        assert any(check.level == "error" and "matrix shows none" in check.text for check in found.values())

    def test_links_that_are_down(self):
        facts = recorded("8xa100-sxm")
        paths = tuple(tuple("X" if i == j else "NV8" if 3 in (i, j) else "NV12" for j in range(8)) for i in range(8))
        down = facts.model_copy(update={"topology": type(facts.topology)(paths)})  # type: ignore[call-arg]
        assert "fewer NVLinks" in only(down, "topology", "warning").text

    def test_nvlink_for_some_only(self):
        facts = recorded("4xrtx4090", nvml={"nvmlDeviceGetName": "NVIDIA RTX A6000"})
        rows = ("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
        pairs = type(facts.topology)(tuple(tuple(row.split()) for row in rows))  # type: ignore[call-arg]
        peers = facts.gpus.model_copy(update={"peers": None})
        found = wrong(facts.model_copy(update={"topology": pairs, "gpus": peers}))
        assert "NVLink joins some" in found["topology"].text


class TestHost:
    @pytest.mark.parametrize(
        ("name", "level", "changes", "says"),
        [
            ("cores", "warning", {"cores": 1}, "take turns"),
            ("cores", "warning", {"cores": 4, "settings": {"OMP_NUM_THREADS": "4"}}, "set it to 2"),
            ("cores", "warning", {"allowed": Allowed(cores=1.5)}, "container"),
            ("cores", "warning", {"busy_cores": 100.0}, "100.0 of 256"),
            ("memory", "error", {"available_bytes": 800 * MIB}, "before it does anything"),
            ("memory", "warning", {"available_bytes": 3 * GIB}, "1.50 GiB for each"),
            ("memory", "warning", {"allowed": Allowed(memory_bytes=8 * GIB, memory_used_bytes=5 * GIB)}, "container"),
            ("open files", "warning", {"nofile": Limit(soft=1024, hard=1048576)}, "ulimit -n 65536"),
            ("open files", "warning", {"nofile": Limit(soft=1024, hard=4096)}, "hard limit is 4096"),
            ("open files", "error", {"nofile": Limit(soft=64, hard=None)}, "ulimit -n"),
            ("processes", "warning", {"nproc": Limit(soft=100, hard=None)}, "ulimit -u"),
            ("processes", "warning", {"allowed": Allowed(processes=128)}, "pids-limit"),
            ("shared memory", "warning", {"shm_bytes": 512 * MIB, "shm_free_bytes": 512 * MIB}, "--shm-size"),
            ("shared memory", "error", {"shm_free_bytes": 1 * MIB}, "bus error"),
            ("shared memory", "error", {"shm_bytes": None, "shm_free_bytes": None}, "not there"),
        ],
    )
    def test_one_thing_wrong(self, name, level, changes, says):
        limits = {key: changes.pop(key) for key in ("nofile", "nproc") if key in changes}
        facts = plenty(limits={**plenty().limits, **limits}, **changes)
        check = only(facts, name, level)
        assert says in f"{check.text} {check.fix}"

    def test_a_containers_default_shared_memory_is_too_small_for_gpus(self):
        small = {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}
        only(recorded("8xa100-sxm", **small), "shared memory", "error")
        only(plenty(**small), "shared memory", "warning")

    def test_locked_memory_matters_with_rdma(self):
        limits = {**plenty().limits, "memlock": Limit(soft=65536, hard=65536)}
        assert not wrong(plenty(limits=limits))
        check = only(plenty(limits=limits, rdma=("mlx5_0",)), "locked memory", "error")
        assert "mlx5_0" in check.text and "memlock=-1" in check.fix

    def test_core_dumps_larger_than_the_disk(self):
        limits = {**plenty().limits, "core": Limit(soft=None, hard=None)}
        disk = plenty().disk
        assert disk is not None
        tight = disk.model_copy(update={"free_bytes": 1500 * GIB})
        only(plenty(limits=limits, disk=tight), "core dumps", "warning")
        assert not wrong(plenty(limits=limits, disk=tight, core_pattern="|/usr/lib/systemd/systemd-coredump"))
        assert not wrong(plenty(limits=limits))

    def test_too_few_cores_for_gpus(self):
        found = only(recorded("1xt4", cores=2, core_numbers=(0, 1)), "cores", "warning")
        assert "starve" in found.text

    def test_what_the_system_does_not_tell_is_unknown(self):
        found = wrong(plenty(limits={}, disk=None))
        assert {name: check.level for name, check in found.items()} == {
            "open files": "unknown",
            "locked memory": "unknown",
            "core dumps": "unknown",
            "disk": "unknown",
        }


class TestDisk:
    @pytest.mark.parametrize(
        ("changes", "name", "level"),
        [
            ({"free_bytes": GIB // 2}, "disk space", "error"),
            ({"free_bytes": 10 * GIB}, "disk space", "warning"),
            ({"kind": "tmpfs"}, "disk space", "warning"),
            ({"free_files": 5}, "disk space", "warning"),
            ({"write_bytes_per_s": 20e6}, "disk speed", "warning"),
            ({"problem": "Permission denied"}, "disk", "error"),
        ],
    )
    def test_one_thing_wrong(self, changes, name, level):
        disk = plenty().disk
        assert disk is not None
        only(plenty(disk=disk.model_copy(update=changes)), name, level)

    def test_room_for_a_model_that_fills_the_gpus(self):
        disk = plenty().disk
        assert disk is not None
        facts = recorded("8xh100-hgx", disk=disk.model_copy(update={"free_bytes": 600 * GIB}))
        assert "637" in only(facts, "disk space", "warning").text

    def test_it_is_measured_and_nothing_stays(self, tmp_path):
        found = inspect_disk(tmp_path / "not" / "there", size=8 * MIB)
        assert found.place == str(tmp_path) and found.problem is None and found.tried_bytes == 8 * MIB
        assert found.write_bytes_per_s and found.read_bytes_per_s and found.kind
        assert list(tmp_path.iterdir()) == []

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="is a file"):
            inspect_disk(tmp_path / "file" / "runs")

    def test_a_disk_that_refuses_is_said(self, tmp_path, monkeypatch):
        def refuse(*_, **__):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr("shardwise.doctor.checks.disk._try_out", refuse)
        found = inspect_disk(tmp_path)
        assert found.problem == "Read-only file system" and found.write_bytes_per_s is None


class TestSettings:
    @pytest.mark.parametrize(
        ("machine", "name", "value", "level"),
        [
            ("8xa100-sxm", "NCCL_P2P_DISABLE", "1", "warning"),
            ("8xa100-sxm", "NCCL_SHM_DISABLE", "1", "warning"),
            ("8xa100-sxm", "NCCL_DEBUG", "INFO", "warning"),
            ("8xa100-sxm", "CUDA_LAUNCH_BLOCKING", "1", "warning"),
            ("8xa100-sxm", "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", "warning"),
            ("8xa100-sxm", "NCCL_SOCKET_IFNAME", "enp9s0", "error"),
            ("8xa100-sxm", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
            (None, "GLOO_SOCKET_IFNAME", "eth7", "error"),
            (None, "TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning"),
            (None, "OMP_PROC_BIND", "true", "warning"),
        ],
    )
    def test_what_hurts(self, machine, name, value, level):
        changes = {"settings": {name: value}}
        facts = recorded(machine, **changes) if machine else plenty(**changes)
        assert f"{name}={value}" in only(facts, "settings", level).text

    @pytest.mark.parametrize(
        ("machine", "name", "value"),
        [
            ("8xa100-sxm", "NCCL_P2P_DISABLE", "0"),
            ("1xt4", "NCCL_P2P_DISABLE", "1"),
            ("8xa100-sxm", "NCCL_IB_DISABLE", "1"),
            ("8xa100-sxm", "NCCL_DEBUG", "WARN"),
            ("8xa100-sxm", "NCCL_SOCKET_IFNAME", "^docker0,lo"),
            ("8xa100-sxm", "NCCL_SOCKET_IFNAME", "eth"),
            ("8xa100-sxm", "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
            (None, "NCCL_P2P_DISABLE", "1"),
            (None, "GLOO_SOCKET_IFNAME", "eth0"),
            (None, "OMP_NUM_THREADS", "1"),
        ],
    )
    def test_what_does_not(self, machine, name, value):
        changes = {"settings": {name: value}}
        assert not wrong(recorded(machine, **changes) if machine else plenty(**changes))

    def test_rdma_makes_it_matter(self):
        facts = recorded("8xa100-sxm", settings={"NCCL_IB_DISABLE": "1"}, rdma=("mlx5_0",))
        only(facts, "settings", "warning")

    def test_they_are_read_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        monkeypatch.setenv("TORCH_SECRET_KEY", "x")
        monkeypatch.setenv("HOME_OF_NOTHING", "x")
        found = settings()
        assert found["NCCL_P2P_DISABLE"] == "1" and "TORCH_SECRET_KEY" not in found and "HOME_OF_NOTHING" not in found


class TestControlGroups:
    def test_version_two(self, tmp_path):
        inner = tmp_path / "sys" / "job" / "task"
        inner.mkdir(parents=True)
        (tmp_path / "own").write_text("0::/job/task\n")
        (inner / "cpu.max").write_text("max 100000\n")
        (inner.parent / "cpu.max").write_text("250000 100000\n")
        (inner / "memory.max").write_text(f"{8 * GIB}\n")
        (inner / "memory.current").write_text(f"{GIB}\n")
        (inner.parent / "memory.max").write_text(f"{16 * GIB}\n")
        (inner / "pids.max").write_text("max\n")
        found = allowed(tmp_path / "sys", tmp_path / "own")
        assert found == Allowed(cores=2.5, memory_bytes=8 * GIB, memory_used_bytes=GIB)

    def test_version_one(self, tmp_path):
        for name in ("cpu,cpuacct/box", "memory/box", "pids/box"):
            (tmp_path / "sys" / name).mkdir(parents=True)
        (tmp_path / "own").write_text("4:memory:/box\n3:cpu,cpuacct:/box\n2:pids:/box\n")
        (tmp_path / "sys/cpu,cpuacct/box/cpu.cfs_quota_us").write_text("150000\n")
        (tmp_path / "sys/cpu,cpuacct/box/cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "sys/memory/box/memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
        (tmp_path / "sys/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
        (tmp_path / "sys/memory/box/memory.usage_in_bytes").write_text("7\n")
        (tmp_path / "sys/pids/box/pids.max").write_text("512\n")
        found = allowed(tmp_path / "sys", tmp_path / "own")
        assert found == Allowed(cores=1.5, memory_bytes=4 * GIB, memory_used_bytes=7, processes=512)

    def test_a_container_that_sees_its_own_group_as_the_root(self, tmp_path):
        (tmp_path / "sys").mkdir()
        (tmp_path / "own").write_text("0::/docker/abc\n")
        (tmp_path / "sys" / "cpu.max").write_text("400000 100000\n")
        assert allowed(tmp_path / "sys", tmp_path / "own").cores == 4

    def test_none_at_all(self, tmp_path):
        assert allowed(tmp_path / "sys", tmp_path / "none") == Allowed()


def test_visible_devices():
    machine = recorded("8xh100-hgx").gpus
    full, chosen = _visible(machine, None)
    assert full is machine and chosen is None
    some, chosen = _visible(machine, ["5", "GPU-00000002"])
    assert chosen == [5, 2] and [gpu.index for gpu in some.gpus] == [5, 2] and some.peers == {"2-5": True}
    assert _visible(machine, ["5"])[0].peers is None
    none, _ = _visible(machine, [])
    assert not none.gpus and none.problem is not None and "CUDA_VISIBLE_DEVICES" in none.problem


def test_every_check_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    table = page[page.index("| check |") : page.index("An idle link runs")]
    written = {name for row in table.strip().splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    facts = [recorded(machine) for machine in MACHINES]
    facts += [plenty(), plenty(disk=None), recorded("8xh100-hgx", core_numbers=(0,))]
    made = {check.name for fact in facts for check in examine(fact)}
    assert made <= written and {"ranks", "host copies"} <= written
    assert len(written - made) == 5, written - made


def test_this_machine_can_be_looked_at(tmp_path):
    facts = inspect_host(2, tmp_path)
    assert facts.ranks == 2 and facts.cores >= 1 and facts.memory_bytes > 0 and facts.disk is not None
    names = [check.name for check in examine(facts)]
    assert {"devices", "versions", "cores", "memory", "open files", "shared memory", "settings"} <= set(names)


def ranks(*words: str | None, **changes) -> RanksTest:
    answers = tuple(
        RankAnswer(rank=rank, host="a", pid=100 + rank, stage="all_reduce", word=word, text="why")
        for rank, word in enumerate(words)
    )
    found = {"world_size": len(words), "backend": "gloo", "speaker": 0, "seconds": 1.0, "answers": answers}
    return judged(RanksTest(**{**found, **changes}), 30)


class TestRanks:
    def test_all_answer(self):
        found = ranks("ok", "ok", small_s=1e-4, large_s=2e-3)
        assert found.problem is None
        (check,) = check_ranks_test(found)
        assert check.level == "ok" and "all 2 ranks" in check.text and "100 µs" in check.evidence[0]

    def test_the_silent_one_is_named_before_those_that_complain(self):
        found = ranks("failed", None, "waited")
        assert found.silent == (1,) and found.problem is not None
        assert found.problem.startswith("rank 1 on a (process 101) did not answer in all_reduce")
        (check,) = check_ranks_test(found)
        assert check.level == "error" and check.fix and "rank 2: waited" in check.evidence[2]

    def test_a_whole_host_that_is_silent(self):
        found = ranks("failed", None, None)
        moved = [found.answers[0], *(a.model_copy(update={"host": "b"}) for a in found.answers[1:])]
        assert "all of them are on b" in judged(found.model_copy(update={"answers": tuple(moved)}), 30).fix

    def test_one_that_never_started(self):
        found = ranks("failed", "waited", None)
        answers = (*found.answers[:2], RankAnswer(rank=2, host="b"))
        again = judged(found.model_copy(update={"answers": answers}), 30)
        assert again.problem is not None and "rank 2 on b did not start" in again.problem and "--timeout" in again.fix

    def test_wrong_sums(self):
        found = ranks("ok", "wrong")
        assert found.wrong == (1,) and found.problem == "rank 1 on a (process 101): why" and "do not train" in found.fix

    def test_ranks_that_answer_and_cannot_talk(self):
        found = ranks("failed", "failed", "waited")
        assert not found.silent and "GLOO_SOCKET_IFNAME" in found.fix
        assert "NCCL_SOCKET_IFNAME" in ranks("failed", "ok", backend="NCCL").fix

    def test_gpus_under_load(self):
        facts = recorded("1xrtx3090-gen1", host="a")
        load = DeviceLoad(name="RTX 3090", state=facts.gpus.gpus[0], from_host_bytes_per_s=1.6e9)
        found = ranks("ok")
        answers = (found.answers[0].model_copy(update={"load": load}),)
        checks = check_ranks_test(found.model_copy(update={"answers": answers}), facts)
        assert [check.name for check in checks] == ["ranks", "PCIe under load", "PCIe under load", "host copies"]
        assert "1.6 GB/s of 31.5" in checks[-1].text
        good = DeviceLoad(name="H100", state=recorded("8xh100-hgx").gpus.gpus[0], from_host_bytes_per_s=50e9)
        answers = (found.answers[0].model_copy(update={"load": good}),)
        checks = check_ranks_test(found.model_copy(update={"answers": answers}), facts)
        assert [check.level for check in checks] == ["ok", "ok"] and "50.0 GB/s" in checks[-1].text


def test_it_is_printed():
    facts = recorded("4xrtx4090")
    checks = examine(facts)
    stream = io.StringIO()
    print_doctor(checks, facts, Console(file=stream, width=120))
    text = stream.getvalue()
    assert "node-a: Linux 6.8.0" in text and "PHB: through the CPU's PCIe host bridge (0-1, 2-3)" in text
    assert text.count("across CPU sockets (NUMA nodes) (0-2") == 1, "the matrix is explained once"
    assert "fix: GeForce cards" in text
    assert text.rstrip().endswith(summary(checks)) and summary(checks).startswith("2 warnings, ")


def test_names_of_machines_are_no_markup():
    checks = [Check(name="a", level="error", text="[red]x[/nope]", fix="[y]", host="h[0]")]
    stream = io.StringIO()
    print_doctor(checks, None, Console(file=stream, width=120))
    assert "[red]x[/nope]" in stream.getvalue() and "[y]" in stream.getvalue()


def test_the_document():
    facts = recorded("8xh100-hgx", nvml={"nvmlDeviceGetCurrentClocksEventReasons": 0x40})
    document = json.loads(json.dumps(to_document(examine(facts), facts, ranks("ok", None))))
    assert document["schema"] == 1 and document["healthy"] is False and document["counts"]["error"] == 1
    assert document["machine"]["gpus"]["gpus"][0]["reasons"] == ["hardware thermal slowdown"]
    assert document["topology"][0].startswith("NV18") and document["ranks"]["silent"] == [1]
    assert to_document(examine(plenty()), plenty(), None)["healthy"] is True
