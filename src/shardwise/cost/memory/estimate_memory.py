"""Estimated bytes of a rank, by category and by phase, without running the model.

`estimate` replays the program of one rank (`shardwise.cost.memory.step_program`) through a model of the caching
allocator and records the peaks of each phase; `peak_lower_bound` adds up the two moments at which nearly all plans
are fullest, in microseconds. `estimate_memory` is what a run's receipt compares with: closed formulas over a live
model's parameters, exact for parameters, gradients and optimizer state; allocator, context and communicators are not
counted there. A category that is unknown is ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from shardwise.cost.memory.allocation_trace import WRITTEN, AllocationTrace, Program
from shardwise.cost.memory.cost_inputs import CostInputs
from shardwise.cost.memory.estimate import CATEGORIES, Estimate
from shardwise.cost.memory.expert_shards import held_shape
from shardwise.cost.memory.framework_overhead import context_bytes
from shardwise.cost.memory.local_shapes import ShardLayout, layout_of, with_routing
from shardwise.cost.memory.lower_bound import peak_lower_bound
from shardwise.cost.memory.memory_key import MemoryKey
from shardwise.cost.memory.offloaded_activations import offloaded_activations, pinned_activations
from shardwise.cost.memory.simulate import SimulatedStep, fullest, replay, settings_of
from shardwise.cost.memory.step_program import write_program
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import ModelSpec, ParameterSpec, itemsize_of
from shardwise.model.profile import ModelProfile
from shardwise.plan.optimizers import ParameterShard
from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import bytes_of, extra_states, gradient_dtype, state_dtype, stored_dtype
from shardwise.plan.workload import Workload

__all__ = [
    "ShardPlacement",
    "estimate",
    "estimate_memory",
    "local_elements",
    "local_shape",
    "peak_lower_bound",
    "stepped_groups",
    "unit_elements",
    "zero1_shares",
]

NEAR = 0.85  # of the highest live peak: below it, a rank's allocator never reserves the most
STATE_ITEMSIZE = 4  # master weights, gradients and optimizer state are fp32


@dataclass(frozen=True)
class ShardPlacement:
    """Placement of a live model over the axes that shard it, as reported by `parallel`.

    ``shard_dim`` names the dim of each parameter that tensor parallel shards; others are replicated on its ranks.
    ``stages`` are the names of the parameters of each rank of a pipeline, any of a tied one's; empty without a
    pipeline. ``experts`` are the stacked weights that are over the ranks of ``ep``.
    """

    shard_dim: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[frozenset[str], ...] = ()
    experts: frozenset[str] = frozenset()


def estimate_memory(spec: ModelSpec, plan: Plan, workload: Workload, parts: ShardPlacement | None = None) -> Estimate:
    """Estimate bytes on the fullest rank under ``plan``; the module docstring lists the limits.

    Without ``parts`` the model is taken as replicated on every tensor- and pipeline-parallel rank.
    """
    parts = parts or ShardPlacement()
    each = [_stage_state(spec, plan, workload, parts, names) for names in parts.stages or (None,)]
    parameters, gradients = max(one[0] for one in each), max(one[1] for one in each)
    states = [one[2] for one in each if one[2] is not None]
    optimizer = max(states) if states else None
    saved = workload.activation_bytes.get(plan.recompute)
    logits, chunked = workload.logits_bytes, plan.loss_chunks > 1  # the log-probabilities are not saved then
    micro = plan.micro_batch or 1
    makes_room = plan.parsed.offload and plan.device != "cpu"  # a CPU's memory is the host's
    offloaded = parameters + gradients + (optimizer or 0) if makes_room else 0
    average = max(one[3] for one in each) if workload.average and not makes_room else 0
    return Estimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=None if saved is None else (saved - (logits or 0) * chunked) * micro,
        logits=None if logits is None else math.ceil(logits * micro / plan.loss_chunks),
        buffers=_gather_bytes(spec, plan) + average,
        offloaded_bytes=offloaded,
    )


def local_elements(
    parameter: ParameterSpec, plan: Plan, rank: int = 0, *, shard_dim: int | None = None, tp_rank: int = 0
) -> int:
    """Elements of ``parameter`` at rest on a rank; see `local_shape`."""
    return math.prod(local_shape(parameter, plan, rank, shard_dim=shard_dim, tp_rank=tp_rank))


def local_shape(
    parameter: ParameterSpec, plan: Plan, rank: int = 0, *, shard_dim: int | None = None, tp_rank: int = 0
) -> tuple[int, ...]:
    """Shape of ``parameter`` at rest on a rank of the sharding axis, which includes cp ranks.

    Tensor parallel shards ``shard_dim`` first, then FSDP2 shards dim 0 of the local tensor, each into chunks of
    ``ceil(size / ranks)``; the last ranks may have smaller or empty chunks.
    """
    shape = list(parameter.shape)
    if shard_dim is not None:
        shape[shard_dim] = _chunk(shape[shard_dim], plan.dims.tp, tp_rank)
    if plan.parsed.shards_parameters and shape:
        shape[0] = _chunk(shape[0], plan.dims.dp_shard * plan.dims.cp, rank)
    return tuple(shape)


def _chunk(size: int, ranks: int, rank: int) -> int:
    each = math.ceil(size / ranks)
    return max(0, min(each, size - rank * each))


def stepped_groups(spec: ModelSpec, workload: Workload) -> list[list[ParameterSpec]]:
    """Trainable parameters that the optimizer steps, by parameter group."""
    trainable = {p.name: p for p in spec.parameters if p.trainable}
    if workload.parameter_groups is None:
        return [list(trainable.values())]
    return [[trainable[name] for name in group if name in trainable] for group in workload.parameter_groups]


def zero1_shares(groups: list[list[ParameterSpec]], world_size: int) -> list[list[ParameterSpec]]:
    """Assign parameters to ranks under ``zero1``.

    Group after group, largest first, each to the rank with the least so far: the rule of ZeroRedundancyOptimizer.
    """
    shares: list[list[ParameterSpec]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for group in groups:
        for parameter in sorted(group, key=lambda p: p.num_elements, reverse=True):
            rank = loads.index(min(loads))
            shares[rank].append(parameter)
            loads[rank] += parameter.num_elements
    return shares


def _stage_state(
    spec: ModelSpec, plan: Plan, workload: Workload, parts: ShardPlacement, names: frozenset[str] | None
) -> tuple[int, int, int | None, int]:
    """Bytes of parameters, gradients, state and trained weights on a stage's fullest rank.

    ``names`` None is the full model.
    """

    def is_here(parameter: ParameterSpec) -> bool:
        return names is None or not names.isdisjoint((parameter.name, *parameter.aliases))

    def local_numel(parameter: ParameterSpec) -> int:
        if parameter.name in parts.experts:
            return math.prod(held_shape(parameter.shape, plan.dims))
        return local_elements(parameter, plan, shard_dim=parts.shard_dim.get(parameter.name))

    def total(dtype: Callable[[Plan, str], str], *, trained: bool = False) -> int:
        each = [p for p in spec.parameters if p.name in sizes and (p.trainable or not trained)]
        return sum(sizes[p.name] * bytes_of(p, dtype(plan, p.dtype)) for p in each)

    sizes = {p.name: local_numel(p) for p in spec.parameters if is_here(p)}
    trained = total(stored_dtype, trained=True)
    gradients = 0 if plan.optimizer_in_backward else total(gradient_dtype, trained=True)  # freed as each is stepped
    if workload.optimizer_states is None:
        return total(stored_dtype), gradients, None, trained
    groups = [[p for p in group if p.name in sizes] for group in stepped_groups(spec, workload)]
    ranks = plan.dims.dp * plan.dims.cp
    shares = zero1_shares(groups, ranks) if plan.parsed.base == "zero1" else [[p for group in groups for p in group]]
    state = max(
        sum(_state(p, plan, workload, parts, sizes[p.name]) + workload.scalar_states * STATE_ITEMSIZE for p in share)
        for share in shares
    )
    return total(stored_dtype), gradients, state, trained


def _state(parameter: ParameterSpec, plan: Plan, workload: Workload, parts: ShardPlacement, size: int) -> int:
    """Bytes of a parameter's state with dimensions; ``size`` elements are on the fullest rank."""
    if (spec := workload.custom_state) is None:
        each = bytes_of(parameter, state_dtype(plan, parameter.dtype))
        return size * each * ((workload.optimizer_states or 0) + extra_states(plan))
    if parameter.name in parts.experts:
        here = held_shape(parameter.shape, plan.dims)
    else:
        here = local_shape(parameter, plan, shard_dim=parts.shard_dim.get(parameter.name))
    shard = ParameterShard(parameter.shape, here, here, parameter.block is not None)
    return spec.state_bytes(shard, parameter.itemsize)


