"""The collectives of a step by mesh axis: how often weights and gradients move, between whom, and the bytes sent.

Costs price these, search explains plans by them, receipts expect them and scaling extrapolates them. What a rank really
sent is measured apart from this (`measure.collectives`), so that the two can differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import itemsize_of
from shardwise.model.profile import ModelProfile, Unit
from shardwise.plan.divisibility import kv_repeats
from shardwise.plan.fp8_recipes import in_fp8
from shardwise.plan.plan import Plan, gathers_fp8
from shardwise.plan.program import OWN, ProgramTraits
from shardwise.plan.strategy import Strategy

GRADIENT_BYTES = 4  # of fp32, in which gradients are reduced where a plan says nothing else
TENSOR_COLLECTIVES = 8  # an all-gather or reduce-scatter before and after attention and MLP, forward and backward
DISPATCHES = 4  # of the copies of tokens to experts and back: forward, and both again in backward
REPEATED_DISPATCHES = 2  # once more with recompute: results are weighed where they come back, so both run again
ZERO1_TOGETHER = 1 << 17  # bytes; zero1 broadcasts a rank's weights up to this together, and larger ones alone: no copy
SHARING_RANKS = 4  # CPU ranks that share memory, at most: each reads what all have
ZERO1_MESSAGE = 1 << 20  # bytes of weights that are broadcast together, at most
EXCHANGES = 2  # of tokens for heads and back around an attention: once forward, once backward


@dataclass(frozen=True)
class DataTraffic:
    """How often a unit's weights and gradients move over the data-parallel axes in one optimizer step.

    A unit is sharded over ``shards`` ranks, and there are ``replicas`` of each shard: a rank of context parallel is a
    data-parallel one for weights. ``gathers`` and ``reduces`` count all-gathers of weights and reductions of gradients;
    ``broadcasts`` sends stepped weights (``zero1``). The last block is gathered ``kept`` times less; see
    `keeps_last_block`. Blocks that frozen or skipped parts leave out are not counted.
    """

    shards: int
    replicas: int
    gathers: int
    reduces: int
    broadcasts: int = 0
    kept: int = 0

    @property
    def ranks(self) -> int:
        """All data-parallel ranks of a unit."""
        return self.shards * self.replicas


def data_traffic(plan: Plan) -> DataTraffic:
    """The data-parallel collectives of a plan."""
    strategy, dims = plan.parsed, plan.dims
    ranks = dims.dp * dims.cp
    if not strategy.shards_parameters:
        return DataTraffic(1, ranks, gathers=0, reduces=1, broadcasts=int(strategy.base == "zero1"))
    shards = dims.dp_shard * dims.cp
    reduces = plan.grad_accum if plan.syncs_every_micro_batch else 1
    kept = plan.grad_accum * keeps_last_block(plan)
    return DataTraffic(shards, ranks // shards, gathers_of(plan), reduces, kept=kept)


def keeps_last_block(plan: Plan) -> bool:
    """Whether the weights of the last block stay gathered from its forward to its backward, which come one after the
    other: a gather less for each micro batch, for the weights of a block beside the loss.

    Over gloo, where nothing computes meanwhile; FSDP2 gathers them behind the backward of the head on a GPU, and what
    it saves there was not measured.
    """
    strategy = plan.parsed
    sharded = strategy.reshards_after_forward and strategy.engine == "torch"
    return sharded and plan.device == "cpu" and plan.dims.pp == 1 and plan.program == OWN


def shares_memory(plan: Plan, ranks_per_node: int) -> bool:
    """Whether replicated gradients and zero1's weights go through memory that CPU ranks of one machine share.

    `shardwise.distributed.shared_memory` says where; a plan does not know whether the machine has what that needs.
    """
    few = 1 < plan.dims.world_size <= min(SHARING_RANKS, ranks_per_node) and plan.dims.tp * plan.dims.pp == 1
    replicated = plan.parsed.base in ("ddp", "zero1") and plan.parsed.engine == "torch"
    return few and replicated and plan.device == "cpu" and plan.program == OWN


def gathers_of(plan: Plan) -> int:
    """How often a step brings a block's sharded weights to a rank, with those of a frozen reference's forward."""
    return weight_uses(plan.parsed, plan.grad_accum) + plan.grad_accum * (plan.reference != "none")


def weight_uses(strategy: Strategy, micro_batches: int) -> int:
    """How often a step brings a block's sharded weights to a rank: for each forward, and again for each backward where
    they are freed between the two.
    """
    return micro_batches * (2 if strategy.reshards_after_forward else 1)


def distinct_part(experts: int, per_token: int, ep: int, ranks: int = 1) -> float:
    """Places of ``ranks`` ranks each that a token's experts are on, over their number, where they are drawn evenly.

    What a program sends of a token that goes once to each rank, or node, over a copy for each of its experts.
    """
    each, chosen = experts // ep, max(1, per_token)
    sizes = [each * min(ranks, ep - first) for first in range(0, ep, ranks)]
    missed = sum(math.comb(experts - size, chosen) for size in sizes) / math.comb(experts, chosen)
    return (len(sizes) - missed) / chosen


def sent_bytes(
    profile: ModelProfile, plan: Plan, program: ProgramTraits, *, per_node: int | None = None
) -> dict[str, float]:
    """Bytes sent by one device in one optimizer step by axis (``dp``, ``ep``, …); axes of one rank are left out.

    ``program`` are the traits of the program that runs the plan, which names only it: those of a file cannot be found
    by that name. Payload of ring algorithms. Of experts over more than ``per_node`` ranks it is what crosses the
    network, where the program sends a token once to each node. Leaves out protocol overhead, the collectives of the
    clipped norm and of the loss (a few bytes), and padding.
    """
    dims, moved = plan.dims, data_traffic(plan)
    narrow = itemsize_of(plan.precision)
    model_ways, accum = (
        dims.tp * dims.pp,
        plan.grad_accum * (1.0 if plan.reference == "none" else 1.5),
    )  # one more forward
    spread = _experts(profile, dims.ep)
    reduced, stepped = _reduced_bytes(plan, narrow), GRADIENT_BYTES if plan.weights == "fp32" else narrow
    trained = (profile.num_trainable - spread[1]) / model_ways
    gradients = trained * reduced
    found: dict[str, float] = {}
    if moved.ranks > 1 and _partitions(plan, program):
        found["dp"] = (moved.reduces * gradients + trained * stepped) * (moved.ranks - 1) / moved.ranks
    elif moved.ranks > 1:
        weights = sum(u.count * _gathered(u, plan, narrow, experts=dims.ep == 1) for u in profile.units) / model_ways
        last = sum(_gathered(u, plan, narrow, experts=dims.ep == 1) for u in _last_block(profile)) / model_ways
        scattered = moved.gathers * weights + moved.reduces * gradients if plan.parsed.shards_parameters else 0.0
        scattered -= moved.kept * last
        replicated = moved.reduces * 2 * gradients / moved.shards + moved.broadcasts * trained * stepped
        found["dp"] = scattered * (moved.shards - 1) / moved.shards + replicated * (moved.replicas - 1) / moved.replicas
    if dims.ep > 1:
        experts = sum(w.num_elements for unit in _last_block(profile) for w in unit.weights if w.experts)
        found["dp"] = found.get("dp", 0.0) + _expert_weights_sent(spread, experts, plan, moved, narrow)
        found["ep"] = accum * _dispatched(profile, plan, narrow) * _dispatched_part(profile, plan, program, per_node)
    rows = plan.sequences * (plan.seq_len or profile.seq_len or 1) / dims.cp
    activation = rows * (profile.hidden_size or 0) * narrow
    blocks = profile.num_blocks / dims.pp
    if dims.tp > 1:
        found["tp"] = accum * blocks * TENSOR_COLLECTIVES * activation * (dims.tp - 1) / dims.tp
    if dims.cp > 1:
        exchanged_bytes = activation * exchanged(profile.heads, profile.kv_heads, dims.tp, dims.cp) / dims.tp
        found["cp"] = accum * blocks * EXCHANGES * exchanged_bytes * (dims.cp - 1) / dims.cp
    if dims.pp > 1:
        found["pp"] = accum * 2 * activation / dims.tp
    return found


def _partitions(plan: Plan, program: ProgramTraits) -> bool:
    """Return whether the plan is DeepSpeed's ZeRO-2: full weights, gathered once as they are stepped."""
    return plan.parsed.base == "zero2" and program.zero == "deepspeed"


