"""Machines that are not here, out of ``tests/recorded``: as an NVML that replays what is recorded, and as facts."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from shardwise.doctor.checks.disk import DiskFacts
from shardwise.doctor.machine_facts import HostFacts, Limit
from shardwise.hardware.topology import parse_topology
from shardwise.measure.gpu.nvml import NvmlSource
from shardwise.units import GIB

RECORDED = Path(__file__).parent / "recorded"
MACHINES = tuple(sorted(path.name for path in RECORDED.iterdir() if path.is_dir()))


class RecordedNvml:
    """Looks like ``pynvml``. ``changes`` replace values of every GPU; a value that is an exception is raised.

    Calls are bound to the signatures of the real functions, so that a wrong call fails here, too.
    """

    def __init__(self, machine: str, **changes: Any) -> None:
        self.document = json.loads((RECORDED / machine / "nvml.json").read_text())
        self.document["every"] |= changes
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not name.startswith("nvml") or isinstance(real, type):
            return real

        def call(*arguments: Any) -> Any:
            inspect.signature(real).bind(*arguments)
            assert self.opened == 1, "NVML was asked before it was opened, or opened twice"
            return self._answer(name, arguments)

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        document = self.document
        if name == "nvmlSystemGetDriverVersion":
            return document["driver"]
        if name == "nvmlSystemGetCudaDriverVersion_v2":
            return document["cuda"]
        if name == "nvmlDeviceGetCount":
            return len(document["gpus"])
        if name == "nvmlDeviceGetHandleByIndex":
            return arguments[0]
        if name == "nvmlDeviceGetP2PStatus" and "peers" in document:
            return document["peers"]
        facts = {**document["every"], **document["gpus"][arguments[0]]}
        if name not in facts:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        value = facts[name]
        if isinstance(value, Exception):
            raise value
        if name == "nvmlDeviceGetGpuFabricInfo":
            arguments[1].state = value["state"]
            return pynvml.NVML_SUCCESS
        further = ",".join(str(argument) for argument in arguments[1:])
        return _like_nvml(value[further] if further else value)


def _like_nvml(value: Any) -> Any:
    """Structures have attributes; what NVML returns as a tuple is one."""
    if isinstance(value, dict):
        return SimpleNamespace(**value)
    if isinstance(value, list):
        return tuple(_like_nvml(item) for item in value)
    return value


def recorded(machine: str, /, nvml: dict[str, Any] | None = None, **changes: Any) -> HostFacts:
    """The facts of a recorded machine: a rank a GPU, and a host with plenty of everything unless ``changes`` say so."""
    gpus = NvmlSource(RecordedNvml(machine, **(nvml or {}))).read()
    topology = parse_topology((RECORDED / machine / "topo.txt").read_text())
    return plenty(len(gpus.gpus)).model_copy(
        update={
            "gpus": gpus,
            "topology": topology,
            "xids": (),
            "torch_cuda": "12.6",
            "torch_archs": ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
            "nccl": (2, 29, 3),
            **changes,
        }
    )


def plenty(ranks: int = 2, **changes: Any) -> HostFacts:
    """A host with plenty of everything and no GPU."""
    facts: dict[str, Any] = {
        "host": "node-a",
        "ranks": ranks,
        "cores": 256,
        "core_numbers": tuple(range(256)),
        "busy_cores": 0.0,
        "memory_bytes": 1024 * GIB,
        "available_bytes": 1000 * GIB,
        "shm_bytes": 512 * GIB,
        "shm_free_bytes": 512 * GIB,
        "limits": {
            "nofile": Limit(soft=65536, hard=65536),
            "memlock": Limit(soft=None, hard=None),
            "nproc": Limit(soft=None, hard=None),
            "core": Limit(soft=0, hard=None),
        },
        "core_pattern": "core",
        "interfaces": ("eth0", "ib0", "lo"),
        "versions": {"torch": "2.13.0"},
        "python": "3.12.1",
        "system": "Linux",
        "machine": "x86_64",
        "kernel": "6.8.0",
        "disk": DiskFacts(
            folder="runs",
            place="/data",
            kind="ext4",
            total_bytes=8000 * GIB,
            free_bytes=7000 * GIB,
            free_files=10**8,
            write_bytes_per_s=2e9,
            read_bytes_per_s=3e9,
            tried_bytes=GIB // 16,
        ),
    }
    return HostFacts(**{**facts, **changes})
