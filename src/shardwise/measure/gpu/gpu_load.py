"""Load a GPU briefly to see its link's generation and its clock limits, unseen when idle."""

from __future__ import annotations

import time

import torch
from pydantic import BaseModel, ConfigDict

from shardwise.measure.gpu.nvml import GpuState, NvmlSource

SECONDS, SIDE, COPIED = 1.0, 4096, 64 * 1024**2


class DeviceLoad(BaseModel):
    """State of a device while it multiplies matrices, and bytes/s of copies from pinned memory."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: GpuState | None = None
    from_host_bytes_per_s: float | None = None


def load_device(device: torch.device, seconds: float = SECONDS) -> DeviceLoad:
    """Copy and multiply on a CUDA device for about ``seconds``, and read its state through NVML."""
    facts = torch.cuda.get_device_properties(device)
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(COPIED, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        here.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(COPIED / (start.elapsed_time(end) / 1e3))
    matrix = torch.randn(SIDE, SIDE, device=device, dtype=torch.float16)
    state, until = None, time.perf_counter() + seconds
    with NvmlSource() as source:
        while time.perf_counter() < until:
            for _ in range(8):
                torch.mm(matrix, matrix)
            state = next((gpu for gpu in source.read().gpus if _same(gpu, facts)), state)
            torch.cuda.synchronize(device)
    return DeviceLoad(name=facts.name, state=state, from_host_bytes_per_s=sorted(rates)[len(rates) // 2])


def _same(gpu: GpuState, facts: object) -> bool:
    own = str(getattr(facts, "uuid", ""))
    return bool(own) and (gpu.uuid or "").removeprefix("GPU-") == own.removeprefix("GPU-")
