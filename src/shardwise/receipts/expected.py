"""Expected effects of a step by the plan: collectives, bytes, block calls. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.model.facts import ModelSpec, ParameterSpec
from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import bytes_of, reduced_dtype
from shardwise.plan.traffic import ZERO1_TOGETHER, data_traffic, keeps_last_block

Range = tuple[int, int]
Unit = list[ParameterSpec]
_MARK_BYTES = 4  # of a parameter in DDP's map of those that are used, int32


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one collective in one optimizer step, each from least to most.

    ``calls`` is ``None`` if PyTorch's buckets decide it, ``num_bytes`` if it cannot be known beforehand.
    """

    calls: Range | None
    num_bytes: Range | None

    def __add__(self, other: Traffic) -> Traffic:
        """Add the ends of both, where both are known."""
        return Traffic(_sum(self.calls, other.calls), _sum(self.num_bytes, other.num_bytes))


def _sum(one: Range | None, other: Range | None) -> Range | None:
    return None if one is None or other is None else (one[0] + other[0], one[1] + other[1])


@dataclass(frozen=True)
class UnitCalls:
    """Calls of a unit in a step: with gradients, in the last such micro batch, and without.

    ``skipped``: gathers because other ranks run the unit, or may.
    """

    number: int
    in_last: int
    aside: int = 0
    skipped: int = 0


def expected_traffic(
    spec: ModelSpec,
    plan: Plan,
    micros: int,
    units: list[Unit] | None = None,
    *,
    once: bool = False,
    calls: Mapping[str | None, UnitCalls] | None = None,
    in_fp8: Collection[str] = (),
) -> dict[str, Traffic]:
    """Return each collective that must occur in forward, backward and update; no others may.

    Bytes are those of the full tensor, with the padding that even shards need. A range has two ends only if frozen
    blocks leave open whether backward reaches them. ``units`` are sharding units, if they are not those of the full
    model; only the data-parallel part of the traffic is returned. With ``once`` weights are
    gathered once in a step. ``calls`` are those of each block (``None`` for the rest), if they are not one for each
    micro batch. ``in_fp8`` are names of parameters that are gathered in one byte an element.
    """
    if plan.dims.dp * plan.dims.cp == 1:
        return {}
    if plan.parsed.shards_parameters or plan.dims.tp * plan.dims.pp > 1:
        units = units_of(spec) if units is None else units
        kept = spec.blocks[-1] if spec.blocks and keeps_last_block(plan) else None
        return _sharded_traffic(units, plan, micros, calls or {}, in_fp8, once=once, kept=kept)
    trained = [p for p in spec.parameters if p.trainable]
    reduced = sum(p.num_elements * bytes_of(p, reduced_dtype(plan, p.dtype)) for p in trained)
    stepped = sum(p.num_elements * p.itemsize for p in trained)
    number = sum(p.trainable for p in spec.parameters)
    used = _MARK_BYTES * number if plan.marks_used_parameters else 0
    traffic = {"all_reduce": Traffic(None, (reduced + used, reduced + used))}
    if plan.parsed.base == "zero1":
        alone = sum(p.num_elements * p.itemsize > ZERO1_TOGETHER for p in trained)
        fewest = 1 if plan.device == "cpu" else alone + (alone < number)  # all at once through shared memory
        traffic["broadcast"] = Traffic((fewest, number), (stepped, stepped))
    return traffic


def units_of(spec: ModelSpec) -> list[Unit]:
    """Return the parameters of each sharding unit: the blocks, then the root's if it has any."""
    units: dict[str | None, Unit] = {block: [] for block in spec.blocks}
    for parameter in spec.parameters:
        units.setdefault(parameter.block, []).append(parameter)
    return [units[name] for name in units if units[name]]


def padded_elements(parameter: ParameterSpec, ranks: int) -> int:
    """Return the number of elements with dim 0 padded to a multiple of ``ranks``."""
    if not parameter.shape or not parameter.shape[0]:
        return parameter.num_elements
    rows = parameter.shape[0]
    return math.ceil(rows / ranks) * ranks * (parameter.num_elements // rows)


def _sharded_traffic(
    units: list[Unit],
    plan: Plan,
    micros: int,
    calls: Mapping[str | None, UnitCalls],
    in_fp8: Collection[str],
    *,
    once: bool,
    kept: str | None,
) -> dict[str, Traffic]:
    moved = data_traffic(plan)
    ranks = moved.shards
    regathers = plan.parsed.reshards_after_forward or not plan.parsed.shards_parameters
    gathers, gathered, reduces, reduced, sliced = [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]
    for unit in units:
        block = unit[0].block
        trained = [p for p in unit if p.trainable]
        sizes = [1 if p.name in in_fp8 else p.gathered_itemsize(plan.precision) for p in unit]
        size = sum(padded_elements(p, ranks) * each for p, each in zip(unit, sizes, strict=True))
        full = sum(padded_elements(p, ranks) * bytes_of(p, reduced_dtype(plan, p.dtype)) for p in trained)
        again = regathers and not once and block is not None and block != kept
        uses = 1 if once else micros
        ran = calls.get(block, UnitCalls(uses, 1))
        several = ran.number if plan.syncs_every_micro_batch else ran.in_last
        often = (1, max(1, several)) if trained else (0, 0)
        if plan.syncs_every_micro_batch and trained:
            often = (micros, max(micros, several))
        for end, times in enumerate(_gathers(ran, uses, again=again, trained=bool(trained))):
            gathers[end] += times
            gathered[end] += times * size
            reduces[end] += often[end]
            reduced[end] += often[end] * full
            sliced[end] += often[end] * (full // ranks)
    traffic = {}
    if ranks > 1:
        traffic["all_gather"] = Traffic(_ends(gathers), _ends(gathered))
        traffic["reduce_scatter"] = Traffic(_ends(reduces), _ends(reduced))
    if moved.replicas > 1:
        traffic["all_reduce"] = Traffic(_ends(reduces), _ends(sliced))
    return traffic


def _gathers(ran: UnitCalls, micros: int, *, again: bool, trained: bool) -> Range:
    """Return how often a unit is gathered: per forward, and ``again`` per reached backward.

    Two forwards before a backward share the gathered weights, and the first of their backwards frees them. A unit
    that did not run may be gathered too, so that all ranks run the same collective.
    """
    fewer, _ = sorted((ran.number, micros))
    all_ran = ran.number + ran.skipped
    more = max(all_ran, micros)
    if again:
        return ran.number + (fewer if trained else 0), 2 * more + ran.aside
    return fewer, more + max(0, all_ran - micros) + ran.aside


def _ends(pair: list[int]) -> Range:
    return pair[0], pair[1]


def expected_block_calls(
    spec: ModelSpec, recomputed: Collection[str], micros: int, calls: Mapping[str, int] | None = None
) -> Range:
    """Return forward calls of the repeated blocks in one optimizer step, with those of ``recomputed`` ones.

    ``calls`` are those of each block that are not recomputed, if they are not one for each micro batch; a backward may
    then leave some out.
    """
    trained = {p.block for p in spec.parameters if p.trainable}
    calls = dict.fromkeys(spec.blocks, micros) if calls is None else calls
    again = {block: number for block, number in calls.items() if block in recomputed}
    reached = sum(min(micros, number) for block, number in again.items() if block in trained)
    return sum(calls.values()) + reached, sum(calls.values()) + sum(again.values())
