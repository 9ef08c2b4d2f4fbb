"""Cost inputs of a plan's ranks, and the replay of their traces through the allocator model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.cost.memory.activations import unit_bytes
from shardwise.cost.memory.allocation_trace import AllocationTrace, Program
from shardwise.cost.memory.allocator import Block, CachingAllocator
from shardwise.cost.memory.cost_inputs import CostInputs
from shardwise.cost.memory.estimate import CATEGORIES, Phase, PhaseName
from shardwise.cost.memory.local_shapes import (
    FP32,
    LayerGroup,
    ShardLayout,
    average_bytes,
    heavy_stages,
    micro_batches_in_flight,
    rank_of,
    stage_pieces,
    unit_weights,
)
from shardwise.cost.memory.optimizer_shards import optimizer_bytes
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Recompute
from shardwise.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Peaks of a program: by phase, and of each category (in the order of `CATEGORIES`).

    ``fits`` is False where a limit was given and could not be kept: the program ended there. ``released``: at the limit
    cached memory was given back.
    """

    phases: tuple[Phase, ...]
    most: tuple[int, ...]
    fits: bool = True
    released: bool = False

    def peak(self, what: Literal["allocated", "reserved"]) -> int:
        """Highest value of all phases."""
        return max(getattr(phase, what) or 0 for phase in self.phases)


def settings_of(
    profile: ModelProfile, layout: ShardLayout, workload: Workload, micro: int, program: Program
) -> Iterator[CostInputs]:
    """Cost inputs of the ranks that can be the fullest: one per distinct pipeline stage."""
    for stage in heavy_stages(profile, layout):
        pieces = stage_pieces(profile, layout, stage, program.recompute, program.recompute_layers)
        weights = tuple(unit_weights(piece.unit, layout) for piece in pieces)
        state = optimizer_bytes(pieces, layout, workload) or 0
        sent = sent_bytes(profile, layout, stage, program.recompute, compiled=workload.compiled)
        yield CostInputs(
            pieces=pieces,
            weights=weights,
            bytes=tuple(unit_bytes(piece.unit, layout, piece.recompute, workload.compiled) for piece in pieces),
            layout=layout,
            program=program,
            micro=micro,
            in_flight=micro_batches_in_flight(layout, stage, program.grad_accum),
            optimizer=state,
            temporaries=_temporaries(pieces, layout, workload, state, early=program.optimizer_in_backward),
            sent=sent,
            average=average_bytes(pieces, layout, workload),
            received=2 * sent * program.grad_accum if layout.framework == "torchtitan" else 0.0,
        )


def sent_bytes(profile: ModelProfile, layout: ShardLayout, rank: int, recompute: Recompute, *, compiled: bool) -> float:
    """Bytes of a sample's hidden state that a pipeline rank's last stage sends and saves."""
    if layout.pp == 1 or layout.framework == "megatron" or rank == rank_of(layout, layout.pp * layout.virtual - 1):
        return 0.0
    block = next(unit for unit in profile.units if unit.kind == "block")
    return unit_bytes(block, layout, recompute, compiled).input


def _temporaries(
    pieces: tuple[LayerGroup, ...], layout: ShardLayout, workload: Workload, state: int, *, early: bool = False
) -> int:
    """Bytes of temporaries while the optimizer steps.

    ``torch.optim`` with foreach makes one tensor for each weight (``_multi_tensor_adam``: the root of the second
    moment); fused makes none, and optimizers with fp32 masters are fused. The plain loop makes some for one weight at a
    time. Under zero1 only for this rank's partition, as its state. ``early`` steps one weight at a time.
    """
    largest = max((unit_weights(p.unit, layout).largest for p in pieces), default=0) * layout.stored
    if layout.masters:  # a fused optimizer; 16-bit gradients are widened for it, a rank's part of them
        widened = sum(unit_weights(p.unit, layout).trained * p.count for p in pieces) * FP32
        ranks = layout.replicas if layout.shards_state else 1
        return 0 if layout.accumulated == FP32 else widened // ranks
    trained = sum(unit_weights(p.unit, layout).trained * p.count for p in pieces) * layout.stored
    if layout.shards_state and workload.optimizer_states:
        trained = min(trained, state // workload.optimizer_states)
    if early:
        return int(largest * max(workload.optimizer_temporaries, workload.loop_temporaries))
    return int(trained * workload.optimizer_temporaries + largest * workload.loop_temporaries)


def replay(
    trace: AllocationTrace, *, cuda: bool, expandable: bool = True, limit_bytes: int | None = None
) -> SimulatedStep:
    """Replay traces: live bytes by phase and category; on CUDA also the reserved bytes.

    The allocator takes no more than ``limit_bytes``; a program that needs more ends there.
    """
    live = [0] * len(CATEGORIES)
    most = [0] * len(CATEGORIES)
    allocator = CachingAllocator(expandable=expandable, limit_bytes=limit_bytes)
    handles: list[tuple[int, int, Block | None]] = []
    phases: list[Phase] = []
    starts = [*trace.phases, (len(trace.events), "resume")]
    total, peak = 0, 0
    for (begin, name), (end, _) in itertools.pairwise(starts):
        peak = total
        for size, category, stream in trace.events[begin:end]:
            if size < 0:
                size, category, block = handles[-1 - size]
                if cuda:
                    allocator.free(block)
                live[category] -= size
                total -= size
            else:
                handles.append((size, category, allocator.alloc(size, stream) if cuda else None))
                live[category] += size
                total += size
                if total > peak:
                    peak = total
                if live[category] > most[category]:
                    most[category] = live[category]
                if allocator.out_of_memory:
                    break
        phases.append(Phase(name=name, allocated=peak, reserved=allocator.peak_reserved if cuda else peak))
        if allocator.out_of_memory:
            break
    allocator.unlink(block for _, _, block in handles)
    fits, released = not allocator.out_of_memory, allocator.retries > 0
    return SimulatedStep(phases=tuple(_merged(phases)), most=tuple(most), fits=fits, released=released)


def _merged(phases: list[Phase]) -> Iterator[Phase]:
    """Merge phases of one name."""
    names: tuple[PhaseName, ...] = ("load", "first_step", "forward", "backward", "optimizer", "save", "resume")
    for name in names:
        same = [phase for phase in phases if phase.name == name]
        if same:
            yield Phase(
                name=name, allocated=max(p.allocated for p in same), reserved=max(p.reserved or 0 for p in same)
            )


def fullest(simulated: list[SimulatedStep]) -> SimulatedStep:
    """Combine several ranks: each value from the rank where it is highest."""
    if len(simulated) == 1:
        return simulated[0]
    phases = tuple(
        Phase(name=same[0].name, allocated=max(p.allocated for p in same), reserved=max(p.reserved or 0 for p in same))
        for same in zip(*(one.phases for one in simulated), strict=True)
    )
    most = tuple(max(column) for column in zip(*(one.most for one in simulated), strict=True))
    return SimulatedStep(phases, most, all(one.fits for one in simulated))
