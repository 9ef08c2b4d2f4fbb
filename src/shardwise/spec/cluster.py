"""`ClusterSpec`: what there is to run on. Unknown is ``None``, never a guess."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.errors import PlanError
from shardwise.spec.hardware import GpuSpec, Link


class ClusterSpec(BaseModel):
    """Nodes of equal devices. Memory is in bytes, for each device; ``host_memory_bytes`` is for each node.

    ``gpu`` is the device's row of the hardware table, ``None`` where it has none. ``link`` joins the devices of a node,
    ``network`` the nodes: bytes per second for each device, one direction. A price is US dollars for an hour of one
    device.
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
    price_per_device_hour: float | None = None

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node


def detect(device: str = "auto", num_ranks: int | None = None, *, visible: Sequence[str] | None = None) -> ClusterSpec:
    """Look at this machine.

    GPUs are asked through NVML, so no CUDA context is made; ``visible`` is CUDA_VISIBLE_DEVICES as a list, if set.
    Without a GPU, the ranks share the host's memory
    evenly and a core each is assumed (``num_ranks`` defaults to one rank a core, two at most).

    Raises:
        PlanError: GPUs are asked for and there are none, or fewer than ranks.
    """
    import psutil

    host_bytes = psutil.virtual_memory().total
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    gpus = _nvml_devices() if device in ("auto", "cuda") else []
    if visible is not None:  # by index where they are numbers; names (UUIDs) are only counted
        numbers = all(name.isdigit() for name in visible)
        gpus = [gpus[int(n)] for n in visible if int(n) < len(gpus)] if numbers else gpus[: len(visible)]
    if device == "cuda" and not gpus:
        raise PlanError(
            "device 'cuda': no NVIDIA GPU was found on this machine; look whether nvidia-smi lists one, or use cpu"
        )
    if gpus and num_ranks is not None and num_ranks > len(gpus):
        raise PlanError(f"{num_ranks} ranks on {len(gpus)} × {gpus[0][0]}: a rank needs a GPU of its own; use fewer")
    if gpus:
        name, memory = gpus[0]
        return ClusterSpec(
            device="cuda",
            device_name=name,
            devices_per_node=num_ranks or len(gpus),
            device_memory_bytes=memory,
            host_memory_bytes=host_bytes,
            cores_per_node=cores,
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
