"""Bytes that blocks save for the backward, where a plan keeps them in host memory."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.cost.memory.activations import unit_bytes
from shardwise.cost.memory.local_shapes import heavy_stages, layout_of, pinned_bytes, stage_pieces, with_routing
from shardwise.model.profile import ModelProfile
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload


def offloaded_activations(profile: ModelProfile, plan: Plan, workload: Workload) -> float:
    """Return the bytes of one micro batch on the rank that saves most; of a recomputed block its input.

    Each goes to the host in the forward and comes back in the backward.
    """
    return _most(profile, plan, workload, lambda size: size)


def pinned_activations(profile: ModelProfile, plan: Plan, workload: Workload) -> float:
    """Return the host memory that is pinned for `offloaded_activations`: what each operation saves is one tensor."""
    return _most(profile, plan, workload, pinned_bytes)


def _most(profile: ModelProfile, plan: Plan, workload: Workload, held: Callable[[float], float]) -> float:
    if not plan.offload_activations:
        return 0.0
    layout, compiled = with_routing(layout_of(plan, workload.program), workload), workload.compiles(plan)
    most = 0.0
    for stage in heavy_stages(profile, layout):
        pieces = stage_pieces(profile, layout, stage, plan.recompute, plan.recompute_layers)
        blocks = [piece for piece in pieces if piece.is_block]
        saved = [(unit_bytes(p.unit, layout, p.recompute, compiled).pieces, p.count) for p in blocks]
        most = max(most, sum(held(size * plan.sequences) * count for sizes, count in saved for size in sizes))
    return most
