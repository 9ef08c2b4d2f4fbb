"""What a plan says a step must do: collectives, bytes, block calls. Pure functions of the plan and the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec, ParameterSpec

Range = tuple[int, int]
Unit = list[ParameterSpec]


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one collective in one optimizer step, each from least to most.

    ``calls`` is ``None`` where PyTorch decides it by buckets, ``num_bytes`` where nothing says it beforehand.
    """

    calls: Range | None
    num_bytes: Range | None


@dataclass(frozen=True)
class Reduction:
    """How FSDP2's units move: cut over ``ranks``, reduced over ``replicas``, gathered ``again`` for backward."""

    ranks: int
    replicas: int
    again: bool

    @staticmethod
    def of(plan: Plan) -> Reduction:
        """That of ``plan``. A context-parallel rank is a data-parallel one for weights."""
        dims, shards = plan.dims, plan.parsed.shards_parameters
        ranks = dims.dp_shard * dims.cp if shards else 1
        again = plan.parsed.reshards_after_forward or not shards
        return Reduction(ranks, dims.dp * dims.cp // ranks, again)


def expected_traffic(
    spec: ModelSpec, plan: Plan, micros: int, units: list[Unit] | None = None, *, once: bool = False
) -> dict[str, Traffic]:
    """Each collective that must be seen in forward, backward and optimizer step; all others must not.

    Bytes are those of the whole tensor, with the padding that even shards need. A range has two ends only where frozen
    blocks leave open whether backward reaches them. ``units`` are sharding units, if they are not those of the whole
    model; it is the data-parallel part of the traffic that is told, where there is more. With ``once`` weights are
    gathered once in a step.
    """
    if plan.dims.dp * plan.dims.cp == 1:
        return {}
    if plan.parsed.shards_parameters or plan.dims.tp * plan.dims.pp > 1:
        return _sharded_traffic(units_of(spec) if units is None else units, plan, micros, once=once)
    reduced = sum(p.num_elements * p.itemsize for p in spec.parameters if p.trainable)
    traffic = {"all_reduce": Traffic(None, (reduced, reduced))}
    if plan.parsed.base == "zero1":
        number = sum(p.trainable for p in spec.parameters)
        traffic["broadcast"] = Traffic((number, number), (reduced, reduced))
    return traffic


def units_of(spec: ModelSpec) -> list[Unit]:
    """Parameters of each sharding unit: the blocks, then the root's if it has any."""
    units: dict[str | None, Unit] = {block: [] for block in spec.blocks}
    for parameter in spec.parameters:
        units.setdefault(parameter.block, []).append(parameter)
    return [units[name] for name in units if units[name]]


def padded_elements(parameter: ParameterSpec, ranks: int) -> int:
    """Elements once dim 0 is padded to a multiple of ``ranks``."""
    if not parameter.shape or not parameter.shape[0]:
        return parameter.num_elements
    rows = parameter.shape[0]
    return math.ceil(rows / ranks) * ranks * (parameter.num_elements // rows)


def _sharded_traffic(units: list[Unit], plan: Plan, micros: int, *, once: bool) -> dict[str, Traffic]:
    way = Reduction.of(plan)
    ranks, again, uses = way.ranks, int(way.again and not once), 1 if once else micros
    gathers, gathered, reduces, reduced, sliced = [0, 0], [0, 0], 0, 0, 0
    for unit in units:
        is_block = unit[0].block is not None
        trained = [p for p in unit if p.trainable]
        size = sum(padded_elements(p, ranks) * p.gathered_itemsize(plan.precision) for p in unit)
        least = 1 + (again if is_block and trained else 0)
        most = 1 + (again if is_block else 0)
        for end, times in enumerate((least, most)):
            gathers[end] += times * uses
            gathered[end] += times * uses * size
        if trained:
            reduces += 1
            whole = sum(padded_elements(p, ranks) * p.itemsize for p in trained)
            reduced += whole
            sliced += whole // ranks
    if plan.syncs_every_micro_batch:
        reduces, reduced, sliced = reduces * micros, reduced * micros, sliced * micros
    traffic = {}
    if ranks > 1:
        traffic["all_gather"] = Traffic((gathers[0], gathers[1]), (gathered[0], gathered[1]))
        traffic["reduce_scatter"] = Traffic((reduces, reduces), (reduced, reduced))
    if way.replicas > 1:
        traffic["all_reduce"] = Traffic((reduces, reduces), (sliced, sliced))
    return traffic


def expected_block_calls(spec: ModelSpec, plan: Plan, micros: int) -> Range:
    """Forward calls of the repeated blocks in one optimizer step, recomputed ones included."""
    blocks = len(spec.blocks)
    trained = {p.block for p in spec.parameters if p.trainable}
    again = 0 if plan.recompute == "none" else 1
    reached = sum(block in trained for block in spec.blocks)
    return micros * (blocks + again * reached), micros * blocks * (1 + again)