def _reduced_bytes(plan: Plan, narrow: float) -> float:
    """Bytes of an element of a gradient as it is reduced."""
    return GRADIENT_BYTES if plan.reduce == "fp32" else narrow


def _experts(profile: ModelProfile, ep: int) -> tuple[int, int]:
    """Elements of experts, all and trained ones; none where they are not spread over ranks."""
    if ep == 1:
        return 0, 0
    each = [(w.num_elements * unit.count, w.trainable) for unit in profile.units for w in unit.weights if w.experts]
    return sum(n for n, _ in each), sum(n for n, trained in each if trained)


def _expert_weights_sent(spread: tuple[int, int], last: int, plan: Plan, moved: DataTraffic, narrow: float) -> float:
    """Bytes of a step in which the ranks that have the same experts gather their weights and reduce their gradients.

    ``last`` are the elements of the experts of the last block.
    """
    dims = plan.dims
    shards, replicas = dims.expert_shards, 1
    if plan.parsed.shards_parameters:
        replicas = dims.dp_replicate
    else:
        shards, replicas = 1, shards
    weights, gradients = (
        n * size / (dims.ep * dims.pp) for n, size in zip(spread, (narrow, _reduced_bytes(plan, narrow)), strict=True)
    )
    stepped = spread[1] * (GRADIENT_BYTES if plan.weights == "fp32" else narrow) / (dims.ep * dims.pp)
    scattered = moved.gathers * weights + moved.reduces * gradients if plan.parsed.shards_parameters else 0.0
    scattered -= moved.kept * last * narrow / dims.ep
    replicated = moved.reduces * 2 * gradients / shards + moved.broadcasts * stepped
    return scattered * (shards - 1) / shards + replicated * (replicas - 1) / replicas


