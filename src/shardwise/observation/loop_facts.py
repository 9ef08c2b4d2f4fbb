"""Facts that one rank observed in a step of any training loop, as JSON that ranks exchange. No torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from shardwise.observation.loop_times import LoopTimes


class ParameterFacts(BaseModel):
    """Parameter on one rank.

    ``shards`` is the number of different parts over all ranks (1 where it is replicated), ``part`` names this rank's;
    ranks with the same part have the same elements. ``held`` counts the optimizer groups that contain it. ``norm`` is
    the norm of this rank's gradient just before the optimizer's step; ``None`` without a gradient. ``bits`` is a
    checksum after the step.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    name: str
    elements: int
    local_elements: int
    dtype: str
    trainable: bool
    placement: str
    shards: int = 1
    part: str = ""
    held: int = 1
    has_state: bool = False
    norm: float | None = None
    bits: int | None = None


class BufferFacts(BaseModel):
    """Buffer on one rank; ``sent`` is true where the wrapper sends rank 0's at each forward."""

    model_config = ConfigDict(frozen=True)

    name: str
    bits: int
    sent: bool = False


class TrafficFacts(BaseModel):
    """Collectives of one kind in one phase of a step: calls, and bytes of the full tensors."""

    model_config = ConfigDict(frozen=True)

    name: str
    phase: str
    calls: int
    num_bytes: int


class LoopFacts(BaseModel):
    """Facts of one rank about its second optimizer step; ``None`` is unknown.

    ``backward_elements`` are the gradient elements reduced in each backward, ``after_elements`` those reduced after the
    last backward, by the loop itself. ``norm_backward`` and ``norm_step`` are norms of this rank's gradients at the end
    of the last backward and just before the step. ``products`` and ``recomputed`` count matrix products of the
    forward, and those that ran again in a backward. ``quiet`` names modules with dropout that were in evaluation mode
    during training. ``earlier`` are the sample checksums of the first step. ``state_elements`` counts those of
    which an engine keeps the optimizer's state here. ``times`` is there where the loop asked for a run folder.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    rank: int
    world_size: int
    wrapper: str
    units: int = 0
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[BufferFacts, ...] = ()
    foreign: int = 0
    state_elements: int | None = None
    state_dtypes: tuple[str, ...] = ()
    state_devices: tuple[str, ...] = ()
    gradient_dtypes: tuple[str, ...] = ()
    product_dtypes: tuple[str, ...] = ()
    reduction_dtypes: tuple[str, ...] = ()
    traffic: tuple[TrafficFacts, ...] = ()
    forwards: int = 0
    bypassed: int = 0
    backward_elements: tuple[int, ...] = ()
    after_elements: int = 0
    sync_refused: int = 0
    products: int = 0
    recomputed: int = 0
    offloads: bool | None = None
    norm_backward: float | None = None
    norm_step: float | None = None
    samples: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    training: bool | None = None
    quiet: tuple[str, ...] = ()
    dropouts: int = 0
    tied_before: tuple[tuple[str, ...], ...] = ()
    tied_declared: tuple[tuple[str, ...], ...] = ()
    tied_now: tuple[tuple[str, ...], ...] = ()
    unknown: tuple[str, ...] = ()
    times: LoopTimes | None = None

    @property
    def backwards(self) -> int:
        """Number of backwards in the step."""
        return len(self.backward_elements)

    @property
    def micro_batches(self) -> int:
        """Number of micro batches: several backwards of one forward are one, and several forwards of one backward."""
        return min(self.forwards or self.backwards, self.backwards)

    @property
    def trained(self) -> list[ParameterFacts]:
        """Trainable parameters."""
        return [p for p in self.parameters if p.trainable]
