"""`CostInputs`: all that the allocations of one rank depend on."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.activations import UnitBytes
from shardwise.cost.memory.allocation_trace import Program
from shardwise.cost.memory.local_shapes import LayerGroup, ShardLayout, UnitWeights


@dataclass(frozen=True, slots=True)
class CostInputs:
    """All that one rank's allocations depend on. ``held`` micro batches are in flight before the first backward.

    ``sent`` are bytes of a sample's hidden state that goes on to the next pipeline stage; none from the last one.
    ``received`` are those of buffers that torch's own pipeline stages keep, one for each micro batch and direction.
    """

    pieces: tuple[LayerGroup, ...]
    weights: tuple[UnitWeights, ...]
    bytes: tuple[UnitBytes, ...]
    layout: ShardLayout
    program: Program
    micro: int
    held: int
    optimizer: int
    temporaries: int
    sent: float = 0.0
    received: float = 0.0

    @property
    def waits(self) -> bool:
        """Sharded gradients wait whole for the last micro batch; a pipeline's always do, as
        ``torch.distributed.pipelining`` holds their reduction back.
        """
        return self.program.gradients_wait or self.layout.pp > 1

    @property
    def reduces_late(self) -> bool:
        """Torch's own pipeline stages reduce when the last backward is over, and keep all gathered until then."""
        return self.layout.pp > 1 and self.layout.shards and self.layout.framework == "torchtitan"

    @property
    def has_buckets(self) -> bool:
        """DDP's buckets, or the buffers beside fp32 masters, are the gradients, and stay."""
        return not self.layout.shards and (self.layout.replicas > 1 or self.layout.masters)
