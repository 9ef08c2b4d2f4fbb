"""Seconds of the update: optimizer, zero1's broadcast, offload traffic, host time.

Offloaded bytes, as ZeRO-Infinity counts them (Rajbhandari et al. 2021, arXiv:2104.07857, section 4): weights are copied
to the device before each use (forward, and backward where they were freed in between; recompute finds them there),
gradients are copied to the host once, and states are read and written once a step where the optimizer runs. Each device
has a separate wire to the host; the host's memory and its drive serve all devices of a node. No overlap with
computation is assumed, though prefetching hides some: an upper bound, times the fraction of the wire's rate that copies
reach. Offloaded activations hide nothing: they are copied on the stream that computes.

PyTorch's offload (FSDP2's ``CPUOffloadPolicy``) sends weights in their stored type. DeepSpeed sends weights in the
compute type, and keeps fp32 ones with the optimizer; its ZeRO-1 and 2 keep computing weights on the device and send
each rank's updated part back. ``+nvme`` reads and writes fp32 weight and states (12 bytes of AdamW each way) and,
without ``+offload``, also the computing weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.cost.memory.offloaded_activations import offloaded_activations
from shardwise.cost.time.cpu_time import shared_s
from shardwise.cost.time.layer_time import COMPUTE_BYTES, UnitElements
from shardwise.cost.time.machine import Machine
from shardwise.errors import PlanError
from shardwise.model.profile import ModelProfile
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Strategy
from shardwise.plan.traffic import gathers_of, shares_memory, weight_uses
from shardwise.plan.workload import Workload

MASTER_BYTES = 4  # weights at rest, gradients and their reduction are fp32
# A node's memory under the CPU optimizer, all ranks together: an assumption. One published step of 3.1 B weights under
# ZeRO-Offload took 2.4 s total on 128 cores (github.com/deepspeedai/DeepSpeed, pull request 7474): 36 GB/s or more.
HOST_BYTES_PER_S = 60e9
PCIE_SHARE = 0.8  # of the data sheet's rate that pinned copies reach
CLIP_MOVES = 4.0  # the norm of the gradients reads them once


def update_s(
    machine: Machine,
    profile: ModelProfile,
    plan: Plan,
    strategy: Strategy,
    workload: Workload,
    weights: Sequence[UnitElements],
    *,
    distributed: bool,
) -> tuple[float, float, float]:
    """Seconds of the optimizer, of zero1's broadcast of updated weights, and of offloading.

    ``distributed``: zero1 is Megatron-LM's distributed optimizer, whose updated weights are gathered in the compute
    type, and not PyTorch's ZeroRedundancyOptimizer, which sends fp32 weights.

    Raises:
        PlanError: the plan swaps to drives of unknown speed.
    """
    dims = plan.dims
    counts = [unit.count / (dims.pp if unit.kind == "block" else min(2, dims.pp)) for unit in profile.units]
    pairs = list(zip(counts, weights, strict=True))
    trainable = sum(count * (one.trainable - one.expert_trainable) for count, one in pairs)
    experts = sum(count * one.expert_trainable for count, one in pairs)
    stored = sum(count * one.at_rest_bytes for count, one in pairs)
    program, width = workload.program, COMPUTE_BYTES[plan.precision]
    partitions = strategy.base == "zero2" and program.zero == "deepspeed"
    shards_state = strategy.base == "zero1" or partitions
    shards = dims.dp_shard * dims.cp if strategy.shards_parameters and not partitions else 1
    stepped = trainable / (dims.dp * dims.cp if shards_state else shards)
    divided = shards_state or strategy.shards_parameters
    stepped += experts / (dims.expert_shards if divided else 1)  # of one replica: `ParallelDims.expert_shards`
    spec = OPTIMIZERS.get(workload.optimizer or "")
    moves = 12.0 + 8.0 * (workload.optimizer_states or 0) if spec is None else spec.moved_bytes
    if plan.weights == "compute":
        moves *= width / MASTER_BYTES
    ranks, inner = dims.dp * dims.cp, max(1, machine.cluster.devices_per_node // dims.tp)
    after = 0.0
    if shards_state:
        sent = width if distributed or plan.weights != "fp32" else MASTER_BYTES
        if machine.rates is not None and shares_memory(plan, machine.cluster.devices_per_node):
            after = shared_s(machine, ranks, "all_gather", sent * trainable)
        else:
            after = machine.collective_s("all_gather", sent * trainable, ranks, inner)
        outside = max(1, machine.cluster.devices_per_node // dims.ep)
        after += machine.collective_s("all_gather", sent * experts, dims.expert_shards, outside) if experts else 0.0
    held = trainable / shards + experts / (dims.expert_shards if strategy.shards_parameters and not partitions else 1)
    clip = machine.memory_s(CLIP_MOVES * held)
    trainable += experts
    if not (strategy.offload or strategy.nvme) or plan.device == "cpu":
        return machine.optimizer_s(moves * stepped) + clip, after, 0.0
    pcie = machine.gpu.pcie.bytes_per_s if machine.gpu is not None and machine.gpu.pcie is not None else None
    if pcie is None:
        return math.nan, after, math.nan
    elements = sum(count * one.elements for count, one in pairs)
    moved = _wire_bytes(plan, strategy, trainable, stored, elements)
    host = machine.cluster.devices_per_node * stepped * moves / HOST_BYTES_PER_S
    if strategy.nvme:
        drive = machine.cluster.nvme_bytes_per_s
        if drive is None:
            raise PlanError(
                f"{plan.strategy}: the speed of a node's drives is not known; give nvme_bytes_per_s in a cluster file"
            )
        swapped = _drive_bytes(plan, strategy, moves, stepped, elements / shards)
        host += machine.cluster.devices_per_node * swapped / drive
    return 0.0, after, moved / shards / (pcie * PCIE_SHARE) + host


def activations_s(machine: Machine, profile: ModelProfile, plan: Plan, workload: Workload) -> float:
    """Seconds of a step in which what blocks save goes to host memory and comes back, on the stream that computes."""
    moved = 2.0 * offloaded_activations(profile, plan, workload) * plan.grad_accum
    if not moved or plan.device == "cpu":
        return 0.0
    pcie = machine.gpu.pcie.bytes_per_s if machine.gpu is not None and machine.gpu.pcie is not None else None
    return math.nan if pcie is None else moved / (pcie * PCIE_SHARE)


def _wire_bytes(plan: Plan, strategy: Strategy, trainable: float, stored: float, elements: float) -> float:
    """Bytes between device and host in a step, summed over all shards."""
    reductions = plan.grad_accum if plan.gradient_sync == "every" else 1
    gradients = MASTER_BYTES * trainable * reductions
    if strategy.engine == "torch":
        return gathers_of(plan) * stored + gradients
    width = COMPUTE_BYTES[plan.precision]
    if strategy.shards_parameters and strategy.reshards_after_forward:  # ZeRO-3
        return gathers_of(plan) * min(stored, width * elements) + gradients
    return MASTER_BYTES * trainable * plan.grad_accum + width * trainable


def _drive_bytes(plan: Plan, strategy: Strategy, moves: float, stepped: float, weights: float) -> float:
    """Bytes that a step reads and writes on the drive for one device.

    Fp32 weight and states there and back, and the computing weights, read for each use and written once.
    """
    swapped = moves - MASTER_BYTES  # all that the optimizer reads and writes except the gradient
    width = COMPUTE_BYTES[plan.precision]
    computing = 0.0 if strategy.offload else (weight_uses(strategy, plan.grad_accum) * weights + stepped) * width
    return swapped * stepped + computing
