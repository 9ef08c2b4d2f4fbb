"""Seconds of the update: the optimizer, what zero1 sends afterwards, what offloading moves and the host does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.cost.rates import Machine
from shardwise.cost.unit_time import COMPUTE_BYTES, UnitTime
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Strategy
from shardwise.spec.profile import ModelProfile
from shardwise.spec.workload import Workload

MASTER_BYTES = 4  # weights at rest, gradients and their reduction are fp32
HOST_BYTES_PER_S = 60e9  # a node's memory under the CPU optimizer, all ranks together; an assumption
# A node's NVMe drive, reading and writing in turn; 3 to 6 GB/s are the usual figures of one PCIe 4 drive.
NVME_BYTES_PER_S = 5e9
PCIE_SHARE = 0.8  # of the data sheet's rate that pinned copies reach
# Bytes that one optimizer step moves for an element: weight read and written, gradient read, states read and written.
OPTIMIZER_MOVES = {"adamw": 28.0, "adamw8bit": 16.0, "sgd": 20.0, "adafactor": 16.0}
CLIP_MOVES = 4.0  # the norm of the gradients reads them once


def update_s(
    machine: Machine,
    profile: ModelProfile,
    plan: Plan,
    strategy: Strategy,
    workload: Workload,
    times: Sequence[UnitTime],
    *,
    distributed: bool,
) -> tuple[float, float, float]:
    """Seconds of the optimizer, of sending what it has updated (zero1), and of offloading to the host or its drive.

    ``distributed``: zero1 is Megatron-LM's distributed optimizer, whose updated weights are gathered in the compute
    width, and not PyTorch's ZeroRedundancyOptimizer, which sends fp32 weights.
    """
    dims = plan.dims
    counts = [unit.count / (dims.pp if unit.kind == "block" else min(2, dims.pp)) for unit in profile.units]
    trainable = sum(count * time.trainable for count, time in zip(counts, times, strict=True))
    stored = sum(count * time.at_rest_bytes for count, time in zip(counts, times, strict=True))
    shards = dims.dp_shard * dims.cp if strategy.shards_parameters else 1
    stepped = trainable / (dims.dp * dims.cp if strategy.base == "zero1" else shards)
    moves = OPTIMIZER_MOVES.get(workload.optimizer or "", 12.0 + 8.0 * (workload.optimizer_states or 0))
    ranks, inner = dims.dp * dims.cp, max(1, machine.cluster.devices_per_node // dims.tp)
    after = 0.0
    if strategy.base == "zero1":
        width = COMPUTE_BYTES[plan.precision] if distributed else MASTER_BYTES
        after = machine.collective_s("all_gather", width * trainable, ranks, inner)
    clip = machine.memory_s(CLIP_MOVES * trainable / shards)
    if not (strategy.offload or strategy.nvme) or plan.device == "cpu":
        return machine.memory_s(moves * stepped) + clip, after, 0.0
    pcie = machine.gpu.pcie.bytes_per_s if machine.gpu is not None and machine.gpu.pcie is not None else None
    if pcie is None:
        return math.nan, after, math.nan
    passes = plan.grad_accum * (2 if strategy.reshards_after_forward else 1)
    moved = (passes * stored + MASTER_BYTES * trainable) / shards
    host = machine.cluster.devices_per_node * stepped * moves / HOST_BYTES_PER_S
    if strategy.nvme:  # weights and states, all but the gradient, come from the drive and go back
        host += machine.cluster.devices_per_node * stepped * (moves - MASTER_BYTES) / NVME_BYTES_PER_S
    return 0.0, after, moved / (pcie * PCIE_SHARE) + host
