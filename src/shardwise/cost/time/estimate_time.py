"""Seconds of one step: kernels by shape, collectives by link, simulated overlap, pipeline.

The modelled program is the one that ``train`` runs: gradients synchronize in the last micro batch, or in each of a
sharded plan with ``Plan.gradient_sync`` set so, sharded units are gathered in every forward (and in every backward
where they are freed in between), one unit ahead; ddp reduces while the last backward runs. Context parallel exchanges
tokens for heads around each attention. Plans that this version does not run (``zero1`` beside tensor or pipeline
parallel) are modelled as in Megatron-LM.

Under preference tuning (`shardwise.plan.objective`) a micro batch is its pairs' sequences, and a frozen reference runs
its forward on them, too. MFU counts the model that trains, without its reference.

Not modelled: data loading, evaluation, checkpoints, other jobs on the network, clocks that fall with temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardwise.cost.flops import mfu
from shardwise.cost.memory.local_shapes import framework_of, layout_of, rank_blocks
from shardwise.cost.same import Same
from shardwise.cost.time.collective_time import Calibration, CollectiveKind
from shardwise.cost.time.cpu_time import cpu_host_s, cpu_send_s, ddp_buckets
from shardwise.cost.time.interval import calibration_text, interval_of
from shardwise.cost.time.layer_time import (
    COMPUTE_BYTES,
    UnitElements,
    UnitTime,
    is_finite,
    unit_elements,
    unit_time,
)
from shardwise.cost.time.machine import FP8_SHARD_CAST_BYTES, Machine, Rates, machine_of
from shardwise.cost.time.optimizer_time import MASTER_BYTES, activations_s, update_s
from shardwise.cost.time.overlap import CONTENTION
from shardwise.cost.time.pipeline_time import pipeline_s
from shardwise.cost.time.stage_time import StageParts, StageTime, WireTime, alone, stage_time, take, with_host
from shardwise.cost.time.step_time import StepTime
from shardwise.cost.time.work_split import WorkSplit
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.lora import without_adapters
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import ParallelDims, expert_dims
from shardwise.plan.objective import Reference
from shardwise.plan.plan import Plan, gathers_fp8, products
from shardwise.plan.program import Framework, ProgramTraits
from shardwise.plan.strategy import Strategy, parse_strategy
from shardwise.plan.traffic import keeps_last_block, shares_memory
from shardwise.plan.workload import Workload

__all__ = ["Rates", "step_time"]

JITTER = 0.004  # fraction of a step lost for each doubling of nodes, whose slowest rank is slower; assumed, not fitted
STEP_HOST_S = 1e-3  # host time of a step outside of units that the device waits for: clip, schedule, logging
MICRO_HOST_S = 5e-3  # of a micro batch: loader, loss; it may run ahead; fitted on vTrain's rows (Megatron-DeepSpeed)
ASYNC_TP_HIDES = 0.5  # fraction of tensor-parallel traffic that asynchronous tensor parallel hides; assumed
# Copies of unsharded weights for computation: none, those of autocast, or those of FSDP2 over shards of one rank.
Copies = Literal["none", "autocast", "units"]


@dataclass(frozen=True, slots=True)
class Wires:
    """How weights and gradients travel.

    ``width``, ``reduced`` and ``stored`` are bytes of an element: computed with, of a reduced gradient, at rest.
    ``zero`` is the layout of zero1 and 2. ``scatters``: zero1 reduces as Megatron-LM's distributed optimizer does.
    ``recasts``: recompute casts weights again. ``fp8``: products of blocks cast their weights themselves;
    ``gathers_fp8``: and shards are gathered so. ``keeps_last``, ``shared``: see `keeps_last_block` and
    `shares_memory`.
    """

    copies: Copies
    width: int
    reduced: int
    stored: int
    zero: str
    scatters: bool
    recasts: bool
    fp8: bool = False
    gathers_fp8: bool = False
    keeps_last: bool = False
    shared: bool = False

    def partitions(self, base: str) -> bool:
        """Return whether ``base`` is DeepSpeed's ZeRO-2: full weights, partitioned gradients."""
        return base == "zero2" and self.zero == "deepspeed"