def _gather_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Peak of the short-lived copies: gathered units, unsharded gradients or autocast's weights."""
    compute = itemsize_of(plan.precision)
    if not plan.parsed.shards_parameters:
        return 0 if plan.precision == "fp32" else spec.num_parameters * compute
    units = unit_elements(spec)
    root = units.pop(None, 0)
    if plan.parsed.reshards_after_forward:
        gathered = root + sum(sorted(units.values(), reverse=True)[:2])  # one in use, one prefetched
    else:
        gathered = root + sum(units.values())
    waits = plan.grad_accum > 1 and not plan.syncs_every_micro_batch
    waiting = spec.num_trainable * STATE_ITEMSIZE if waits else 0
    largest = max([root, *units.values()])
    return gathered * compute + waiting + largest * STATE_ITEMSIZE  # and one unit's unsharded gradient


def unit_elements(spec: ModelSpec) -> dict[str | None, int]:
    """Elements in each sharding unit: a block's name, or ``None`` for all outside the blocks."""
    units: dict[str | None, int] = {}
    for parameter in spec.parameters:
        units[parameter.block] = units.get(parameter.block, 0) + parameter.num_elements
    return units


def estimate(
    profile: ModelProfile,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
) -> Estimate:
    """Estimate bytes on the fullest rank under ``plan``, by category and phase.

    `shardwise.cost.memory.step_program` lists what is not counted. ``workload.program`` has the traits of the program
    that runs the plan. ``reserved`` is the allocator model's on CUDA; on a CPU, whose allocator gives memory back, it
    is ``allocated``. ``phases``: ``load`` of random weights (rank 0's;
    others' are the same), ``first_step`` (the full step, without state before its end), ``forward``, ``backward`` and
    ``optimizer`` of later steps, ``save`` and ``resume``, which copy one tensor at a time through the host. Of a
    pipeline each value is that of the stage with the highest one.
    """
    return _estimate(MemoryKey(profile, plan, workload, cluster))


