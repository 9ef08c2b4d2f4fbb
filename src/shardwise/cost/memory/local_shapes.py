"""Local state of one rank: its pipeline stage, weight shards, gradients and optimizer state.

The bytes are exact. FSDP2 splits dim 0 into chunks of ``ceil(rows / ranks)`` and pads what it sends to equal chunks;
the first rank is the fullest. ``zero1`` assigns unsharded parameters, the largest first, to the rank with the least so
far. Tensor parallel shards ``Weight.tp_dim`` first, into chunks of ``ceil(size / tp)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.cost.memory.expert_shards import expert_shape, rest_shape
from shardwise.cost.same import Same
from shardwise.cost.time.pipeline_time import blocks_per_stage, in_flight
from shardwise.model.profile import ModelProfile, Op, Unit, Weight
from shardwise.plan.dims import ParallelDims
from shardwise.plan.fp8_recipes import in_fp8
from shardwise.plan.parallel_options import PipelineSchedule
from shardwise.plan.plan import Plan, Recompute, gathers_fp8
from shardwise.plan.program import OWN, SHARDWISE, Framework, ProgramTraits
from shardwise.plan.stage_balance import balanced_stages, even_stages
from shardwise.plan.strategy import Strategy, parse_strategy
from shardwise.plan.tensor_types import WeightType
from shardwise.plan.traffic import keeps_last_block
from shardwise.plan.workload import Workload

FP32 = 4
STATE_ITEMSIZE = FP32  # step counters, and the scales of factored or quantized state, are fp32


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Plain numbers of a plan that determine a rank's local state; hashable and cheap.

    Ranks of one context-parallel group have equal weights and different gradients, so state is sharded over them, too:
    ``replicas`` ranks reduce gradients together, FSDP2 shards over ``shard_ranks`` of them.

    ``masters``: weights are stored in the low-precision type, and their fp32 masters are optimizer state; gradients
    accumulate in buffers of ``accumulated`` bytes an element, as in Megatron-LM's mixed-precision optimizers.
    ``stored`` bounds the bytes of an element of the weights at rest, ``reduced`` are those of a gradient that is
    reduced. ``partitions``: DeepSpeed's ZeRO-2, full weights and a rank's part of gradients and state.
    """

    strategy: Strategy
    replicas: int
    shard_ranks: int
    tp: int
    pp: int
    cp: int
    width: int  # bytes of an element in forward and backward
    is_cuda: bool
    framework: Framework = "shardwise"
    masters: bool = False
    schedule: PipelineSchedule = "1f1b"
    virtual: int = 1  # stages per rank
    stage_blocks: tuple[int, ...] | None = None  # of each stage, where the plan has them
    sequence: bool = True  # activations between tensor-parallel regions are sharded along the sequence
    vocab: bool = True  # logits stay sharded over the vocabulary
    flat: bool = False  # FSDP1: a unit is one flat parameter with one gradient
    stored: int = FP32
    accumulated: int = FP32
    reduced: int = FP32
    partitions: bool = False
    flat_state: bool = False  # zero1 shards one flat buffer evenly, as where there are masters
    kahan: bool = False  # the optimizer keeps the bits that low-precision updates lose
    buckets: int = 0  # bytes of communication buffers beside unsharded gradients
    fp8_saved: bool = False  # fp8 products save their inputs in 8 bits
    fp8_casts: bool = False  # products of the blocks cast their operands to fp8, as torchao's Float8Linear does
    fp8_gathers: bool = False  # weights of these products are gathered in one byte an element
    ep: int = 1
    whole_experts: bool = False  # FSDP2 without +ep shards along experts, though there may be fewer than ranks
    expert_shards: int = 1  # ranks of FSDP2 that share the same experts
    capacity_factor: float | None = None  # experts compute this many times their mean rows; None: what they get
    balanced: bool = False  # a router that loads all experts alike
    keeps_last: bool = False  # the last block's weights stay gathered from forward to backward
    in_place: bool = False  # two ranks gather into each other's memory, without a buffer of gloo's

    @property
    def shards(self) -> bool:
        """Return whether FSDP2 gathers units for use and reduces their gradients.

        The units may be sharded over ``shard_ranks`` or replicated.
        """
        return (self.strategy.shards_parameters and not self.partitions) or self.replicates

    @property
    def loss_in_place(self) -> bool:
        """Return whether the loss makes its softmax and its gradient in place, as Megatron-LM's does."""
        return self.masters and self.framework == "megatron"

    @property
    def shards_state(self) -> bool:
        """Return whether ranks share the optimizer's state of full weights: zero1, and DeepSpeed's zero2."""
        return (self.strategy.base == "zero1" or self.partitions) and self.replicas > 1

    @property
    def replicates(self) -> bool:
        """Return whether ``ddp`` runs beside tp or pp: FSDP2 over shards of one rank.

        Unsharded fp32 weights at rest, and a copy of each unit while it is used (`parallel.apply`).
        """
        whole = self.strategy.base == "ddp" and self.tp * self.pp > 1 and self.replicas > 1
        return whole and not self.masters

    @property
    def reshards(self) -> bool:
        """Return whether blocks free gathered weights after forward and gather them in backward."""
        return self.strategy.reshards_after_forward or self.replicates

    @property
    def keeps_weights(self) -> bool:
        """Return whether weights stay gathered until backward, in a pipeline over all micro batches.

        zero2 sets it, zero-bubble schedules need it, and torch's pipeline stages do so regardless of the setting.
        """
        zero_bubble = self.pp > 1 and self.schedule in ("interleaved-zero-bubble", "zbv")
        return not self.reshards or zero_bubble or (self.pp > 1 and self.framework != "shardwise")

    def ranks_of(self, weight: Weight) -> int:
        """Return the ranks over which FSDP2 shards ``weight``."""
        if not self.shards:
            return 1
        return self.expert_shards if self.ep > 1 and weight.experts else self.shard_ranks

    def replicas_of(self, weight: Weight) -> int:
        """Return the ranks that reduce the gradient of the same shard of ``weight`` or of all of it together."""
        return self.replicas * self.tp // self.ep if self.ep > 1 and weight.experts else self.replicas

    @property
    def sums_replicas(self) -> bool:
        """Return whether gradients reduced inside sharding groups are then reduced over the groups."""
        return self.shards and self.replicas > self.shard_ranks

    @property
    def autocasts(self) -> bool:
        """Return whether unsharded fp32 weights are cast to the low-precision type as they are used."""
        return not self.shards and self.width < self.stored

    @property
    def offloads(self) -> bool:
        """Return whether the state rests in host memory: parameters, gradients, optimizer state.

        A CPU's memory is the host's.
        """
        return (self.strategy.offload or self.strategy.nvme) and self.is_cuda