def step_time(
    profile: ModelProfile,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    *,
    rates: Rates | None = None,
    calibration: Calibration | None = None,
) -> StepTime:
    """Predict the seconds of one step of ``plan`` on the slowest rank, and their breakdown.

    ``rates`` are a probe's result and replace the hardware table (a CPU needs them). ``workload.program`` has the
    traits of the program that runs the plan; without a kernel of its own, Megatron-LM's modules have cuDNN's attention
    (Transformer Engine's), others flash attention.

    Raises:
        PlanError: the device's speed or a link's bandwidth is unknown.
    """
    machine = machine_of(cluster, products(plan), rates, calibration)
    strategy = parse_strategy(plan.strategy)
    program = workload.program
    framework = framework_of(strategy, program.modules)
    split = _split(plan, workload, framework)
    key, where = Same(profile), Same(cluster)
    wires = _wires(plan, strategy, program, cluster.devices_per_node, megatron=split.hides_reduction)
    layers = None if plan.recompute_layers is None else plan.recompute_layers * plan.virtual_stages
    placed = rank_blocks(profile, layout_of(plan, program)) if plan.dims.pp > 1 else ((profile.num_blocks,), 0)
    options = (_waits(plan), wires, plan.async_tp, layers, *placed)
    facts = (where, rates, calibration, split, plan.strategy, plan.dims, *options)
    stages = _stages(key, *facts)
    if plan.reference != "none":
        stages = tuple(map(StageTime.with_reference, stages, _stages(_reference(key, plan.reference), *facts)))
    send = _send_s(machine, profile, plan) if len(stages) > 1 else 0.0
    host_s = MICRO_HOST_S if rates is None else 0.0
    made = {id(stage): stage for stage in stages}  # most are the same one
    timed = {k: with_host(s, plan, host_s) if workload.framework_overhead else alone(s) for k, s in made.items()}
    hosted = [timed[id(stage)] for stage in stages]
    parts = _micro_batches(plan, stages, hosted, send, plan.virtual_stages)
    weights = _weights(key, plan.dims.tp, plan.dims.ep)
    optimizer, after, offload = update_s(
        machine, profile, plan, strategy, workload, weights, distributed=split.hides_reduction
    )
    if program.overlaps_zero1:  # behind the first forwards of the next step, which it slows a little
        after = max(0.0, after - sum(f for f, _ in hosted[:1])) + CONTENTION * after
    parts["optimizer_s"], parts["offload_s"] = optimizer, offload + activations_s(machine, profile, plan, workload)
    parts["exposed_dp_s"] += after
    if workload.framework_overhead:
        parts["host_s"] += STEP_HOST_S if rates is None else cpu_host_s(machine, rates, profile, plan)
    parts["exposed_dp_s"] += JITTER * math.log2(max(1, cluster.nodes)) * sum(parts.values())
    parts = {name: 0.0 if seconds < 0 else seconds for name, seconds in parts.items()}  # differences round below zero
    total = sum(parts.values())
    if not math.isfinite(total):
        raise PlanError(
            f"{plan.strategy}: the bandwidth between the devices of this cluster is not known; give its link"
        )
    samples = split.micro * plan.grad_accum * plan.dims.dp / plan.dims.world_size / total
    utilisation = _mfu_of_one(key, where, plan.precision)
    low, high = interval_of(machine, program.name, experts=plan.dims.ep > 1)
    return StepTime(
        step_s=total,
        low_s=total * low,
        high_s=total * high,
        **parts,
        samples_per_s_per_device=samples,
        tokens_per_s_per_device=samples * profile.seq_len if profile.seq_len else None,
        mfu=None if utilisation is None else utilisation * samples,
        calibrated="measured rates" if rates is not None else calibration_text(machine),
    )


def _shardings(plan: Plan) -> bool:
    return plan.dims.tp * plan.dims.pp * plan.dims.cp * plan.dims.ep > 1


def _width(plan: Plan, kind: str) -> int:
    """Bytes of an element of weights or gradients of a type."""
    return MASTER_BYTES if kind == "fp32" else COMPUTE_BYTES[plan.precision]


