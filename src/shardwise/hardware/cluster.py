"""`ClusterSpec`: devices, links and memory of a cluster. Unknown values are ``None``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.errors import PlanError, did_you_mean
from shardwise.hardware.gpus import (
    NVLINK_BYTES_PER_S,
    PCIE_TRANSFERS_PER_S,
    GpuSpec,
    Link,
    find_gpu,
    pcie_bytes_per_s,
    unknown_gpu_message,
)
from shardwise.hardware.topology import link_of, read_topology


class ClusterSpec(BaseModel):
    """Nodes of equal devices.

    Memory is in bytes, for each device; ``host_memory_bytes`` is for each node. ``gpu`` is the device's row of the
    hardware table, ``None`` where it has none. ``link`` joins the devices of a node, ``network`` the nodes: bytes per
    second for each device, one direction. ``nvme_bytes_per_s`` is the rate of a node's drives, read or write, shared by
    all its devices. A price is US dollars for an hour of one device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"]
    device_name: str
    nodes: int = 1
    devices_per_node: int = 1
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    cores_per_node: int | None = None
    gpu: GpuSpec | None = None
    link: Link | None = None
    network: Link | None = None
    nvme_bytes_per_s: float | None = None
    price_per_device_hour: float | None = None

    @property
    def world_size(self) -> int:
        """Total number of devices."""
        return self.nodes * self.devices_per_node


MOST_DEVICES = 2**20
GRAMMAR = (
    "[NODES x] DEVICES x GPU [@LINK [/NETWORK]]: 8xA100-80GB, 2x8xH100-SXM, 4xRTX4090@pcie4, 4x8xA100@nvlink/ib200"
)
LINKS = "nvlink, nvlink1 to nvlink5, xgmi, pcie, pcie3 to pcie6, pcie4x8 (8 lanes)"
NETWORKS = "ib400, roce200, efa100, eth25 (Gbit/s for each device) or 1600g (Gbit/s for each node)"


@lru_cache(maxsize=256)  # costs are kept by the identity of their cluster
def gpu_cluster(
    text: str,
    name: str,
    numbers: tuple[int, ...],
    *,
    link_text: str | None = None,
    network_text: str | None = None,
) -> ClusterSpec:
    """Build a cluster of ``numbers`` (devices, or nodes and devices of each) of a known GPU.

    ``text`` is for messages.

    Raises:
        PlanError: every invalid value, at once.
    """
    problems: list[str] = []
    gpu = find_gpu(name)
    if gpu is None:
        problems.append(f"cluster '{text}': {unknown_gpu_message(name)}")
    nodes, devices = split_nodes(text, gpu, numbers, problems)
    link = default_link(gpu, devices) if link_text is None else parse_link(text, link_text, gpu, devices, problems)
    network = gpu.network if gpu and nodes > 1 else None
    if network_text is not None:
        network = parse_network(text, network_text, devices, problems)
    if problems or gpu is None:
        raise PlanError(*problems)
    return ClusterSpec(
        device="cuda",
        device_name=gpu.name,
        nodes=nodes,
        devices_per_node=devices,
        device_memory_bytes=gpu.memory_bytes,
        gpu=gpu,
        link=link,
        network=network,
        price_per_device_hour=gpu.price_per_hour,
    )