PROBES = (Weight("dense", (1,)), Weight("experts", (1,), experts=1))  # a weight of either kind


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Group of ``count`` equal consecutive units of a stage, recomputed alike; each block is a sharding unit."""

    unit: Unit
    count: int
    recompute: Recompute = "none"

    @property
    def is_block(self) -> bool:
        """Return whether the unit is sharded and recomputed separately; others belong to the root."""
        return self.unit.kind == "block"


@dataclass(frozen=True, slots=True)
class UnitWeights:
    """Bytes of one unit's weights on one rank.

    ``gathered`` are the unsharded weights in the compute type, one size for each tensor; ``reduce_in`` the padded fp32
    gradient that is reduced, ``reduce_out`` this rank's part of it; ``copies`` autocast's low-precision weights, that
    of a head which is the embedding too; ``exchanged`` the columns of fused projections that a tensor-parallel rank
    takes from others, because it computes with other columns than it stores.
    """

    parameters: int
    gradients: int
    pinned_parameters: int  # as above, each tensor pinned in host memory
    pinned_gradients: int
    trained: int  # elements at rest of the trained weights
    largest: int  # elements of the largest of them
    full: int  # as they are created, before they are sharded
    gathered: tuple[int, ...]
    sent: int
    shard_sent: int
    full_gradients: int  # in the type that backward makes them in
    last_gradient: int  # gradient of the last weight
    waiting: int  # unsharded fp32 gradients that wait for the last micro batch
    reduce_in: int
    reduce_out: int
    copies: int
    exchanged: int
    widened: int  # the largest weight that is stored in fewer bits than it is computed with


def pinned_bytes(size: float) -> int:
    """Return the bytes of host memory that PyTorch pins for a tensor of ``size`` bytes: the next power of two.

    So that freed blocks suit more requests (``CachingHostAllocator.h`` of PyTorch 2.13;
    ``pinned_max_round_threshold_mb`` of its allocator settings, which changes it, is not read).
    """
    return 1 << (math.ceil(size) - 1).bit_length() if size > 0 else 0


def framework_of(strategy: Strategy, framework: Framework | None) -> Framework:
    """Return ``framework``, or the default one for ``strategy``."""
    not_run = strategy.base == "zero1" and strategy.tp * strategy.pp * strategy.ep > 1
    return framework or ("megatron" if not_run else "shardwise")


def has_masters(
    strategy: Strategy, dims: ParallelDims, program: ProgramTraits, weights: WeightType, width: int
) -> bool:
    """Return whether weights of ``width`` bytes rest beside fp32 masters: as asked, or as in Megatron-LM."""
    splits = not strategy.shards_parameters and dims.tp * dims.pp * dims.cp * dims.ep > 1
    usual = splits and program.is_own and framework_of(strategy, program.modules) == "megatron"
    return width < FP32 and (weights == "masters" or usual)


def layout_of(plan: Plan, program: ProgramTraits = SHARDWISE) -> ShardLayout:
    """Build the `ShardLayout` of ``plan`` in ``program``."""
    dims, strategy = plan.dims, _strategy(plan.strategy)
    width = 4 if plan.precision == "fp32" else 2
    framework = framework_of(strategy, program.modules)
    partitions = strategy.base == "zero2" and program.zero == "deepspeed"
    flat = program.flat_parameters and strategy.shards_parameters and not partitions
    masters = has_masters(strategy, dims, program, plan.weights, width)
    narrow = width if plan.weights != "fp32" or masters else FP32
    return ShardLayout(
        strategy=strategy,
        replicas=dims.dp_replicate * dims.dp_shard * dims.cp,
        shard_ranks=dims.dp_shard * dims.cp if strategy.shards_parameters and not partitions else 1,
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        width=width,
        is_cuda=plan.device == "cuda",
        framework=framework,
        masters=masters,
        schedule=plan.pipeline_schedule,
        virtual=plan.virtual_stages if dims.pp > 1 else 1,
        stage_blocks=plan.stage_blocks,
        sequence=plan.sequence_parallel,
        vocab=plan.loss_parallel,
        flat=flat,
        stored=narrow,
        accumulated=width if plan.accumulate == "compute" or plan.weights == "compute" else FP32,
        reduced=width if plan.reduce == "compute" else FP32,
        partitions=partitions,
        flat_state=(masters and framework == "megatron") or program.zero != "torch",
        kahan=plan.rounding == "kahan",
        buckets=program.bucket_elements * width,
        fp8_saved=plan.precision == "fp8" and program.fp8_activations,
        fp8_casts=plan.fp8 != "none",
        fp8_gathers=gathers_fp8(plan),
        ep=dims.ep,
        whole_experts=dims.ep == 1 and strategy.engine == "torch" and program.zero == "torch" and not flat,
        expert_shards=dims.expert_shards if strategy.shards_parameters else 1,
        keeps_last=keeps_last_block(plan),
        in_place=plan.program == OWN and strategy.engine == "torch" and dims.dp_shard * dims.cp == 2,
    )


def with_routing(layout: ShardLayout, workload: Workload) -> ShardLayout:
    """Return the layout with how the workload's router loads experts."""
    balanced = workload.program.balanced_experts
    if workload.capacity_factor is None and not balanced:
        return layout
    return replace(layout, capacity_factor=workload.capacity_factor, balanced=balanced)