def _split(plan: Plan, workload: Workload, framework: Framework) -> WorkSplit:
    """Build the `WorkSplit` of a plan in the program of ``framework``."""
    megatron = framework == "megatron" and not plan.parsed.shards_parameters
    megatron = megatron and (_shardings(plan) or not workload.program.is_own)
    return WorkSplit(
        tp=plan.dims.tp,
        cp=plan.dims.cp,
        micro=plan.sequences,
        precision=products(plan),
        recompute=plan.recompute,
        compiled=workload.compiles(plan),
        attention=workload.program.attention or ("cudnn" if megatron else "flash"),
        sequence_parallel=plan.sequence_parallel,
        padded=workload.program.pads_vocab,
        document=workload.document_len,
        host=workload.program.host,
        compiled_host=workload.compiled or plan.compile,
        gathers_modules=workload.program.zero == "deepspeed" and plan.parsed.shards_parameters,
        hides_reduction=megatron,
        casts_weights=not megatron,
        ring=framework != "shardwise",
        shards_ends=framework != "shardwise",
        loss_parallel=plan.loss_parallel,
        ep=plan.dims.ep,
        capacity_factor=workload.capacity_factor,
        balanced_experts=workload.program.balanced_experts,
        weighs_early=framework != "shardwise",
        once_each_rank=workload.program.expert_dispatch == "ranks",
        hidden_dispatch=_hidden_dispatch(plan) if workload.program.overlaps_dispatch else 0.0,
        recipe=plan.fp8,
        gathers_fp8=gathers_fp8(plan),
    )


def _hidden_dispatch(plan: Plan) -> float:
    """Return the part of what experts exchange that runs beside another micro batch's products.

    The first forward and the last backward are alone. Megatron-LM refuses the overlap with full recompute, and in a
    pipeline without virtual stages (Megatron-Bridge v0.5.0, ``training/comm_overlap.py``): nothing is hidden there.
    """
    alone = plan.recompute == "full" or (plan.dims.pp > 1 and plan.virtual_stages == 1)
    return 0.0 if alone else 1 - 1 / plan.grad_accum


def _wires(plan: Plan, strategy: Strategy, program: ProgramTraits, ranks_per_node: int, *, megatron: bool) -> Wires:
    return Wires(
        _copies(plan, strategy, program, megatron=megatron),
        COMPUTE_BYTES[plan.precision],
        _width(plan, plan.reduce),
        _width(plan, plan.weights),
        program.zero,
        scatters=megatron,
        recasts=plan.recompute != "none",
        fp8=plan.fp8 != "none",
        gathers_fp8=gathers_fp8(plan),
        keeps_last=keeps_last_block(plan),
        shared=shares_memory(plan, ranks_per_node),
    )


def _copies(plan: Plan, strategy: Strategy, program: ProgramTraits, *, megatron: bool) -> Copies:
    """Select how unsharded weights are copied for computation."""
    sharded = _is_sharded(plan.dims) and plan.dims.dp * plan.dims.cp > 1
    if not megatron and strategy.base == "ddp" and sharded and plan.weights != "masters":
        return "units"
    return "none" if megatron or plan.weights != "fp32" else "autocast"


def _is_sharded(dims: ParallelDims) -> bool:
    """Return whether weights, and not only tokens, are sharded over a model-parallel axis."""
    return dims.tp * dims.pp > 1


