"""`Estimate`: predicted bytes on the fullest rank, by category and by phase."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

PhaseName = Literal["load", "forward", "backward", "optimizer", "first_step", "save", "resume"]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries")


class Phase(BaseModel):
    """Phase of a run: its peak of live bytes, and the allocator's reserved bytes by then."""

    model_config = ConfigDict(frozen=True)

    name: PhaseName
    allocated: int
    reserved: int | None = None


class Estimate(BaseModel):
    """Predicted bytes on the fullest rank; ``None`` is unknown.

    Each category is given at its peak; the peaks do not coincide. ``allocated`` is the peak of their sum, ``reserved``
    what the caching allocator takes for it, ``context`` what lies outside the allocator (CUDA context, communicator
    buffers), ``device`` = ``reserved`` + ``context``: what must be below the device's memory. ``buffers`` are
    gathered units, unsharded gradients before their reduction, autocast's low-precision weights and a moving
    average of the weights; ``temporaries`` are the optimizer's. ``offloaded_bytes`` is the part of parameters,
    gradients and optimizer state that lives in host memory, ``offloaded_activations`` what blocks keep there of the
    micro batches in flight, ``host_bytes`` the total that a node's ranks need there.
    """

    model_config = ConfigDict(frozen=True)

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    logits: int | None
    buffers: int
    temporaries: int = 0
    context: int = 0
    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    offloaded_bytes: int = 0
    offloaded_activations: int = 0
    host_bytes: int | None = None
    phases: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def uses_host(self) -> bool:
        """Return whether parts of it live in host memory."""
        return bool(self.offloaded_bytes or self.offloaded_activations)

    @property
    def device_bytes(self) -> int:
        """Known bytes needed on the device at the peak."""
        if self.device is not None:
            return self.device
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.logits, self.buffers)
        return sum(part or 0 for part in parts) + self.temporaries - self.offloaded_bytes

    @property
    def unknown(self) -> tuple[str, ...]:
        """Categories that `device_bytes` does not include."""
        return tuple(name for name in ("optimizer", "activations", "logits") if getattr(self, name) is None)
