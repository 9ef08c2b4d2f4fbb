"""`Program`, the options of a step, and `AllocationTrace`, its allocations and frees."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.estimate import CATEGORIES, PhaseName
from shardwise.plan.objective import Reference
from shardwise.plan.plan import Recompute

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, BUFFERS, TEMPORARIES = range(len(CATEGORIES))
COMPUTE, GATHER, REDUCE = range(3)  # streams
WRITTEN = 4  # blocks of a row that are traced op by op


@dataclass(frozen=True, slots=True)
class Program:
    """Options of a step's program that are the same on all ranks.

    Under ``gradients_wait`` only the last micro batch reduces sharded gradients (``set_requires_gradient_sync``), and
    unsharded fp32 ones are stored until then; otherwise shards accumulate. With DDP, unsharded gradients are stored
    beside its buckets (``no_sync``), unless ``buckets_add``. ``fused_loss`` is one kernel that reads low-precision
    logits and overwrites them with their gradient. ``loss_chunks`` above 1 computes logits in chunks, and their
    gradients with them. ``written`` blocks of a row are traced op by op. ``optimizer_in_backward`` steps each parameter
    as soon as its gradient is final, and frees the gradient. ``reference`` is a frozen model that each micro batch
    passes through forward, after the one that trains. ``logit_bytes`` live for each logit at the end of the loss's
    forward, where the program holds others than the loss makes. ``in_pieces`` traces what other micro batches saved,
    and the optimizer's state, as many allocations, which matters to an allocator without expandable segments.
    ``saves_on_host``: what blocks save leaves the device until their backward, which brings back a block's at once.
    """

    grad_accum: int = 1
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    gradients_wait: bool = True
    buckets_add: bool = False
    fused_loss: bool = False
    loss_chunks: int = 1
    written: int = WRITTEN
    optimizer_in_backward: bool = False
    reference: Reference = "none"
    logit_bytes: float | None = None
    in_pieces: bool = False
    saves_on_host: bool = False


class AllocationTrace:
    """Allocations and frees in order.

    ``events`` has (bytes, category, stream), or (-1 - handle, 0, 0) for a free.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int, int]] = []
        self.phases: list[tuple[int, PhaseName]] = []
        self.count = 0

    def alloc(self, num_bytes: float, category: int, stream: int = COMPUTE) -> int:
        """Record an allocation and return its handle; -1 for zero bytes."""
        size = int(num_bytes)
        if size <= 0:
            return -1
        self.events.append((size, category, stream))
        self.count += 1
        return self.count - 1

    def free(self, *handles: int) -> list[int]:
        """Free each handle; -1 is ignored. Returns the remaining handles, an empty list."""
        for handle in handles:
            if handle >= 0:
                self.events.append((-1 - handle, 0, 0))
        return []

    def phase(self, name: PhaseName) -> None:
        """Start the phase ``name``."""
        self.phases.append((len(self.events), name))
