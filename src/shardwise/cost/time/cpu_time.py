"""Seconds of a CPU's step outside of kernels, in calls of a small module: what Python, autograd and hooks take.

Fitted on 112 configurations of two ranks over four links on one machine of two cores (``benchmarks/choice``): a model
that a like fit had not seen had a median error of 11 to 19 %. On another machine, three times as fast, the same
constants had 7.5 %, and 24.2 % at the 90th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from shardwise.cost.time.machine import Machine, Rates
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Strategy
from shardwise.plan.traffic import ZERO1_MESSAGE, ZERO1_TOGETHER, shares_memory

# Calls (`Rates.launch_s`) of a step, of each trained tensor, of each broadcast of ZeRO-1, in a micro batch of FSDP2
# around a unit and of a pipeline around its stage.
CPU_STEP_CALLS, CPU_TENSOR_CALLS, CPU_BROADCAST_CALLS, CPU_UNIT_CALLS, CPU_STAGE_CALLS = 400.0, 8.0, 25.0, 350.0, 200.0
# Of gloo's all_reduce of two ranks, and of its all_gather, what it takes through shared memory (8 and 16 MiB, two cores
# of an Intel Xeon, torch 2.13).
SHARED_REDUCE, SHARED_GATHER = 0.42, 0.25
FIRST_BUCKET, BUCKET = 2.0**20, 25 * 2.0**20  # bytes of DDP's buckets, by default
SPREAD_CPU = (0.85, 1.3)  # the middle 80 % of measured over predicted steps of `benchmarks/choice`, which were seen


def cpu_host_s(machine: Machine, rates: Rates, profile: ModelProfile, plan: Plan) -> float:
    """Seconds of a CPU's step outside of kernels and of modules' own calls: Python's, and waits for small messages."""
    strategy, pp = plan.parsed, plan.dims.pp
    tensors = sum(unit.count * sum(w.trainable for w in unit.weights) for unit in profile.units) / pp
    calls = CPU_STEP_CALLS + tensors * CPU_TENSOR_CALLS
    waits = _agreement_s(machine, plan)
    if strategy.base == "zero1" and plan.dims.dp * plan.dims.cp > 1:
        shared = shares_memory(plan, machine.cluster.devices_per_node)
        number = 1.0 if shared else _broadcasts(profile, plan.dims.dp * plan.dims.cp)
        calls += CPU_BROADCAST_CALLS * number
        waits += number * _delay_s(machine, plan)  # there and back (gloo waits for the receiver), two at a time
    each = CPU_STAGE_CALLS if pp > 1 else 0.0
    each += CPU_UNIT_CALLS * (profile.num_blocks / pp + 1) if strategy.shards_parameters else 0.0
    return (calls + each * plan.grad_accum) * rates.launch_s + waits


def _agreement_s(machine: Machine, plan: Plan) -> float:
    """Seconds of a step's small messages of all ranks.

    They agree on its data and on its gradients (`train.agreement`), and where no rank has all gradients on their norm.
    """
    ranks, per_node = plan.dims.world_size, machine.cluster.devices_per_node
    split = plan.parsed.shards_parameters or plan.dims.splits_model
    norm = machine.collective_s("all_reduce", 8.0, ranks, per_node) if split else 0.0
    return 2 * machine.collective_s("all_gather", 1024.0 * ranks, ranks, per_node) + norm


def _delay_s(machine: Machine, plan: Plan) -> float:
    """Seconds of a small message between two ranks of data parallelism."""
    per_node = machine.cluster.devices_per_node
    across = plan.dims.dp * plan.dims.cp * plan.dims.tp > per_node  # tensor parallel is the innermost axis
    return machine.collective_s("send", 1.0, 2, 1 if across else 2)


def cpu_send_s(machine: Machine, stages: int, apart: int, message_bytes: float) -> float:
    """Seconds of one transfer between stages whose ranks are ``apart``: the mean of those inside and between nodes.

    gloo sends once the receiver has said that it waits, which a stage says when it has nothing else to do.
    """
    here = machine.cluster.devices_per_node
    across = [
        any(rank // here != (rank + apart) // here for rank in range(stage * apart, (stage + 1) * apart))
        for stage in range(stages - 1)
    ]
    each = {
        one: sum(machine.collective_s("send", size, 2, 1 if one else 2) for size in (message_bytes, 1.0))
        for one in set(across)
    }
    return sum(each[one] for one in across) / len(across)


def _broadcasts(profile: ModelProfile, ranks: int) -> float:
    """Messages of zero1's stepped weights in fp32."""
    sizes = [(4 * w.num_elements, unit.count) for unit in profile.units for w in unit.weights if w.trainable]
    small = sum(size * count for size, count in sizes if size <= ZERO1_TOGETHER)
    alone = sum(count for size, count in sizes if size > ZERO1_TOGETHER)
    return alone + ranks * math.ceil(small / ranks / ZERO1_MESSAGE)


def shared_s(machine: Machine, ranks: int, kind: Literal["all_reduce", "all_gather"], message_bytes: float) -> float:
    """Seconds of a collective through shared memory: as a part of gloo's own, which was measured.

    2 ranks were within 30 % of it from 1 to 16 MiB, and 4 on the same two cores 16 to 30 % slower.
    """
    message = machine.collective_s("all_reduce", 8.0, ranks, ranks)
    part = SHARED_REDUCE * (ranks + 2) / 4 if kind == "all_reduce" else SHARED_GATHER
    return message + part * machine.collective_s(kind, message_bytes, ranks, ranks)


def ddp_buckets(
    machine: Machine, strategy: Strategy, dims: ParallelDims, *, shared: bool
) -> tuple[Callable[[float], float], float, float] | None:
    """Return the seconds of DDP's buckets of so many bytes, and the sizes of the first and of the others.

    None of sharded gradients, and of a GPU, where the units of large models stand for buckets. What goes through
    ``shared`` memory is reduced at the end.
    """
    if machine.rates is None or strategy.base not in ("ddp", "zero1"):
        return None
    if shared:
        return lambda size: shared_s(machine, dims.world_size, "all_reduce", size), math.inf, math.inf
    ranks, inner = dims.dp * dims.cp, max(1, machine.cluster.devices_per_node // dims.tp)
    return lambda size: machine.collective_s("all_reduce", size, ranks, inner), FIRST_BUCKET, BUCKET