@lru_cache(maxsize=4096)
def _strategy(text: str) -> Strategy:
    return parse_strategy(text)


def stage_pieces(
    profile: ModelProfile, layout: ShardLayout, rank: int, recompute: Recompute = "none", layers: int | None = None
) -> tuple[LayerGroup, ...]:
    """List the units of a pipeline rank, in the order of its stages.

    Units before the first block belong to the first stage, those after the last block to the last. A tied weight is on
    both of the stages that use it. Of each stage the first ``layers`` blocks are recomputed (all for ``None``).
    """
    if layout.pp == 1:
        return tuple(_recomputed((LayerGroup(unit, unit.count) for unit in profile.units), recompute, layers))
    counts = stage_counts(profile, layout)
    number = len(counts)
    local_stages = [stage for stage in range(number) if rank_of(layout, stage) == rank]
    pieces: list[LayerGroup] = []
    for stage in local_stages:
        first, last = sum(counts[:stage]), sum(counts[: stage + 1])
        here = _stage_pieces(profile, first, last, stage == 0, stage == number - 1)
        pieces += _recomputed(here, recompute, layers)
    if local_stages[-1] == number - 1 and local_stages[0] != 0:
        pieces += [LayerGroup(unit, unit.count) for unit in _tied_copies(profile)]
    return tuple(pieces)


