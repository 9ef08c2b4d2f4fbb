"""Rough time and memory estimates to select plans for full ones. Never displayed.

Effects that do not change the selection are ignored on purpose. The displayed order comes from `cost.time`, the fit
from `cost.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.local_shapes import FP32, has_masters
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.objective import SEQUENCES
from shardwise.plan.plan import Recompute
from shardwise.plan.program import ProgramTraits
from shardwise.plan.traffic import distinct_part, weight_uses
from shardwise.plan.workload import Workload
from shardwise.search.enumerate import Layout

EFFICIENCY = 0.6  # of the peak, for large matrices
HALF_ROWS = 512  # rows at which a matrix product reaches half its rate
NETWORK_BYTES_PER_S = 25e9  # bytes/s of network per device, where unknown
LINK_BYTES_PER_S = 25e9
HOST_LINK_BYTES_PER_S = 12e9
LINK_SHARE = 0.7  # share of a link's data-sheet rate that a collective reaches
AGAIN: dict[Recompute, float] = {"none": 0.0, "selective": 0.05, "full": 1 / 3}  # of forward and backward


@dataclass(frozen=True, slots=True)
class Totals:
    """Aggregates of model, workload and cluster for the rough estimate."""

    parameters: int
    trainable: int
    flops: float  # forward, of one sample
    blocks: int
    hidden: int
    seq_len: int
    peak: float
    link: float
    network: float
    host_link: float
    per_node: int
    state_bytes: float  # of one trained element's optimizer state, without a master
    master_bytes: float  # of one trained element's master, where there are masters
    weight_bytes: float
    program: ProgramTraits
    width: int  # bytes of an element in forward and backward
    gradient_bytes: float  # of one trained element at rest
    kv_share: float  # key-value heads over heads
    experts: int = 0  # elements of routed experts
    trained_experts: int = 0
    copied: float = 0.0  # elements of a sample's tokens that are sent to experts, over all layers
    routed: tuple[int, int] = (1, 1)  # experts of a layer, and those of one token


def totals_of(profile: ModelProfile, workload: Workload, cluster: ClusterSpec, precision: str) -> Totals:
    """Compute the inputs of `rough_step_time_s` and `min_bytes`."""
    gpu = cluster.gpu
    peak = (gpu.peak_flops.get(precision) or gpu.peak_flops.get("bf16")) if gpu else None
    link = (cluster.link.bytes_per_s if cluster.link else None) or LINK_BYTES_PER_S
    network = (cluster.network.bytes_per_s if cluster.network else None) or NETWORK_BYTES_PER_S
    host = (gpu.pcie.bytes_per_s if gpu and gpu.pcie else None) or HOST_LINK_BYTES_PER_S
    spec = workload.custom_state
    stored = sum(w.num_elements * w.itemsize * unit.count for unit in profile.units for w in unit.weights)
    program, width = workload.program, 4 if precision == "fp32" else 2
    narrow = width / 4 if program.weights == "compute" else 1.0
    parameters, each = profile.num_parameters, SEQUENCES[workload.objective]
    is_known = workload.optimizer is not None or workload.optimizer_states is not None
    return Totals(
        parameters=parameters,
        trainable=profile.num_trainable,
        flops=profile.flops * each * (1 if workload.objective == "lm" else 4 / 3),  # a reference's forward beside 3
        blocks=max(1, profile.num_blocks),
        hidden=profile.hidden_size or 1024,
        seq_len=(workload.seq_len or profile.seq_len or 1) * each,
        peak=(peak or 1e14) * EFFICIENCY,
        link=link * LINK_SHARE,
        network=network * LINK_SHARE,
        host_link=host * LINK_SHARE,
        per_node=cluster.devices_per_node,
        state_bytes=(4.0 * (workload.optimizer_states or 0) if spec is None else spec.least_bytes) * narrow,
        master_bytes=FP32 * is_known,
        weight_bytes=stored / max(1, parameters) * (1.0 if program.weights == "fp32" else width / 4),
        program=program,
        width=width,
        gradient_bytes=float(width if program.accumulate == "compute" or program.weights == "compute" else 4),
        kv_share=(profile.kv_heads or 1) / (profile.heads or profile.kv_heads or 1),
        experts=sum(w.num_elements * u.count for u in profile.units for w in u.weights if w.experts),
        trained_experts=sum(
            w.num_elements * u.count for u in profile.units for w in u.weights if w.experts * w.trainable
        ),
        routed=max(((unit.experts, round(unit.share * unit.experts)) for unit in profile.units), default=(1, 1)),
        copied=each * sum(op.moved / 2 * u.count for u in profile.units for op in u.ops if op.name == "dispatch"),
    )


def min_bytes(totals: Totals, layout: Layout) -> float:
    """Lower bound of bytes per rank: weights, gradients and optimizer state, evenly sharded."""
    strategy, dims = layout.strategy, layout.dims
    if strategy.offload or strategy.nvme:
        return 0.0
    model_ways = dims.tp * dims.pp
    ways = dims.dp_shard * dims.cp if strategy.shards_parameters else 1
    state_ways = dims.dp * dims.cp if strategy.base == "zero1" else ways
    spread, trained = (totals.experts, totals.trained_experts) if dims.ep > 1 else (0, 0)
    weight, state = totals.weight_bytes, totals.state_bytes
    if has_masters(strategy, dims, totals.program, totals.program.weights, totals.width):
        weight *= totals.width / FP32 if totals.program.weights == "fp32" else 1.0
        state += totals.master_bytes
    rest_bytes = (totals.parameters - spread) * weight + (totals.trainable - trained) * totals.gradient_bytes
    experts_bytes = spread * weight + trained * totals.gradient_bytes
    own = dims.expert_shards if strategy.shards_parameters else 1
    own_state = dims.expert_shards if strategy.shards_parameters or strategy.base == "zero1" else 1
    return (
        rest_bytes / (model_ways * ways)
        + (totals.trainable - trained) * state / (model_ways * state_ways)
        + experts_bytes / (dims.ep * own * dims.pp)
        + trained * state / (dims.ep * own_state * dims.pp)
    )


def rough_step_time_s(
    totals: Totals, layout: Layout, micro: int, recompute: Recompute, *, every: bool = False
) -> float:
    """Rough step time in seconds: arithmetic (slower for small matrices) and traffic."""
    strategy, dims = layout.strategy, layout.dims
    accum = layout.share // micro
    model_ranks = dims.tp * dims.pp * dims.cp
    rows, width = micro * totals.seq_len / dims.cp, totals.hidden / dims.tp
    rate = totals.peak * rows / (rows + HALF_ROWS) * width / (width + HALF_ROWS)
    compute = 3 * totals.flops * (1 + AGAIN[recompute]) * layout.share / (model_ranks * rate)
    activation = rows * totals.hidden * 2
    blocks = totals.blocks / dims.pp
    exposed = 0.0
    if dims.tp > 1:
        link = totals.link if dims.tp <= totals.per_node else totals.network
        exposed += accum * blocks * 8 * activation * (dims.tp - 1) / dims.tp / link
    if dims.cp > 1:
        link = totals.link if dims.tp * dims.cp <= totals.per_node else totals.network
        sent = 4 * activation * (1 + totals.kv_share) / dims.tp * (dims.cp - 1) / dims.cp  # tokens for heads, and back
        exposed += accum * blocks * sent / link
    if dims.ep > 1:
        exchange = accum * 4 * 2 * micro * totals.copied / model_ranks * _sent_s(totals, dims.ep)
        hidden = min(exchange, compute) * (recompute != "full") * totals.program.overlaps_dispatch
        exposed += exchange - 0.85 * hidden
    data = _data_parallel_s(totals, layout, accum, accum if every else 1)
    model_ways = dims.tp * dims.pp
    if strategy.offload:
        exposed += totals.trainable * 12 / (model_ways * dims.dp_shard * totals.host_link)
    body = max(compute + exposed, data) + 0.15 * min(compute, data)
    return body * (accum + dims.pp - 1) / accum


def _sent_s(totals: Totals, ep: int) -> float:
    """Seconds to send a byte of each copy of a token to its expert's rank, or one for all on that rank and node."""
    across = ep > totals.per_node
    if totals.program.expert_dispatch == "copies":
        return (ep - 1) / ep / (totals.network if across else totals.link)
    inside = distinct_part(*totals.routed, ep) / totals.link
    nodes = distinct_part(*totals.routed, ep, totals.per_node) * (1 - totals.per_node / ep) if across else 0.0
    return max(inside, nodes / totals.network)


