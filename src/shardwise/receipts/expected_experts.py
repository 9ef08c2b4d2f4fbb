"""Expected part of a layer's experts on a rank, and their traffic, where experts are over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.cost.memory.expert_shards import held_shape
from shardwise.measure.collectives import Axes
from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.receipts.expected import Range, Traffic, Unit, UnitCalls, expected_traffic
from shardwise.train.session import Session

COUNT_BYTES = 8  # of an expert's number of tokens, sent before them
OF_EXPERTS = "experts' dp"


def expert_names(session: Session) -> frozenset[str]:
    """Return the names of the stacked weights that are over ranks; none without ``+ep``."""
    if session.plan.dims.ep == 1:
        return frozenset()
    return frozenset(name for layer in session.routing.layers for name in layer.parameters)


def expert_shape(session: Session, parameter: ParameterSpec, place: int | None = None) -> tuple[int, ...]:
    """Return the shape of stacked experts on a rank at rest, the dim that FSDP2 shards first."""
    dims = session.plan.dims
    place = session.ranks.rank // dims.ep % dims.expert_shards if place is None else place
    return held_shape(parameter.shape, dims, place)


def _local(parameter: ParameterSpec, dims: ParallelDims) -> tuple[int, ...]:
    """Return the shape on all ranks with the same experts together, the dim that FSDP2 shards first."""
    first, *rest = held_shape(parameter.shape, dims)
    return (parameter.num_elements // dims.ep // math.prod(rest) if first else 0, *rest)


def expert_units(session: Session, spec: ModelSpec) -> list[Unit]:
    """Return the sharding units of experts in this rank's part of the model."""
    names = expert_names(session)
    units: dict[str, Unit] = {}
    for p in spec.parameters:
        if p.name in names:
            local = p.model_copy(update={"shape": _local(p, session.plan.dims)})
            units.setdefault(p.name.rpartition(".")[0], []).append(local)
    return [*units.values()]


def expert_data(
    session: Session, spec: ModelSpec, micros: int, calls: Mapping[str | None, UnitCalls], axis: Axes, *, once: bool
) -> Iterator[tuple[str, Traffic]]:
    """Yield the collectives over the ranks with the same experts."""
    meshes, plan, units = session.applied.experts, session.plan, expert_units(session, spec)
    if meshes is None or not units:
        return
    alone, last = experts_alone(plan, meshes.data.size()), meshes.data.ndim - 1
    for name, traffic in expected_traffic(spec, alone, micros, units, once=once, calls=calls).items():
        yield f"{name} over {axis(name, ranks(meshes.data, 0 if name == 'all_reduce' else last))}", traffic


def experts_alone(plan: Plan, number: int) -> Plan:
    """Return the plan as the ``number`` of ranks with the same experts run it: its stages, without other axes."""
    shards = plan.dims.expert_shards
    dims = ParallelDims(dp_shard=shards, dp_replicate=number // shards, pp=plan.dims.pp)
    return plan.model_copy(update={"dims": dims})


def ranks(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """Return the ranks of one axis of a mesh, in ascending order."""
    return tuple(sorted(dist.get_process_group_ranks(mesh.get_group(dim))))


def add_expert_groups(session: Session, groups: dict[tuple[int, ...], str]) -> tuple[int, ...] | None:
    """Name the groups of experts that are no other axis's; return the ranks with different experts."""
    meshes = session.applied.experts
    if meshes is None:
        return None
    last = meshes.data.ndim - 1
    groups.setdefault(ranks(meshes.data, last), OF_EXPERTS)
    if last:
        groups.setdefault(ranks(meshes.data, 0), "dp_replicate")
    return ranks(meshes.ep, 0)


def dispatched(session: Session, facts: Any, received: int, axis: Axes) -> Iterator[tuple[str, str, Range, Range]]:
    """Yield the exchanges of tokens: collective, axis, calls and bytes, from least to most.

    ``received`` are the rows of this rank's experts in the step; what it sends follows from its tokens.
    """
    routing, meshes, dims = session.routing, session.applied.experts, session.plan.dims
    if meshes is None:
        return
    layers, number = [routing.layers[index] for index in routing.modules], len(facts.micros)
    if not layers:
        return
    chosen = sum(routing.top_k[index] for index in routing.modules)
    tokens = sum(n * (session.place.tp + 1) // dims.tp - n * session.place.tp // dims.tp for n in _sizes(facts))
    low, high = facts.bytes(facts.width)
    counts = sum(layer.num_experts for layer in layers) * COUNT_BYTES * number
    sent, back = int(facts.trained), 1 + int(facts.again)
    least, most = (1 + sent) * (tokens * chosen + received), 2 * (tokens * chosen + received)
    more = (tokens * chosen) * facts.again_least, (tokens * chosen + received) * facts.again
    calls = len(layers) * number
    again = (2 if facts.again_least else 0, 3 if facts.again else 0)
    yield (
        "all_to_all",
        axis("all_to_all", ranks(meshes.ep, 0)),
        (calls * (3 + 2 * sent + again[0]), calls * (5 + again[1])),
        (low * (least + more[0]) + counts * (1 + int(facts.again_least)), high * (most + more[1]) + counts * back),
    )
    if meshes.tp is not None:
        whole = len(layers) * facts.tokens
        size = whole * facts.width + chosen * facts.tokens
        yield (
            "all_reduce",
            "tp",
            (calls * (1 + 2 * sent), calls * (3 + int(facts.again))),
            (whole * low * (1 + sent), high * whole * (1 + int(facts.again)) + facts.bytes(size)[1] * 2),
        )


def _sizes(facts: Any) -> list[int]:
    return [samples * length for samples, length in facts.micros]