def _dispatched(profile: ModelProfile, plan: Plan, narrow: float) -> float:
    """Bytes of a micro batch's copies of tokens on one rank, over a stage's layers and all exchanges of a step."""
    dims = plan.dims
    rows = plan.sequences / (dims.cp * dims.tp * dims.pp)
    firsts = (
        (next((op for op in unit.ops if op.experts and op.kind == "matmul"), None), unit) for unit in profile.units
    )
    blocks = max(1, profile.num_blocks)
    again = (
        dims.pp * plan.virtual_stages * plan.recomputed(math.ceil(blocks / (dims.pp * plan.virtual_stages))) / blocks
    )
    exchanges = DISPATCHES + REPEATED_DISPATCHES * min(1.0, again)
    return sum(op.m * op.k * unit.count for op, unit in firsts if op is not None) * rows * narrow * exchanges


def _dispatched_part(profile: ModelProfile, plan: Plan, program: ProgramTraits, per_node: int | None) -> float:
    """Part of a copy for each expert that leaves its rank, or its node where a token goes once to each."""
    ep = plan.dims.ep
    if program.expert_dispatch == "copies":
        return (ep - 1) / ep
    routed = next(unit for unit in profile.units if unit.experts)
    ranks = per_node if per_node is not None and ep > per_node else 1
    sent = distinct_part(routed.experts, round(routed.share * routed.experts), ep, ranks)
    return sent * (1 - ranks / ep)


def _gathered(unit: Unit, plan: Plan, narrow: float, *, experts: bool = True) -> float:
    """Bytes of a unit's weights as a rank gathers them.

    ``narrow`` an element, packed ones as they rest without scales, and one byte for those of fp8 products.
    """
    eighth = gathers_fp8(plan)
    return sum(
        w.num_elements * (w.itemsize - w.scales if w.itemsize < 1 else 1 if eighth and in_fp8(unit, w) else narrow)
        for w in unit.weights
        if experts or not w.experts
    )


def _last_block(profile: ModelProfile) -> tuple[Unit, ...]:
    """The last repeated block of a model, if it has one."""
    return tuple(unit for unit in profile.units if unit.kind == "block")[-1:]


def exchanged(heads: int | None, kv_heads: int | None, tp: int, cp: int) -> float:
    """What is exchanged around an attention, in its queries: they, keys and values there, and the result back.

    Key-value heads are repeated where there are fewer of them than the degree divides.
    """
    queries = max(1, (heads or 1) // tp)
    keys = max(1, (kv_heads or heads or 1) // tp)
    return 2.0 + 2.0 * keys * kv_repeats(keys, cp) / queries


def crosses_nodes(axis: str, plan: Plan, cluster: ClusterSpec) -> bool:
    """True where an axis lies on several nodes: innermost are ``tp`` and ``ep``, then ``cp``, ``dp``, ``pp``."""
    dims = plan.dims
    reach = {
        "ep": dims.ep,
        "tp": dims.tp,
        "cp": dims.tp * dims.cp,
        "dp": dims.tp * dims.cp * dims.dp,
        "pp": dims.world_size,
    }
    return reach[axis] > cluster.devices_per_node


def traffic_text(axis: str, plan: Plan, cluster: ClusterSpec) -> str:
    """``over the network`` or ``over nvlink``."""
    if crosses_nodes(axis, plan, cluster):
        return "over the network"
    return f"over {cluster.link.kind}" if cluster.link else "inside the node"