@lru_cache(maxsize=4096)
def _estimate(key: MemoryKey) -> Estimate:
    profile, plan, workload, cluster = key.profile, key.plan, key.workload, key.cluster
    assert cluster is not None
    fused = workload.fuses_loss(plan)
    if workload.compiles(plan) and not workload.compiled:
        workload = workload.model_copy(update={"compiled": True})
    traits = workload.program
    layout, expandable = with_routing(layout_of(plan, traits), workload), traits.expandable_segments
    micro = plan.sequences
    written = WRITTEN if expandable else profile.num_blocks  # without, it matters how a row is split into blocks
    waits, adds = plan.gradient_sync == "last", traits.adds_in_buckets or layout.masters
    early = plan.optimizer_in_backward
    held = traits.logit_bytes if fused == (traits.loss == "fused") else None  # of the program's own loss
    again = (plan.recompute, plan.recompute_layers)
    shape = (plan.grad_accum, *again, waits, adds, fused, plan.loss_chunks, written, early)
    away = plan.offload_activations and layout.is_cuda
    program = Program(*shape, reference=plan.reference, logit_bytes=held, in_pieces=not expandable, saves_on_host=away)
    ranks = list(settings_of(profile, layout, workload, micro, program))
    tapes = [write_program(setting) for setting in ranks]
    context = context_bytes(layout, cluster) if workload.framework_overhead else 0
    limit = None if cluster.device_memory_bytes is None else cluster.device_memory_bytes - context
    simulated, squeezed = _simulated(tapes, cuda=layout.is_cuda, expandable=expandable, limit=limit)

    def at_rest(setting: CostInputs, name: str) -> int:
        pairs = zip(setting.weights, setting.pieces, strict=True)
        return sum(getattr(weights, name) * piece.count for weights, piece in pairs)

    parameters = max(at_rest(setting, "parameters") for setting in ranks) * (2 if plan.reference == "copy" else 1)
    gradients = max(at_rest(setting, "gradients") for setting in ranks)
    if early:
        gradients = max(weights.gradients for setting in ranks for weights in setting.weights)
    known = workload.optimizer is not None or workload.optimizer_states is not None
    state = max(setting.optimizer for setting in ranks) if known else None
    offloaded = parameters + gradients + (state or 0) if layout.offloads else 0
    pinned = max(at_rest(setting, "pinned_parameters") for setting in ranks) * (2 if plan.reference == "copy" else 1)
    pinned += gradients if early else max(at_rest(setting, "pinned_gradients") for setting in ranks)
    crowd = max(setting.in_flight for setting in ranks)
    saved = int(offloaded_activations(profile, plan, workload)) * crowd
    in_host = int(pinned_activations(profile, plan, workload)) * crowd if away else 0
    reserved = simulated.peak("reserved")
    most = dict(zip(CATEGORIES, simulated.most, strict=True))
    return Estimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        activations=most["activations"],
        logits=most["logits"],
        buffers=most["buffers"],
        temporaries=most["temporaries"],
        context=context,
        allocated=simulated.peak("allocated"),
        reserved=reserved,
        device=reserved + context,
        offloaded_bytes=offloaded,
        offloaded_activations=saved,
        host_bytes=_host_bytes(profile, layout, cluster, offloaded and pinned + (state or 0), in_host),
        phases=simulated.phases,
        notes=_notes(profile, layout, workload, known=known, squeezed=squeezed),
    )


