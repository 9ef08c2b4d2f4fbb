"""Bytes that one device sends in a step, by mesh axis (payload of ring algorithms).

Excludes protocol overhead, the collectives of the clipped norm and of the loss (a few bytes), and padding.
"""

from __future__ import annotations

from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import itemsize_of
from shardwise.model.profile import ModelProfile
from shardwise.plan.divisibility import kv_repeats
from shardwise.plan.plan import Plan

GRADIENT_BYTES = 4  # gradients are reduced in fp32
TENSOR_COLLECTIVES = 8  # an all-gather or reduce-scatter before and after attention and MLP, forward and backward
EXCHANGES = 2  # of tokens for heads and back around an attention: once forward, once backward


def sent_bytes(profile: ModelProfile, plan: Plan) -> dict[str, float]:
    """Return bytes sent by one device in one step: ``dp``, ``tp``, ``cp``, ``pp``.

    Axes of one rank are omitted.
    """
    strategy, dims = plan.parsed, plan.dims
    narrow = itemsize_of(plan.precision)
    cut, accum, micro = dims.tp * dims.pp, plan.grad_accum, plan.micro_batch or 1
    gradients = profile.num_trainable * GRADIENT_BYTES / cut
    weights = _gathered(profile, narrow) / cut
    found: dict[str, float] = {}
    ranks, shard = dims.dp * dims.cp, dims.dp_shard * dims.cp  # a context-parallel group has equal weights
    if ranks > 1 and not strategy.shards_parameters:
        broadcast = profile.num_trainable * 4 / cut if strategy.base == "zero1" else 0.0
        found["dp"] = (2 * gradients + broadcast) * (ranks - 1) / ranks
    elif ranks > 1:
        gathers = accum * (2 if strategy.reshards_after_forward else 1)
        reduces = accum if plan.syncs_every_micro_batch else 1
        found["dp"] = (gathers * weights + reduces * gradients) * (shard - 1) / shard
        found["dp"] += reduces * 2 * gradients / shard * (dims.dp_replicate - 1) / dims.dp_replicate
    rows = micro * (plan.seq_len or profile.seq_len or 1) / dims.cp
    activation = rows * (profile.hidden_size or 0) * narrow
    blocks = profile.num_blocks / dims.pp
    if dims.tp > 1:
        found["tp"] = accum * blocks * TENSOR_COLLECTIVES * activation * (dims.tp - 1) / dims.tp
    if dims.cp > 1:
        moved = activation * exchanged(profile.heads, profile.kv_heads, dims.tp, dims.cp) / dims.tp
        found["cp"] = accum * blocks * EXCHANGES * moved * (dims.cp - 1) / dims.cp
    if dims.pp > 1:
        found["pp"] = accum * 2 * activation / dims.tp
    return found


def _gathered(profile: ModelProfile, narrow: float) -> float:
    """Return bytes of all gathered weights.

    ``narrow`` bytes an element, quantized ones as stored without scales.
    """
    return sum(
        unit.count * w.num_elements * (w.itemsize - w.scales if w.itemsize < 1 else narrow)
        for unit in profile.units
        for w in unit.weights
    )


def exchanged(heads: int | None, kv_heads: int | None, tp: int, cp: int) -> float:
    """Return the exchanged volume around an attention, in units of its queries.

    They, keys and values there, and the result back. Key-value heads are repeated where there are fewer of them than
    the degree divides.
    """
    queries = max(1, (heads or 1) // tp)
    keys = max(1, (kv_heads or heads or 1) // tp)
    return 2.0 + 2.0 * keys * kv_repeats(keys, cp) / queries


def crosses_nodes(axis: str, plan: Plan, cluster: ClusterSpec) -> bool:
    """Return True where an axis spans nodes: innermost is ``tp``, then ``cp``, ``dp``, ``pp``."""
    dims = plan.dims
    reach = {"tp": dims.tp, "cp": dims.tp * dims.cp, "dp": dims.tp * dims.cp * dims.dp, "pp": dims.world_size}
    return reach[axis] > cluster.devices_per_node


def traffic_text(axis: str, plan: Plan, cluster: ClusterSpec) -> str:
    """Format ``over the network`` or ``over nvlink``."""
    if crosses_nodes(axis, plan, cluster):
        return "over the network"
    return f"over {cluster.link.kind}" if cluster.link else "inside the node"
