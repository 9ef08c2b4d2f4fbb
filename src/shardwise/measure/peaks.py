"""Peaks of one training step by phase, from torch's records on CPU or CUDA's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.measure import state
from shardwise.measure.allocations import AllocationRecorder, live_tensors
from shardwise.measure.state import Peaks
from shardwise.train.session import Session
from shardwise.train.step import Step

PHASES = ("forward", "backward", "optimizer")
_PHASE_OF = {"forward": "forward", "backward": "backward", "clip": "optimizer", "optimizer": "optimizer"}


def phase_of(phase: str, session: Session) -> str | None:
    """Map a session's phase to a measured phase; ``None`` for none.

    A pipeline runs forward and backward in turn: both are ``backward``, and there is no moment between them.
    """
    name = _PHASE_OF.get(phase)
    return "backward" if name == "forward" and session.applied.pipeline is not None else name


class PeakRecorder(Protocol):
    """Recorder of one step, from its start to its end."""

    def start(self, session: Session) -> bool:
        """Start; False if impossible."""

    def stop(self, session: Session, step: Step) -> Peaks:
        """Stop, while gradients exist."""


def peak_watch(device: torch.device) -> PeakRecorder:
    """Return the recorder for ranks that compute on ``device``."""
    return CudaPeakRecorder() if device.type == "cuda" else CpuPeakRecorder()


class CpuPeakRecorder:
    """Recorder of torch's CPU allocations in the step; see `AllocationRecorder` for its limits."""

    def __init__(self) -> None:
        self._recorder = AllocationRecorder()
        self._gathered: int | None = None
        self._session: Session | None = None

    def start(self, session: Session) -> bool:
        """Start; False if a profiler of the user's is on."""
        if not self._recorder.start("other"):
            return False
        self._session = session
        session.phase_watchers.append(self._enter)
        return True

    def _enter(self, phase: str) -> None:
        if phase == "backward" and self._gathered is None and self._session is not None:
            self._gathered = gathered_bytes(self._session)
        self._recorder.enter(phase)

    def stop(self, session: Session, step: Step) -> Peaks:
        """Stop, while gradients exist."""
        session.phase_watchers.remove(self._enter)
        recording = self._recorder.stop()
        if session.ranks.world_size > 1:
            recording = recording.settled(live_tensors())
        start = recording.at_start(local_tensors(session, step))
        allocated: dict[str, int] = {}
        for phase, peak in recording.peaks().items():
            if (name := phase_of(phase, session)) is not None:
                allocated[name] = max(allocated.get(name, 0), start + peak)
        pipelined = session.applied.pipeline is not None
        gathered, first = self._gathered or 0, None if pipelined else recording.at_first("backward")
        saved = None if first is None else first - gathered
        return Peaks(start=start, saved=saved, gathered=gathered, allocated=allocated)


class CudaPeakRecorder:
    """Recorder of the caching allocator's peaks, read and reset at each phase change.

    No host wait.
    """

    def __init__(self) -> None:
        self._phase = "other"
        self._start = self._gathered = 0
        self._saved: int | None = None
        self._allocated: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        self._session: Session | None = None

    def start(self, session: Session) -> bool:
        """Start; resets the allocator's peaks."""
        torch.cuda.reset_peak_memory_stats(session.device)
        self._start = torch.cuda.memory_allocated(session.device)
        self._session = session
        session.phase_watchers.append(self._enter)
        return True

    def _enter(self, phase: str) -> None:
        session = self._session
        if session is None:
            return
        device = session.device
        if phase == "backward" and self._saved is None and session.applied.pipeline is None:
            self._gathered = gathered_bytes(session)
            self._saved = torch.cuda.memory_allocated(device) - self._start - self._gathered
        name = phase_of(self._phase, session)
        if name is not None:
            peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            for found, peak in zip((self._allocated, self._reserved), peaks, strict=True):
                found[name] = max(found.get(name, 0), peak)
        torch.cuda.reset_peak_memory_stats(device)
        self._phase = phase

    def stop(self, session: Session, step: Step) -> Peaks:
        """Stop."""
        self._enter("other")
        session.phase_watchers.remove(self._enter)
        return Peaks(
            start=self._start,
            saved=self._saved,
            gathered=self._gathered,
            allocated=self._allocated,
            reserved=self._reserved,
            device=device_bytes(session.device),
        )


def local_tensors(session: Session, step: Step) -> Iterator[torch.Tensor]:
    """Yield the tensors that a rank keeps between steps, with this step's gradients and inputs."""
    module = session.module
    yield from module.parameters()
    yield from module.buffers()
    yield from state.gradients(module)
    yield from state.optimizer_tensors(session.optimizer)
    for micro in step.micros:
        leaves = torch.utils._pytree.tree_leaves((micro.inputs, micro.labels))
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def gathered_bytes(session: Session) -> int:
    """Count the bytes of full weights that FSDP2 has gathered on this rank now."""
    found: dict[int, int] = {}
    for unit in session.applied.outer.modules():
        group: Any = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        for fsdp_param in group.fsdp_params if group is not None else ():
            full = getattr(fsdp_param, "_unsharded_param", None)
            for tensor in (*fsdp_param.all_gather_outputs, *((full,) if full is not None else ())):
                storage = state.local(tensor).untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return sum(found.values())


def device_bytes(device: torch.device) -> int | None:
    """Return this process's bytes on a CUDA device by NVML, or all processes' if not separable."""
    import os

    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        mine = [p for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        if mine and mine[0].usedGpuMemory:
            return int(mine[0].usedGpuMemory)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