def _recomputed(pieces: Iterable[LayerGroup], recompute: Recompute, layers: int | None) -> Iterator[LayerGroup]:
    """Split a row of blocks into those that are recomputed and those that are not."""
    left = None if recompute == "none" else layers
    for piece in pieces:
        if not piece.is_block:
            yield piece
            continue
        first = piece.count if left is None else min(left, piece.count)
        if first:
            yield LayerGroup(piece.unit, first, recompute)
        if piece.count > first:
            yield LayerGroup(piece.unit, piece.count - first)
        left = None if left is None else left - first


def _stage_pieces(profile: ModelProfile, first: int, last: int, begins: bool, ends: bool) -> Iterator[LayerGroup]:
    seen = 0
    for unit in profile.units:
        if unit.kind == "block":
            here = min(last, seen + unit.count) - max(first, seen)
            if here > 0:
                yield LayerGroup(unit, here)
            seen += unit.count
        elif begins if seen == 0 else ends:
            yield LayerGroup(unit, unit.count)


def stage_counts(profile: ModelProfile, layout: ShardLayout) -> tuple[int, ...]:
    """Blocks of each pipeline stage: the plan's, else balanced by the FLOPs of products, as for live models.

    Other frameworks distribute blocks evenly.
    """
    if layout.stage_blocks is not None:
        return layout.stage_blocks
    if layout.framework != "shardwise":
        return blocks_per_stage(profile.num_blocks, layout.pp)
    return _stage_counts(Same(profile), layout.pp * layout.virtual)


def with_stages(profile: ModelProfile, plan: Plan) -> Plan:
    """Write the blocks of each pipeline stage into a plan without them that this package can run."""
    layout = layout_of(plan)
    if layout.pp == 1 or layout.framework != "shardwise" or layout.pp * layout.virtual > profile.num_blocks:
        return plan
    return plan.model_copy(update={"stage_blocks": stage_counts(profile, layout)})


