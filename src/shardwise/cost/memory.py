"""Bytes that a rank holds, by category. Closed formulas over the model's structure; nothing is run.

Exact: parameters, gradients and optimizer state at rest. Not counted: allocator rounding and fragmentation, the
framework's own context, communicator buffers, the optimizer's temporaries. A category that is not known is ``None``.
"""

from __future__ import annotations

import math

from shardwise.cost.estimate import Estimate
from shardwise.plan.plan import Plan
from shardwise.spec.model import ModelSpec, ParameterSpec, itemsize_of
from shardwise.spec.workload import Workload

STATE_ITEMSIZE = 4  # master weights, gradients and optimizer state are fp32


def estimate_memory(spec: ModelSpec, plan: Plan, workload: Workload) -> Estimate:
    """Bytes on the fullest rank under ``plan``; see the module's docstring for what is left out."""
    parameters = sum(held_elements(p, plan) * p.itemsize for p in spec.parameters)
    gradients = sum(held_elements(p, plan) * p.itemsize for p in spec.parameters if p.trainable)
    optimizer = _optimizer_bytes(spec, plan, workload)
    saved = workload.activation_bytes.get(plan.recompute)
    micro = plan.micro_batch or 1
    makes_room = plan.parsed.offload and plan.device != "cpu"  # a CPU's own memory is the host's
    offloaded = parameters + gradients + (optimizer or 0) if makes_room else 0
    return Estimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=None if saved is None else saved * micro,
        logits=None if workload.logits_bytes is None else workload.logits_bytes * micro,
        buffers=_gather_bytes(spec, plan),
        offloaded_bytes=offloaded,
    )


def held_elements(parameter: ParameterSpec, plan: Plan, rank: int = 0) -> int:
    """Elements of ``parameter`` at rest on a rank of the sharding axis.

    FSDP2 cuts dim 0 into chunks of ``ceil(rows / ranks)``; the last ranks may hold fewer rows or none.
    """
    if not plan.parsed.shards_parameters or not parameter.shape:
        return parameter.num_elements
    rows = parameter.shape[0]
    chunk = math.ceil(rows / plan.dims.dp_shard)
    mine = max(0, min(chunk, rows - rank * chunk))
    return mine * (parameter.num_elements // rows if rows else 0)


def stepped_groups(spec: ModelSpec, workload: Workload) -> list[list[ParameterSpec]]:
    """The trainable parameters that the optimizer steps, by its parameter groups."""
    trainable = {p.name: p for p in spec.parameters if p.trainable}
    if workload.parameter_groups is None:
        return [list(trainable.values())]
    return [[trainable[name] for name in group if name in trainable] for group in workload.parameter_groups]


def zero1_shares(groups: list[list[ParameterSpec]], world_size: int) -> list[list[ParameterSpec]]:
    """Which rank steps which parameter under ``zero1``.

    Group after group, largest first, each to the rank with the least so far: ZeroRedundancyOptimizer's own rule.
    """
    shares: list[list[ParameterSpec]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for group in groups:
        for parameter in sorted(group, key=lambda p: p.num_elements, reverse=True):
            rank = loads.index(min(loads))
            shares[rank].append(parameter)
            loads[rank] += parameter.num_elements
    return shares


def _optimizer_bytes(spec: ModelSpec, plan: Plan, workload: Workload) -> int | None:
    if workload.optimizer_states is None:
        return None
    groups = stepped_groups(spec, workload)
    shares = (
        zero1_shares(groups, plan.dims.dp) if plan.parsed.base == "zero1" else [[p for group in groups for p in group]]
    )
    return max(
        sum(held_elements(p, plan) * p.itemsize for p in share) * workload.optimizer_states
        + len(share) * workload.scalar_states * STATE_ITEMSIZE
        for share in shares
    )


def _gather_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Peak of the short-lived copies: gathered units, unsharded gradients, or autocast's narrow weights."""
    compute = itemsize_of(plan.precision)
    if not plan.parsed.shards_parameters:
        return 0 if plan.precision == "fp32" else spec.num_parameters * compute
    units = unit_elements(spec)
    root = units.pop(None, 0)
    if plan.parsed.reshards_after_forward:
        gathered = root + sum(sorted(units.values(), reverse=True)[:2])  # one in use, one prefetched
    else:
        gathered = root + sum(units.values())
    waiting = spec.num_trainable * STATE_ITEMSIZE if plan.grad_accum > 1 else 0
    largest = max([root, *units.values()])
    return gathered * compute + waiting + largest * STATE_ITEMSIZE  # and one unit's gradient on its way


def unit_elements(spec: ModelSpec) -> dict[str | None, int]:
    """Elements in each sharding unit: a block's name, or ``None`` for everything outside the blocks."""
    units: dict[str | None, int] = {}
    for parameter in spec.parameters:
        units[parameter.block] = units.get(parameter.block, 0) + parameter.num_elements
    return units