def _simulated(
    tapes: list[AllocationTrace], *, cuda: bool, expandable: bool, limit: int | None
) -> tuple[SimulatedStep, bool]:
    """Simulate ranks, and return whether they fit within ``limit`` only because cached memory is given back.

    At the limit PyTorch releases its cache to the device and retries. Of several ranks only those that can reserve most
    use the slow allocator model.
    """
    if not cuda:
        return fullest([replay(trace, cuda=False) for trace in tapes]), False
    lives = [replay(trace, cuda=False) for trace in tapes] if len(tapes) > 1 else []
    most = max((live.peak("allocated") for live in lives), default=0)
    limit = None if limit is not None and most > limit else limit  # nothing to give back is enough

    def reserved(trace: AllocationTrace, limit_bytes: int | None) -> SimulatedStep:
        return replay(trace, cuda=True, expandable=expandable, limit_bytes=limit_bytes)

    near = [live.peak("allocated") >= most * NEAR for live in lives] or [True]
    found = [reserved(trace, limit) if near[i] else lives[i] for i, trace in enumerate(tapes)]
    if not any(one.released for one in found):
        return fullest(found), False
    if all(one.fits for one in found):
        squeezed = [one if near[i] else reserved(tapes[i], limit) for i, one in enumerate(found)]
        if all(one.fits for one in squeezed):
            return fullest(squeezed), True
    return fullest([reserved(tapes[i], None) if one.released else one for i, one in enumerate(found)]), False


def _host_bytes(profile: ModelProfile, layout: ShardLayout, cluster: ClusterSpec, offloaded: int, saved: int) -> int:
    """Host RAM of the fullest node: offloaded bytes, and rank 0's full model while it is built.

    ``saved`` are activations. Parameters, gradients and activations are pinned, each tensor in a power of two of bytes.
    Values swapped to a drive pass through host buffers, which are not counted. On a CPU the ranks' device memory is not
    repeated here. Python, libraries and the data loader are not counted.
    """
    ranks = min(cluster.devices_per_node, layout.replicas * layout.tp * layout.pp)
    full = sum(math.ceil(w.num_elements * w.itemsize) * u.count for u in profile.units for w in u.weights)
    return full + ((0 if layout.strategy.nvme else offloaded) + saved) * ranks


def _notes(
    profile: ModelProfile, layout: ShardLayout, workload: Workload, *, known: bool, squeezed: bool
) -> tuple[str, ...]:
    notes = list(profile.unknown)
    if layout.is_cuda and workload.framework_overhead:
        notes.append("context and communicator buffers are typical figures, good to some 0.3 GiB")
    if layout.strategy.engine == "deepspeed" and workload.program.is_own:
        notes.append("counted as the same plan on PyTorch; DeepSpeed's own buffers are not known")
    if squeezed:
        notes.append(
            "as little as this only because the allocator gives cached memory back and asks again, which costs time"
        )
    if not known:
        notes.append("the optimizer is not known: its state is left out")
    return tuple(notes)