@lru_cache(maxsize=1024)
def _stage_counts(same: Same[ModelProfile], stages: int) -> tuple[int, ...]:
    units = same.value.units
    if stages > same.value.num_blocks:
        return blocks_per_stage(same.value.num_blocks, stages)
    index = next(i for i, unit in enumerate(units) if unit.kind == "block")
    before = sum(_products(unit) * unit.count for unit in units[:index])
    after = sum(_products(unit) * unit.count for unit in units[index:] if unit.kind != "block")
    blocks = [_products(unit) for unit in units if unit.kind == "block" for _ in range(unit.count)]
    if len(set(blocks)) == 1:
        return even_stages(len(blocks), blocks[0] or 1.0, before, after, stages)
    return balanced_stages(blocks, before, after, stages)


def _products(unit: Unit) -> float:
    """FLOPs of matrix products and convolutions; a live model's check does not see attention's."""
    return sum(2.0 * op.m * op.k * op.n for op in unit.ops if op.kind in ("matmul", "conv"))


def rank_of(layout: ShardLayout, stage: int) -> int:
    """Pipeline rank of a stage: round robin, or forth and back for ``zbv``."""
    if layout.schedule == "zbv" and stage >= layout.pp:
        return 2 * layout.pp - 1 - stage
    return stage % layout.pp


def rank_blocks(profile: ModelProfile, layout: ShardLayout) -> tuple[tuple[int, ...], int]:
    """Return the blocks of each pipeline rank, over all of its stages, and the rank of the last stage."""
    found, counts = [0] * layout.pp, stage_counts(profile, layout)
    for stage, count in enumerate(counts):
        found[rank_of(layout, stage)] += count
    return tuple(found), rank_of(layout, len(counts) - 1)


def _tied_copies(profile: ModelProfile) -> list[Unit]:
    """Units with the second copy of each weight that the first and the last stage share."""
    kept = {name.rpartition(".")[2] for name, _ in profile.tied} | {name for name, _ in profile.tied}
    found = []
    for unit in profile.units:
        if unit.kind == "block":
            break
        shared = tuple(w for w in unit.weights if w.name in kept or f"{unit.name}.{w.name}" in kept)
        if shared:
            found.append(Unit(f"{unit.name} (tied)", "other", shared, (), 0))
    return found


def heavy_stages(profile: ModelProfile, layout: ShardLayout) -> tuple[int, ...]:
    """Pipeline ranks that can be the fullest.

    These are the first (most micro batches in flight), the last (head and loss), and the first of those with more
    blocks than rank 0 has.
    """
    if layout.pp == 1:
        return (0,)
    counts = stage_counts(profile, layout)
    each = [0] * layout.pp
    for stage, count in enumerate(counts):
        each[rank_of(layout, stage)] += count
    more = next((rank for rank in range(1, layout.pp - 1) if each[rank] > each[0]), None)
    return (0, *(() if more is None else (more,)), layout.pp - 1)


def micro_batches_in_flight(layout: ShardLayout, rank: int, grad_accum: int) -> int:
    """Peak number of micro batches in flight on a pipeline rank, in units of all its stages."""
    if layout.pp == 1:
        return 1
    if layout.schedule == "gpipe" or (grad_accum < layout.pp and layout.framework == "shardwise"):
        return grad_accum  # with fewer micro batches than stages this version runs them as gpipe
    return math.ceil(in_flight(rank, layout.pp, grad_accum, layout.virtual))