def _data_parallel_s(totals: Totals, layout: Layout, accum: int, reduces: int) -> float:
    strategy, dims = layout.strategy, layout.dims
    model_ways = dims.tp * dims.pp
    inside = max(1, totals.per_node // (dims.tp * dims.cp))

    def over(ranks: int) -> float:
        return (ranks - 1) / ranks / _rate(totals, ranks, inside)

    spread, trained = (totals.experts, totals.trained_experts) if dims.ep > 1 else (0, 0)
    gradients, narrow = (totals.trainable - trained) * 4 / model_ways, (totals.parameters - spread) * 2 / model_ways
    seconds = 0.0
    if spread:  # the ranks that have the same experts are apart, so few of them are on a node
        gathered = weight_uses(strategy, accum) * spread * 2 if strategy.shards_parameters else 0
        apart, moved = max(1, totals.per_node // dims.ep), gathered + 2 * reduces * trained * 4
        rate = _rate(totals, dims.expert_shards, apart)
        seconds += moved / (dims.ep * dims.pp) * (dims.expert_shards - 1) / dims.expert_shards / rate
    if not strategy.shards_parameters:
        again = 1.5 if strategy.base == "zero1" else 1.0
        return seconds + 2 * gradients * over(dims.dp) * again
    gathers = weight_uses(strategy, accum)
    seconds += (gathers * narrow + reduces * gradients) * over(dims.dp_shard)
    if dims.dp_replicate > 1:
        rate = _rate(totals, dims.dp_replicate, max(1, inside // dims.dp_shard))
        seconds += 2 * gradients / dims.dp_shard * (dims.dp_replicate - 1) / dims.dp_replicate / rate
    return seconds


def _rate(totals: Totals, ranks: int, inside: int) -> float:
    """Bytes/s of a ring over ``ranks``, ``inside`` of them on a node.

    Across nodes each rank adds its share of the network, as rings leave a node through all of its adapters.
    """
    return totals.link if ranks <= inside else min(totals.link, totals.network * inside)