def _micro_batches(
    plan: Plan, stages: Sequence[StageTime], hosted: Sequence[tuple[float, float]], send_s: float, virtual: int
) -> dict[str, float]:
    """Seconds of all forwards and backwards of a step by part, on the slowest stage.

    The rest is the pipeline's. ``hosted`` are forward and backward of one micro batch on each stage, including waits
    for the host.
    """
    micros = plan.grad_accum
    full = pipeline_s([f for f, _ in hosted], [b for _, b in hosted], send_s, micros, virtual)
    slowest = max(range(len(stages)), key=lambda i: sum(hosted[i]))
    slow, busy = stages[slowest], micros * sum(hosted[slowest])
    device = micros * (slow.forward_s + slow.backward_s)
    shown = micros * (slow.compute_s + slow.recompute_s + slow.tp_s + slow.cp_s + slow.ep_s)
    return {
        "compute_s": micros * slow.compute_s,
        "recompute_s": micros * slow.recompute_s,
        "exposed_tp_s": micros * slow.tp_s,
        "exposed_cp_s": micros * slow.cp_s,
        "exposed_ep_s": micros * slow.ep_s,
        "exposed_dp_s": _clean(device - shown) + max(s.sync_s for s in stages),
        "pipeline_s": _clean(full - busy),
        "host_s": _clean(busy - device),
    }


@lru_cache(maxsize=1024)
def _weights(profile: Same[ModelProfile], tp: int, ep: int) -> tuple[UnitElements, ...]:
    made = {id(unit): unit_elements(unit, tp, ep) for unit in {id(u): u for u in profile.value.units}.values()}
    return tuple(made[id(unit)] for unit in profile.value.units)


@lru_cache(maxsize=8192)
def _unit_times(
    profile: Same[ModelProfile],
    cluster: Same[ClusterSpec],
    rates: Rates | None,
    calibration: Calibration | None,
    split: WorkSplit,
) -> tuple[UnitTime, ...]:
    machine = Machine(cluster=cluster.value, gpu=cluster.value.gpu, rates=rates, calibration=calibration)
    made = {id(unit): unit_time(machine, unit, split) for unit in {id(u): u for u in profile.value.units}.values()}
    times = tuple(made[id(unit)] for unit in profile.value.units)
    if not all(is_finite(time) for time in times):
        raise PlanError(
            f"'{cluster.value.device_name}' in {split.precision}: a rate or a link's bandwidth is not known, so no "
            "time can be predicted; give the link, or measure the machine"
        )
    return times


@lru_cache(maxsize=32768)
def _stages(
    profile: Same[ModelProfile],
    cluster: Same[ClusterSpec],
    rates: Rates | None,
    calibration: Calibration | None,
    split: WorkSplit,
    strategy: str,
    dims: ParallelDims,
    waits: bool | None,
    wires: Wires,
    async_tp: bool,
    layers: int | None,
    counts: tuple[int, ...],
    ends: int,
) -> tuple[StageTime, ...]:
    """Build the pipeline's stages, one without a pipeline.

    ``counts`` are the blocks of each; what precedes them belongs to the first, what follows to ``ends``. Of each rank's
    blocks ``layers`` are recomputed (all for ``None``).
    """
    model, parsed = profile.value, parse_strategy(strategy)
    times = _unit_times(profile, cluster, rates, calibration, split)
    weights = _weights(profile, split.tp, split.ep)
    traffic = _traffics(weights, cluster, rates, calibration, parsed.base, dims, waits is True, wires)
    if layers is not None:  # the same units once more, not recomputed
        times += _unit_times(profile, cluster, rates, calibration, replace(split, recompute="none"))
        kept = replace(wires, recasts=False)
        traffic += _traffics(weights, cluster, rates, calibration, parsed.base, dims, waits is True, kept)
    machine = Machine(cluster=cluster.value, gpu=cluster.value.gpu, rates=rates, calibration=calibration)
    pieces = StageParts(
        strategy=parsed,
        sharded=parsed.shards_parameters and not wires.partitions(parsed.base),
        pipelined=dims.pp > 1,
        every=waits is False,
        blocks=tuple(unit.kind == "block" for unit in model.units) * (1 if layers is None else 2),
        times=times,
        traffic=traffic,
        contention=rates.contention if rates is not None else CONTENTION,
        tp_share=1.0 - ASYNC_TP_HIDES if async_tp else 1.0,
        gathers_ahead=rates is None,
        buckets=ddp_buckets(machine, parsed, dims, shared=wires.shared) if wires.copies != "units" else None,
        keeps_last=wires.keeps_last,
    )
    number = len(model.units)
    found = [index for index, block in enumerate(pieces.blocks[:number]) if block]
    first, last = (found[0], found[-1]) if found else (number, number)
    before = [(model.units[i].count, i) for i in range(first)]
    blocks = [(model.units[i].count, i) for i in range(first, min(last + 1, number))]
    after = [(model.units[i].count, i) for i in range(last + 1, number)]
    if dims.pp == 1:
        return (stage_time(pieces, [*before, *_recomputed(blocks, layers, number), *after]),)
    made: dict[tuple[tuple[tuple[int, int], ...], bool, bool], StageTime] = {}
    out = []
    for stage, count in enumerate(counts):
        share = tuple(_recomputed(take(blocks, sum(counts[:stage]), count), layers, number))
        key = (share, stage == 0, stage == ends)
        if key not in made:
            made[key] = stage_time(pieces, [*(before if key[1] else ()), *share, *(after if key[2] else ())])
        out.append(made[key])
    return tuple(out)