def unit_weights(unit: Unit, layout: ShardLayout) -> UnitWeights:
    """Bytes of one ``unit`` on the fullest rank; cached by the unit's identity."""
    ranks = layout.shard_ranks if layout.shards else 1
    types = WeightBytes(layout.width, layout.stored, layout.accumulated, layout.reduced)
    spread = (layout.ep, layout.expert_shards if layout.shards else 1) if layout.ep > 1 else (1, ranks)
    dense, routed = (layout.replicas_of(weight) if layout.partitions else 1 for weight in PROBES)
    parts = (dense, routed)
    return _unit_weights(
        Same(unit),
        ranks,
        layout.tp,
        types,
        layout.shards,
        layout.masters,
        layout.flat,
        parts,
        spread,
        layout.whole_experts,
        (layout.fp8_casts, layout.fp8_gathers),
    )


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of an element: computed with, stored at most, accumulated beside masters, reduced."""

    wide: int
    stored: int
    accumulated: int
    reduced: int


@lru_cache(maxsize=4096)
def _unit_weights(
    same: Same[Unit],
    ranks: int,
    tp: int,
    types: WeightBytes,
    shards: bool,
    masters: bool,
    flat: bool,
    parts: tuple[int, int],
    spread: tuple[int, int],
    whole: bool,
    fp8: tuple[bool, bool],
) -> UnitWeights:
    """Compute `UnitWeights`.

    ``spread`` is over how many ranks experts are spread, and how many shard the same ones. With ``flat`` a gradient is
    as large as the unit where any of it trains. Each of ``parts`` ranks keeps its part of the gradients of full
    weights: of dense ones, and of experts. ``fp8``: whether products cast operands to it, and gather weights in it (a
    byte an element; the scales, 4 bytes a weight, are not counted).
    """
    weights, wide = same.value.weights, types.wide
    if types.stored < FP32:
        weights = tuple(replace(w, itemsize=min(w.itemsize, types.stored)) for w in weights)
    ep, expert_shards = spread
    shapes = [local_weight(weight, tp, ep, vocab=same.value.kind != "block") for weight in weights]
    each = [expert_shards if w.experts else ranks for w in weights]
    local = [math.prod(shape) for shape in shapes]
    rows = zip(weights, shapes, each, strict=True)
    at_rest = [math.prod(rest_shape(w, shape, n, whole=whole)) for w, shape, n in rows]
    both = [(w, n, rest, rest * m) for w, n, rest, m in zip(weights, local, at_rest, each, strict=True)]
    trained = [row for row in both if row[0].trainable]
    carried = both if flat and trained else trained
    held = [types.accumulated if masters else max(w.itemsize, wide) for w, _, _, _ in carried]
    kinds = [0, 0]  # gradients at rest: of dense weights, and of experts
    for size, (w, _, rest, _) in zip(held, carried, strict=True):
        kinds[bool(w.experts)] += math.ceil(rest * size)
    kept = sum(kinds)
    resting = [rest * (w.itemsize - w.scales) for w, _, rest, _ in both]
    reduced = [rest * size / parts[bool(w.experts)] for size, (w, _, rest, _) in zip(held, carried, strict=True)]
    narrow = [fp8[0] and in_fp8(same.value, w) for w in weights]
    each_sent = [1 if fp8[1] and n else min(w.itemsize - w.scales, wide) for w, n in zip(weights, narrow, strict=True)]
    sent = [math.ceil(row[3] * size) for row, size in zip(both, each_sent, strict=True)]
    scales = sum(math.ceil(n * w.scales) for w, n, _, _ in both) if any(w.scales for w in weights) else 0
    cast = not shards and wide < types.stored and same.value.kind != "embedding"
    read = sum(op.k * op.n for op in same.value.ops if op.kind == "matmul" and op.weight)
    tied = max(0, read - sum(w.num_elements for w in weights)) if same.value.kind == "head" else 0
    return UnitWeights(
        parameters=sum(map(math.ceil, resting)) + scales,
        gradients=sum(math.ceil(size / part) for size, part in zip(kinds, parts, strict=True)),
        pinned_parameters=sum(map(pinned_bytes, resting)) + scales,
        pinned_gradients=sum(map(pinned_bytes, reduced)),
        trained=sum(rest for _, _, rest, _ in trained),
        largest=max((rest for _, _, rest, _ in trained), default=0),
        full=sum(math.ceil(n * w.itemsize) for w, n, _, _ in both),
        gathered=_merged(sent),
        sent=sum(sent),
        shard_sent=sum(size // m for size, m in zip(sent, each, strict=True)) if ep > 1 else sum(sent) // ranks,
        full_gradients=sum(n * (wide if shards else FP32) for _, n, _, _ in carried),
        last_gradient=trained[-1][1] * wide if trained and shards and ranks > 1 else 0,
        waiting=sum(n * types.reduced for _, n, _, _ in carried),
        reduce_in=sum(padded * types.reduced for _, _, _, padded in carried),
        reduce_out=kept,
        copies=(_copied(both, narrow, wide) + tied) * wide if cast else 0,
        exchanged=0 if tp == 1 or (wide < FP32 and not shards) else exchanged_elements(same.value, tp) * wide,
        widened=max((n * wide for w, n, _, _ in both if w.itemsize < wide), default=0),
    )


def _copied(rows: Sequence[tuple[Weight, int, int, int]], in_fp8: Sequence[bool], wide: int) -> int:
    """Elements of weights that autocast copies; a product in fp8 casts its weight itself."""
    pairs = zip(rows, in_fp8, strict=True)
    return sum(n for (w, n, _, _), fp8 in pairs if len(w.shape) > 1 and w.itemsize > wide and not fp8)


def _merged(sizes: Iterable[int]) -> tuple[int, ...]:
    """Merge sizes below 1 MiB: they share segments."""
    values = list(sizes)
    large = [size for size in values if size >= 1 << 20]
    small = sum(size for size in values if size < 1 << 20)
    return tuple([*large, small] if small else large)


def exchanged_elements(unit: Unit, tp: int) -> int:
    """Elements of weights that one of ``tp`` ranks gathers from others for each use of ``unit``.

    Queries, keys and values (or a gate and what it gates) in one projection lie one after the other, so a rank computes
    with other columns than its local shard; the same applies to fewer key-value heads than ranks.
    """
    attention = next((op for op in unit.ops if op.kind == "attention"), None)
    few = attention is not None and attention.kv_heads % tp != 0
    found, columns = 0, list[Op]()
    for op in unit.ops:
        if op.kind != "matmul" or op.experts:  # a gate and what it gates lie in each expert as they are cut
            continue
        if op.tp_sharding == "column":
            columns.append(op)
        elif op.tp_sharding == "row":
            if len(columns) == 1 and columns[0].n > op.k:
                found += columns[0].k * math.ceil(columns[0].n / tp)
            elif few and attention is not None:
                key_value = [one for one in columns if one.n == attention.kv_heads * attention.head_dim < op.k]
                found += sum(one.k * attention.head_dim * max(1, attention.kv_heads // tp) for one in key_value)
            columns = []
    return found


def tp_shape(weight: Weight, tp: int, *, vocab: bool = True) -> tuple[int, ...]:
    """Shape of ``weight`` on the fullest rank of a tensor-parallel group.

    Only a ``vocab`` is split into uneven shards; another size that ``tp`` does not divide stays replicated.
    """
    if tp == 1 or weight.tp_dim is None or (not vocab and weight.shape[weight.tp_dim] % tp):
        return weight.shape
    dim = weight.tp_dim
    return (*weight.shape[:dim], math.ceil(weight.shape[dim] / tp), *weight.shape[dim + 1 :])


def local_weight(weight: Weight, tp: int, ep: int, *, vocab: bool = True) -> tuple[int, ...]:
    """Shape of ``weight`` on one rank before FSDP shards it; ``ep`` leaves experts whole under tensor parallel."""
    if ep > 1 and weight.experts:
        return expert_shape(weight, ep)
    return tp_shape(weight, tp, vocab=vocab)


def average_bytes(pieces: tuple[LayerGroup, ...], layout: ShardLayout, workload: Workload) -> int:
    """Bytes on the device of the moving average of a stage's trained weights, as many as gradients at rest."""
    if not workload.average or layout.offloads:
        return 0
    return sum(unit_weights(piece.unit, layout).gradients * piece.count for piece in pieces)
