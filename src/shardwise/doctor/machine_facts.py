"""Facts of one machine for `shardwise doctor`, separate from their interpretation.

Unknown is ``None``. Collecting them changes nothing except for a small file that is written, read and removed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from shardwise.doctor.cgroup import Allowed, allowed
from shardwise.doctor.checks.disk import DiskFacts, inspect_disk
from shardwise.environment import settings, visible_devices
from shardwise.hardware.topology import Topology, read_topology
from shardwise.measure.gpu.nvidia_smi import QuerySource
from shardwise.measure.gpu.nvml import GpuMachine, GpuSource, GpuState, NvmlSource
from shardwise.measure.gpu.xids import Xid, read_xids

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "deepspeed",
    "bitsandbytes",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""Packages whose versions are checked and shown."""
LIMITS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC", "core": "RLIMIT_CORE"}
INFINIBAND = Path("/sys/class/infiniband")


class Limit(BaseModel):
    """Limit of this process and its hard maximum; ``None``: unlimited."""

    model_config = ConfigDict(frozen=True)

    soft: int | None
    hard: int | None


class HostFacts(BaseModel):
    """Facts of one machine for one question: can ``ranks`` ranks run here?

    In bytes and cores. ``cores`` are those that this process may run on, ``busy_cores`` how many of all are in use by
    others now. ``rdma`` are InfiniBand or RoCE devices. ``interfaces`` are the names of network interfaces that are up.
    ``threads`` is OMP_NUM_THREADS where it is set. ``torch_cuda`` is the CUDA that torch was built for (``None``: for
    none), ``torch_archs`` the GPU generations that its kernels are for. ``cuda_problem`` is why torch finds no GPU.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    host: str
    ranks: int
    cores: int
    core_numbers: tuple[int, ...] | None = None
    busy_cores: float | None = None
    allowed: Allowed = Allowed()
    memory_bytes: int
    available_bytes: int
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: dict[str, Limit] = {}
    core_pattern: str | None = None
    rdma: tuple[str, ...] = ()
    interfaces: tuple[str, ...] | None = None
    settings: dict[str, str] = {}
    versions: dict[str, str] = {}
    python: str = ""
    system: str = ""
    machine: str = ""
    kernel: str = ""
    torch_cuda: str | None = None
    torch_archs: tuple[str, ...] | None = None
    cuda_problem: str | None = None
    nccl: tuple[int, int, int] | None = None
    disk: DiskFacts | None = None
    gpus: GpuMachine = GpuMachine()
    topology: Topology | None = None
    xids: tuple[Xid, ...] | None = None

    @property
    def threads(self) -> int | None:
        """OMP_NUM_THREADS, where it is a number."""
        text = self.settings.get("OMP_NUM_THREADS", "").split(",")[0]
        return int(text) if text.isdigit() else None


def inspect_host(ranks: int | None, folder: Path, source: GpuSource | None = None) -> HostFacts:
    """Collect all facts of this machine. Takes a second or two.

    For ``ranks`` ranks (default: one per GPU, else two).

    Raises:
        UserError: ``folder`` is a file.
    """
    import psutil

    machine = (source or NvmlSource()).read()
    if source is None and not machine.gpus and shutil.which("nvidia-smi") is not None:
        asked = QuerySource().read()
        machine = asked if asked.gpus else machine
    gpus, chosen = _visible(machine, visible_devices())
    topology = read_topology() if gpus.gpus else None
    number = ranks or len(gpus.gpus) or 2
    numbers = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
    busy = psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1)
    memory, limits, shm = psutil.virtual_memory(), allowed(), _room(Path("/dev/shm"))
    return HostFacts(
        host=socket.gethostname(),
        ranks=number,
        cores=len(numbers) if numbers else (os.cpu_count() or 1),
        core_numbers=numbers,
        busy_cores=busy,
        allowed=limits,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        limits=_limits(),
        core_pattern=_line(Path("/proc/sys/kernel/core_pattern")),
        rdma=tuple(sorted(path.name for path in INFINIBAND.iterdir())) if INFINIBAND.is_dir() else (),
        interfaces=tuple(sorted(name for name, facts in psutil.net_if_stats().items() if facts.isup)),
        settings=settings(),
        versions={name: version for name in PACKAGES if (version := _version(name)) is not None},
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        kernel=platform.release(),
        disk=inspect_disk(folder),
        gpus=gpus,
        topology=topology if topology is None or chosen is None else topology.subset(chosen),
        xids=read_xids() if gpus.gpus else None,
        **_torch(),
    )


def _visible(machine: GpuMachine, names: list[str] | None) -> tuple[GpuMachine, list[int] | None]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, and their numbers.

    By number or by the beginning of their id.
    """
    if names is None or not machine.gpus:
        return machine, None
    found: list[GpuState] = []
    for name in names:
        found += [gpu for gpu in machine.gpus if name == str(gpu.index) or (gpu.uuid or "").startswith(name)][:1]
    indices = [gpu.index for gpu in found]
    peers = {
        pair: opened
        for pair, opened in (machine.peers or {}).items()
        if {int(part) for part in pair.split("-")} <= set(indices)
    }
    problem = None if found else f"CUDA_VISIBLE_DEVICES={','.join(names)} names none of the {len(machine.gpus)} here"
    return machine.model_copy(update={"gpus": tuple(found), "peers": peers or None, "problem": problem}), indices


def _torch() -> dict[str, Any]:
    """Return torch's build facts, and whether it can use a GPU.

    Starts CUDA in this process where there is a GPU.
    """
    import torch

    found: dict[str, Any] = {"torch_cuda": torch.version.cuda}
    if torch.version.cuda is None:
        return found
    found["torch_archs"] = tuple(torch.cuda.get_arch_list())
    with contextlib.suppress(Exception):
        found["nccl"] = tuple(torch.cuda.nccl.version())
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        found["cuda_problem"] = str(error).splitlines()[0]
    return found


def _limits() -> dict[str, Limit]:
    found = {}
    for name, constant in LIMITS.items():
        if hasattr(resource, constant):
            soft, hard = resource.getrlimit(getattr(resource, constant))
            found[name] = Limit(soft=_finite(soft), hard=_finite(hard))
    return found


def _finite(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def _room(path: Path) -> tuple[int, int] | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _line(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