def _recomputed(blocks: list[tuple[int, int]], layers: int | None, number: int) -> list[tuple[int, int]]:
    """Split rows of blocks after the first ``layers``; those that are not recomputed come ``number`` units later."""
    if layers is None:
        return blocks
    total = sum(count for count, _ in blocks)
    kept = take(blocks, layers, total)
    return [*take(blocks, 0, layers), *((count, index + number) for count, index in kept)]


@lru_cache(maxsize=256)
def _reference(profile: Same[ModelProfile], kind: Reference) -> Same[ModelProfile]:
    """Return the profile of a frozen reference: the model's, or that of its base with the adapters off."""
    return profile if kind == "copy" else Same(without_adapters(profile.value))


@lru_cache(maxsize=256)
def _mfu_of_one(profile: Same[ModelProfile], cluster: Same[ClusterSpec], precision: str) -> float | None:
    """MFU at one sample per second on one device."""
    return mfu(profile.value, cluster.value.gpu, precision, 1.0)


def _waits(plan: Plan) -> bool | None:
    """Return whether unsharded gradients wait for the last micro batch; None if it is alone."""
    return None if plan.grad_accum == 1 else not plan.syncs_every_micro_batch


@lru_cache(maxsize=8192)
def _traffics(
    weights: tuple[UnitElements, ...],
    cluster: Same[ClusterSpec],
    rates: Rates | None,
    calibration: Calibration | None,
    base: str,
    dims: ParallelDims,
    accumulates: bool,
    wires: Wires,
) -> tuple[WireTime, ...]:
    machine = Machine(cluster=cluster.value, gpu=cluster.value.gpu, rates=rates, calibration=calibration)
    made = {one: _traffic(machine, one, base, dims, accumulates, wires) for one in dict.fromkeys(weights)}
    return tuple(made[one] for one in weights)


def _traffic(
    machine: Machine, weights: UnitElements, base: str, dims: ParallelDims, accumulates: bool, wires: Wires
) -> WireTime:
    """Collectives and copies of one unit: gathered in the compute type, reduced in the plan's type.

    Experts that are spread over ranks move between the ranks that have the same ones, after the rest of their unit.
    """
    if not weights.expert_elements:
        return _unit_traffic(machine, weights, base, dims, accumulates, wires)
    experts = UnitElements(
        weights.expert_elements,
        weights.expert_trainable,
        weights.expert_at_rest_bytes,
        wide=weights.expert_wide,
    )
    rest = UnitElements(
        weights.elements - experts.elements,
        weights.trainable - experts.trainable,
        weights.at_rest_bytes - experts.at_rest_bytes,
        in_fp8=weights.in_fp8,
        wide=weights.wide - experts.wide,
    )
    among = expert_dims(dims)
    one = _unit_traffic(machine, rest, base, dims, accumulates, wires)
    other = _unit_traffic(machine, experts, base, among, accumulates, wires, apart=dims.ep)
    return WireTime(
        gather_s=one.gather_s + other.gather_s,
        reduce_s=one.reduce_s + other.reduce_s,
        bucket_bytes=one.bucket_bytes + other.bucket_bytes,
        copy_forward_s=one.copy_forward_s + other.copy_forward_s,
        copy_backward_s=one.copy_backward_s + other.copy_backward_s,
    )


