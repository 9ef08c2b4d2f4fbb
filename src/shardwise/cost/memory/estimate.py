"""`Estimate`: predicted bytes on the rank that holds most, by category and by phase."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

PhaseName = Literal["load", "forward", "backward", "optimizer", "first_step", "save", "resume"]
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries")


class Phase(BaseModel):
    """One phase of a run: live bytes at its fullest moment, and what the allocator has reserved by then."""

    model_config = ConfigDict(frozen=True)

    name: PhaseName
    allocated: int
    reserved: int | None = None


class Estimate(BaseModel):
    """Predicted bytes on the rank that holds most; ``None`` is unknown.

    Each category is what it holds when it holds most; they do not do so at one moment. ``allocated`` is the peak of
    their sum, ``reserved`` what the caching allocator takes for it, ``context`` what lies outside the allocator (CUDA
    context, communicator buffers), ``device`` = ``reserved`` + ``context``: what must be under the device's memory.
    ``buffers`` are gathered units, unsharded gradients on their way and autocast's narrow weights; ``temporaries`` are
    the optimizer's. ``offloaded_bytes`` is the part of parameters, gradients and optimizer state that lives in host
    memory, ``host_bytes`` all that a node's ranks need there together.
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
    host_bytes: int | None = None
    phases: tuple[Phase, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        """What is known to be needed on the device at the peak."""
        if self.device is not None:
            return self.device
        parts = (self.parameters, self.gradients, self.optimizer, self.activations, self.logits, self.buffers)
        return sum(part or 0 for part in parts) + self.temporaries - self.offloaded_bytes

    @property
    def unknown(self) -> tuple[str, ...]:
        """Categories that `device_bytes` leaves out."""
        return tuple(name for name in ("optimizer", "activations", "logits") if getattr(self, name) is None)
