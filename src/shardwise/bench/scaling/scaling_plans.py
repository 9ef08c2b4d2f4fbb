"""Plans for the sizes of ``bench scaling``; they differ only in dp ranks. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import PlanError, UserError
from shardwise.measure.scaling_facts import LeftOut, Mode
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import Plan


def plan_at(reference: Plan, devices: int, mode: Mode) -> Plan:
    """Scale ``reference`` to ``devices``: model-parallel degrees stay, dp ranks change.

    Weak scaling keeps micro batch and accumulation. Strong scaling keeps the global batch: accumulation shrinks first,
    and the micro batch only where a rank has fewer samples than it.

    Raises:
        PlanError: the strategy has no such size, or its data-parallel ranks do not divide the global batch.
    """
    dims = _dims_at(reference, devices)
    micro, accum = reference.micro_batch or 1, reference.grad_accum
    if mode == "strong":
        batch = reference.global_batch or reference.dims.dp
        if batch % dims.dp:
            raise PlanError(
                f"{devices} devices are {dims.dp} data-parallel ranks, and the global batch {batch} is no multiple of "
                f"that; set train.global_batch={(batch // dims.dp + 1) * dims.dp}, or leave this size out"
            )
        share = batch // dims.dp
        micro = next(size for size in range(min(micro, share), 0, -1) if share % size == 0)
        accum = share // micro
    return reference.model_copy(update={"dims": dims, "micro_batch": micro, "grad_accum": accum})


def _dims_at(reference: Plan, devices: int) -> ParallelDims:
    """Degrees on ``devices``; hsdp keeps the size of its sharding groups if ranks suffice."""
    strategy, shard = reference.parsed, reference.dims.dp_shard
    ranks = devices // (strategy.tp * strategy.pp * strategy.cp)
    if strategy.base == "hsdp":
        return dims_for(strategy, devices, dp_shard=shard if ranks % shard == 0 else max(1, ranks))
    return dims_for(strategy, devices)


def default_sizes(reference: Plan, devices: int) -> list[int]:
    """Default sizes: 1, 2, 4 ... and all, times the strategy's model-parallel ranks."""
    step = reference.dims.tp * reference.dims.pp * reference.dims.cp
    most = max(1, devices // step)
    powers = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    return [step * number for number in sorted({*powers, most})]


def plans_of(
    reference: Plan, sizes: Sequence[int], modes: Sequence[Mode], *, named: bool
) -> tuple[dict[tuple[Mode, int], Plan], list[LeftOut]]:
    """Build the plan of each mode and size, and list combinations without one.

    Raises:
        UserError: a size that the user has ``named`` is invalid in every mode, or no size is valid; every reason.
    """
    plans: dict[tuple[Mode, int], Plan] = {}
    left_out: list[LeftOut] = []
    for size in sizes:
        for mode in modes:
            try:
                plans[mode, size] = plan_at(reference, size, mode)
            except PlanError as error:
                left_out.append(LeftOut(mode=mode, devices=size, reason="; ".join(error.problems)))
    there = {size for _, size in plans}
    wrong = [f"--size {one.devices}: {one.reason}" for one in left_out if named and one.devices not in there]
    if wrong or not plans:
        raise UserError(*dict.fromkeys(wrong or [one.reason for one in left_out]))
    return plans, left_out