def split_nodes(text: str, gpu: GpuSpec | None, numbers: Sequence[int], problems: list[str]) -> tuple[int, int]:
    """Return nodes and devices of each; a single number is split into nodes of the table's size."""
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    total, most = numbers[0], gpu.devices_per_node if gpu else None
    if most is None or total <= most:
        return 1, total
    if total % most:
        fit = next(n for n in range(most, 0, -1) if total % n == 0)
        problems.append(
            f"cluster '{text}': a node of {gpu.name if gpu else '?'} holds {most}, and {total} is no multiple of it; "
            f"write nodes and devices, as in {total // fit}x{fit}x{gpu.name if gpu else '?'}"
        )
    return max(1, total // most), most


def default_link(gpu: GpuSpec | None, devices: int) -> Link | None:
    """NVLink or xGMI if the table has it, else the PCIe slot; ``None`` for one device."""
    return None if gpu is None or devices < 2 else gpu.nvlink or gpu.pcie


def parse_link(text: str, word: str, gpu: GpuSpec | None, devices: int, problems: list[str]) -> Link | None:
    """Parse ``@nvlink``, ``@nvlink3``, ``@pcie4``, ``@pcie4x8``, ``@xgmi``; append ``problems``."""
    plain = word.strip().lower()
    if found := re.fullmatch(r"pcie(\d?)(?:x(\d{1,3}))?", plain):
        generation, lanes = int(found.group(1) or 0), int(found.group(2) or 16)
        known_lanes = lanes in (1, 2, 4, 8, 16)
        if generation in PCIE_TRANSFERS_PER_S and known_lanes:
            return Link(kind="pcie", bytes_per_s=pcie_bytes_per_s(generation, lanes), source=f"PCIe {plain[4:]}")
        if not generation and found.group(2) is None:
            return gpu.pcie if gpu else None
    elif (found := re.fullmatch(r"nvlink(\d?)", plain)) and (not found.group(1) or int(found.group(1)) in range(1, 6)):
        if found.group(1):
            rate = NVLINK_BYTES_PER_S[int(found.group(1))]
            return Link(kind="nvlink", bytes_per_s=rate, source=f"NVLink {found.group(1)}: NVIDIA data sheets")
        if gpu is not None and gpu.nvlink is None and (gpu.bridge is None or devices > 2):
            why = "has NVLink only as a bridge between pairs of cards" if gpu.bridge else "has no NVLink in the table"
            problems.append(f"cluster '{text}': {gpu.name} {why}; use @pcie, or @nvlink1 to @nvlink5 if yours has it")
        return (gpu.nvlink or gpu.bridge) if gpu else None
    elif plain == "xgmi" and (gpu is None or (gpu.nvlink and gpu.nvlink.kind == "xgmi")):
        return gpu.nvlink if gpu else None
    known = ["nvlink", *(f"nvlink{n}" for n in NVLINK_BYTES_PER_S), "xgmi", "pcie"]
    known += [f"pcie{n}" for n in PCIE_TRANSFERS_PER_S]
    reason = "is only between AMD's MI GPUs" if plain == "xgmi" else f"is no link{did_you_mean(plain, known)}"
    problems.append(f"cluster '{text}': '@{word}' {reason}; known are {LINKS}")
    return None


def parse_network(text: str, word: str, devices: int, problems: list[str]) -> Link | None:
    """Parse ``/ib400`` (Gbit/s per device) or ``/1600g`` (per node); append ``problems``."""
    plain = word.strip().lower()
    per_device = re.fullmatch(r"(?:ib|infiniband|roce|efa|eth|ethernet)(\d{1,9})g?", plain)
    per_node = re.fullmatch(r"(\d{1,9})(?:g|gbit|gbps)", plain)
    found = per_device or per_node
    gbit = int(found.group(1)) if found else 0
    share = gbit if per_device else gbit / devices
    if found is None or not 0 < share <= 3200:
        kinds = ("ib", "roce", "efa", "eth")
        hint = did_you_mean(plain.rstrip("0123456789"), kinds)
        wrong = f"is no network{hint}" if found is None else "must be above 0 and at most 3200 Gbit/s a device"
        problems.append(f"cluster '{text}': '/{word}' {wrong}; known are {NETWORKS}")
        return None
    whose = "device" if per_device else f"node of {devices}"
    return Link(kind="network", bytes_per_s=share * 1e9 / 8, source=f"{plain}: {gbit} Gbit/s for each {whose}")


def detect(device: str = "auto", num_ranks: int | None = None, *, visible: Sequence[str] | None = None) -> ClusterSpec:
    """Detect this machine's devices and links.

    GPUs are queried through NVML, so no CUDA context is created; ``visible`` is CUDA_VISIBLE_DEVICES as a list, if set.
    Their link is read from ``nvidia-smi topo -m``; otherwise it is that of the hardware table for the first GPU, whose
    row is used for all; the price of this machine is unknown. Without a GPU, the ranks share the host's memory evenly
    and one core each is assumed (``num_ranks`` defaults to one rank per core, at most two).

    Raises:
        PlanError: GPUs are requested and there are none, or fewer than ranks.
    """
    import psutil

    host_bytes = psutil.virtual_memory().total
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    gpus = _nvml_devices() if device in ("auto", "cuda") else []
    numbers: list[int] | None = list(range(len(gpus)))
    if visible is not None:  # by index where they are numbers; names (UUIDs) are only counted
        numbered = all(name.isdigit() for name in visible)
        numbers = [int(n) for n in visible if int(n) < len(gpus)] if numbered else None
        gpus = gpus[: len(visible)] if numbers is None else [gpus[n] for n in numbers]
    if device == "cuda" and not gpus:
        raise PlanError(
            "device 'cuda': no NVIDIA GPU was found on this machine; look whether nvidia-smi lists one, or use cpu"
        )
    if gpus and num_ranks is not None and num_ranks > len(gpus):
        raise PlanError(f"{num_ranks} ranks on {len(gpus)} × {gpus[0][0]}: a rank needs a GPU of its own; use fewer")
    if gpus:
        name, memory = gpus[0]
        gpu, devices = find_gpu(name), num_ranks or len(gpus)
        return ClusterSpec(
            device="cuda",
            device_name=name,
            devices_per_node=devices,
            device_memory_bytes=min(memory, gpu.memory_bytes) if gpu else memory,  # NVML includes CUDA's reserve
            host_memory_bytes=host_bytes,
            cores_per_node=cores,
            gpu=gpu,
            link=_link_here(gpu, devices, None if numbers is None else numbers[:devices]),
        )
    ranks = num_ranks or min(2, cores)
    return ClusterSpec(
        device="cpu",
        device_name="CPU",
        devices_per_node=ranks,
        device_memory_bytes=host_bytes // ranks,
        host_memory_bytes=host_bytes,
        cores_per_node=cores,
    )


def _link_here(gpu: GpuSpec | None, devices: int, numbers: Sequence[int] | None) -> Link | None:
    """Link of the GPUs with these numbers; without a readable matrix, the table's."""
    if devices < 2:
        return None
    topology = read_topology() if numbers is not None else None
    chosen = topology.subset(numbers) if topology is not None and numbers is not None else None
    return default_link(gpu, devices) if chosen is None else link_of(chosen, gpu)


def _nvml_devices() -> list[tuple[str, int]]:
    """Name and memory in bytes of each GPU; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [(str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles]
    finally:
        pynvml.nvmlShutdown()
