"""`CostInputs`: all values that the allocations of one rank depend on."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.activations import UnitBytes
from shardwise.cost.memory.allocation_trace import Program
from shardwise.cost.memory.local_shapes import LayerGroup, ShardLayout, UnitWeights


@dataclass(frozen=True, slots=True)
class CostInputs:
    """Values that one rank's allocations depend on.

    ``in_flight`` micro batches are in flight before the first backward. ``sent`` are bytes of a sample's hidden state that
    is sent to the next pipeline stage; 0 on the last one. ``received`` are those of buffers that torch's pipeline
    stages keep, one for each micro batch and direction.
    """

    pieces: tuple[LayerGroup, ...]
    weights: tuple[UnitWeights, ...]
    bytes: tuple[UnitBytes, ...]
    layout: ShardLayout
    program: Program
    micro: int
    in_flight: int
    optimizer: int
    temporaries: int
    sent: float = 0.0
    received: float = 0.0
    average: int = 0

    @property
    def waits(self) -> bool:
        """Return whether unsharded gradients are stored until the last micro batch reduces them.

        A pipeline's always are, as ``torch.distributed.pipelining`` delays their reduction.
        """
        return self.program.gradients_wait or self.layout.pp > 1

    @property
    def reduces_late(self) -> bool:
        """Return whether gradients are reduced after the last backward.

        Torch's pipeline stages do so, and keep all gathered weights until then.
        """
        return self.layout.pp > 1 and self.layout.shards and self.layout.framework == "torchtitan"

    @property
    def has_buckets(self) -> bool:
        """Return whether gradients live in buckets: DDP's, or the buffers beside fp32 masters.

        These stay allocated.
        """
        return not self.layout.shards and (self.layout.replicas > 1 or self.layout.masters)