def _unit_traffic(
    machine: Machine,
    weights: UnitElements,
    base: str,
    dims: ParallelDims,
    accumulates: bool,
    wires: Wires,
    *,
    apart: int = 1,
) -> WireTime:
    """`_traffic` of weights that all ranks of ``dims`` share; ``apart`` ranks lie between neighbours."""
    width, per_node = wires.width, max(1, machine.cluster.devices_per_node // apart)
    inner = max(1, per_node // dims.tp)
    low_precision, copies, sent = width < wires.stored, wires.copies, wires.reduced
    if base in ("ddp", "zero1") or wires.partitions(base):
        ranks = dims.dp * dims.cp
        scatters = (base == "zero1" and (wires.scatters or wires.zero == "deepspeed")) or wires.partitions(base)
        kind: CollectiveKind = "reduce_scatter" if scatters else "all_reduce"
        reduce = machine.collective_s(kind, sent * weights.trainable, ranks, inner)
        add = 2.0 * wires.stored if accumulates else 0.0
        if copies == "units":  # FSDP2 over shards of one rank: cast, copied, and gradients copied twice
            unit = (MASTER_BYTES + width if low_precision else 0.0) * weights.wide + 2.0 * width * weights.elements
            return WireTime(
                reduce_s=reduce,
                copy_forward_s=machine.memory_s(unit),
                copy_backward_s=machine.memory_s(unit + (width + 12.0 + add) * weights.trainable),
            )
        casts = 6.0 if low_precision and copies == "autocast" else 0.0
        again = 1.0 if wires.recasts else 0.0
        # a product in fp8 casts the weight itself
        cast = max(0.0, weights.wide - (weights.in_fp8 if wires.fp8 else 0.0))
        return WireTime(
            reduce_s=reduce,
            bucket_bytes=sent * weights.trainable,
            copy_forward_s=machine.memory_s(casts * cast),
            copy_backward_s=machine.memory_s(
                again * casts * cast + casts * min(weights.wide, weights.trainable) + add * weights.trainable
            ),
        )
    ranks = dims.dp_shard * dims.cp
    eighth = weights.in_fp8 if wires.gathers_fp8 else 0.0
    gathered = min(width * weights.elements, weights.at_rest_bytes) - (width - 1) * eighth
    gather = machine.gather_s(gathered, ranks, inner)
    reduce = machine.reduce_scatter_s(sent * weights.trainable, ranks, inner)
    if dims.dp_replicate > 1:
        outer = max(1, per_node // (dims.tp * ranks))
        reduce += machine.collective_s("all_reduce", sent * weights.trainable / ranks, dims.dp_replicate, outer)
    copied = 2.0 * (width * weights.elements - (width - 1) * eighth) if ranks > 1 else 0.0
    copied += FP8_SHARD_CAST_BYTES * eighth / ranks
    return WireTime(
        gather_s=gather,
        reduce_s=reduce,
        copy_forward_s=machine.memory_s(copied),
        copy_backward_s=machine.memory_s(
            (copied if base != "zero2" else 0.0) + (2.0 + sent + (4.0 if accumulates else 0.0)) * weights.trainable
        ),
    )


def _send_s(machine: Machine, profile: ModelProfile, plan: Plan) -> float:
    """Seconds of one transfer between neighbouring stages, the outermost axis of the mesh."""
    block = next((unit for unit in profile.units if unit.kind == "block"), None)
    if block is None:
        return 0.0
    whole = block.input_elements * plan.sequences * COMPUTE_BYTES[plan.precision]
    message = whole / (plan.dims.tp * plan.dims.cp)
    apart = plan.dims.world_size // plan.dims.pp
    if machine.rates is None:
        return machine.collective_s("send", message, 2, 1 if apart >= machine.cluster.devices_per_node else 2)
    return cpu_send_s(machine, plan.dims.pp, apart, message)


def _clean(seconds: float) -> float:
    """Round a tiny negative or positive difference of equal sums to 0."""
    return seconds if abs(seconds) > 1e-12 else 0.0
