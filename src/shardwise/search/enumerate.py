"""Enumerate all layouts of the strategy grammar on a cluster, with reasons for rejections.

Cheap: no cost is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import ParallelDims, dims_for, spread_problem
from shardwise.plan.divisibility import context_fits, context_problem, expert_problem, length_problem, tensor_problem
from shardwise.plan.optimizers import refusals
from shardwise.plan.parallel_options import StepOptions, changed
from shardwise.plan.plan import Plan, Recompute, axis_problems
from shardwise.plan.strategy import BASES, DEGREES, SHARDED, Base, Strategy
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Pins

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
LEAST_TOKENS = 2048  # tokens of one sample on a rank, below which context parallel is not tried unless pinned
IMBALANCE = 1.1  # longest pipeline stage over the mean, in blocks, above which a degree is not tried
TENSOR_DEGREES = (1, 2, 4, 8, 16)
EXPERT_BASES: tuple[Base, ...] = ("zero1", "fsdp", "hsdp")  # tried with ``+ep``; others need a pin
EXPERT_DEGREES = tuple(2**n for n in range(1, 10))
LEAST_EXPERT_TOKENS = 8192  # as `LEAST_TOKENS`, where ``+ep`` already spreads the largest part of a layer


@dataclass(frozen=True, slots=True)
class Layout:
    """Strategy with its degrees and possible micro batches, smallest first.

    ``share`` is the samples of a global batch that one data-parallel rank computes.
    """

    strategy: Strategy
    name: str
    dims: ParallelDims
    share: int
    micros: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Strategy without a layout here, and the reason."""

    strategy: str
    reason: str


def complexity(strategy: Strategy) -> tuple[int, ...]:
    """Return the sort key of simplicity: model-parallel axes first, then offload, then sharding."""
    degrees = (strategy.tp, strategy.pp, strategy.cp, strategy.ep)
    axes = sum(degree > 1 for degree in degrees)
    swaps = strategy.offload + 2 * strategy.nvme
    foreign = int(strategy.engine != "torch")
    return axes, swaps, foreign, BASES.index(strategy.base), strategy.tp * strategy.pp * strategy.cp * strategy.ep


def layouts(
    profile: ModelProfile, workload: Workload, cluster: ClusterSpec, pins: Pins
) -> tuple[list[Layout], list[Refusal]]:
    """Return all layouts, simplest first, and the rejected strategies.

    Raises:
        PlanError: the pinned strategy has no layout, or no strategy has one with the pinned values.
    """
    if pins.strategy is not None:
        problems = misfits(pins.strategy, profile, workload, cluster, pins)
        problems += _batch_problems(pins.strategy, workload, cluster, pins) if not problems else []
        if problems:
            raise PlanError(*(f"strategy '{pins.strategy}': {problem}" for problem in problems))
    names = [pins.strategy] if pins.strategy is not None else strategies(profile, workload, cluster)
    found: list[Layout] = []
    refused: list[Refusal] = []
    for strategy in names:
        why = _misplaced(strategy, profile, cluster, pins) or next(
            iter(_optimizer_problems(strategy, workload, pins)), ""
        )
        if pins.strategy is None and why:
            refused.append(Refusal(str(strategy), why))
            continue
        dims_found, why = _degrees(strategy, cluster, pins)
        reasons, here = [why] if why else [], []
        for dims in dims_found:
            share, micros, why = split(dims.dp, workload, pins)
            if why:
                reasons.append(why)
            else:
                here.append(Layout(strategy, str(strategy), dims, share, micros))
        found += here
        if reasons and not here:
            refused.append(Refusal(str(strategy), reasons[0]))
    if not found:
        raise PlanError(_no_layout(refused, workload, cluster, pins))
    found.sort(key=lambda layout: complexity(layout.strategy))
    return found, refused


def with_options(
    found: list[Layout], pins: Pins, plan_of: Callable[[Layout], Plan]
) -> tuple[list[Layout], list[Refusal]]:
    """Return the layouts that support the pinned options, and the rejected ones.

    Raises:
        PlanError: all are rejected.
    """
    allowed, refused = [], list[Refusal]()
    for layout in found:
        if why := option_problem(pins, layout, plan_of):
            refused.append(Refusal(layout.name, why))
        else:
            allowed.append(layout)
    if not allowed:
        raise PlanError(*dict.fromkeys(refusal.reason for refusal in refused))
    return allowed, refused


def option_problem(pins: Pins, layout: Layout, plan_of: Callable[[Layout], Plan]) -> str:
    """Return why a layout does not support the pinned options; empty if it does."""
    names = [name for name in changed(pins.options) if name in StepOptions.model_fields]
    lines = axis_problems(plan_of(layout)) if names else []
    return next((line for line in lines if any(name in line for name in names)), "")


def strategies(profile: ModelProfile, workload: Workload, cluster: ClusterSpec) -> list[Strategy]:
    """Return every strategy whose degrees match model and cluster.

    Adapters and DeepSpeed need a pin.
    """
    world = cluster.world_size
    found, experts = list[Strategy](), profile.experts
    length = workload.seq_len or profile.seq_len
    degrees = [n for n in EXPERT_DEGREES if experts and experts % n == 0]
    cuts = [n for n in TENSOR_DEGREES if n <= cluster.devices_per_node and not _tensor_problem(profile, n)]
    for tp in [n for n in cuts if n == 1 or length is None or not length_problem(length, n, 1)]:
        for pp in pipeline_degrees(profile, world // tp):
            for cp in _context_degrees(workload.seq_len or profile.seq_len, tp, world // (tp * pp), profile):
                if world % (tp * pp * cp):
                    continue
                for base in BASES:
                    swaps = (False, True) if base in SHARDED else (False,)
                    for offload in swaps:
                        found.append(_strategy(base, tp, pp, cp, offload))
                short = cp > 1 and (length or 0) // cp < LEAST_EXPERT_TOKENS
                for ep in (n for n in degrees if n % (tp * cp) == 0 and world // pp % n == 0 and not short):
                    found += [_strategy(base, tp, pp, cp, False, ep) for base in EXPERT_BASES]
    return found


@lru_cache(maxsize=4096)
def _strategy(base: Base, tp: int, pp: int, cp: int, offload: bool, ep: int = 1) -> Strategy:
    return Strategy(base=base, tp=tp, pp=pp, cp=cp, offload=offload, ep=ep)


def pipeline_degrees(profile: ModelProfile, ranks: int) -> list[int]:
    """Return the divisors of ``ranks`` that split the blocks into nearly equal stages."""
    blocks = profile.num_blocks
    if blocks < 2:
        return [1]
    wanted = {2**n for n in range(10)} | {n for n in range(1, blocks + 1) if blocks % n == 0}
    return sorted(
        n for n in wanted if n == 1 or (n <= blocks and ranks % n == 0 and -(-blocks // n) * n / blocks <= IMBALANCE)
    )


def _context_degrees(seq_len: int | None, tp: int, ranks: int, profile: ModelProfile) -> list[int]:
    if seq_len is None or profile.heads is None:
        return [1]
    heads, kv_heads = profile.heads, profile.kv_heads or profile.heads
    tried = [n for n in (2, 4, 8, 16, 32) if ranks % n == 0 and seq_len // n >= LEAST_TOKENS]
    return [1, *(n for n in tried if context_fits(heads, kv_heads, tp, n) and not length_problem(seq_len, tp, n))]


def misfits(
    strategy: Strategy, profile: ModelProfile, workload: Workload, cluster: ClusterSpec, pins: Pins
) -> list[str]:
    """Return the conflicts of a pinned ``strategy`` with model and cluster, each with a fix."""
    problems = [problem] if (problem := _tensor_problem(profile, strategy.tp, cuts_experts=strategy.ep == 1)) else []
    problems += [problem] if (problem := _experts_problem(strategy, profile.experts, cluster.world_size)) else []
    blocks = profile.num_blocks
    if strategy.pp > max(blocks, 1):
        fix = f"use pp {blocks} or less" if blocks > 1 else "leave +pp out"
        problems.append(f"pp {strategy.pp} is more than the model's {blocks} repeated blocks; {fix}")
    else:
        problems += [problem] if (problem := _stages_problem(strategy, blocks, pins)) else []
    seq_len = workload.seq_len or profile.seq_len
    if strategy.cp > 1 and (seq_len is None or profile.heads is None):
        problems.append(f"cp {strategy.cp} divides sequences, and this model has none; leave +cp out")
    elif strategy.tp * strategy.cp > 1:
        heads = profile.heads or 1
        wrong = [context_problem(heads, profile.kv_heads or heads, strategy.tp, strategy.cp)]
        wrong += [] if seq_len is None else [length_problem(seq_len, strategy.tp, strategy.cp)]
        problems += [problem for problem in wrong if problem]
    ranks = strategy.tp * strategy.pp * strategy.cp
    if cluster.world_size % ranks:
        shown = " × ".join(f"{axis} {getattr(strategy, axis)}" for axis in DEGREES if getattr(strategy, axis) > 1)
        product = f"{shown} = {ranks}" if " × " in shown else shown
        problems.append(
            f"{product} does not divide the {cluster.world_size} devices; "
            f"use degrees whose product divides {cluster.world_size}"
        )
    return problems + _optimizer_problems(strategy, workload, pins)


def _experts_problem(strategy: Strategy, experts: int, world: int) -> str:
    """Return why experts cannot be spread, with degrees that divide both the experts and the ranks."""
    inner = strategy.tp * strategy.cp
    dp, left = divmod(world, inner * strategy.pp)
    if strategy.base == "hsdp" or left:
        return expert_problem(experts, strategy.ep, inner=inner)  # `dims_for` has the ranks
    sharded = {"dp_shard": dp} if strategy.shards_parameters else {"dp_replicate": dp}
    dims = ParallelDims(tp=strategy.tp, pp=strategy.pp, cp=strategy.cp, ep=strategy.ep, **sharded)
    return expert_problem(experts, strategy.ep, dims.expert_ranks, inner) or spread_problem(dims, experts)


def _stages_problem(strategy: Strategy, blocks: int, pins: Pins) -> str:
    """Return why a pipeline has more virtual stages than the model has blocks."""
    virtual = pins.options.get("virtual_stages", 1)
    if strategy.pp == 1 or virtual == 1 or strategy.pp * virtual <= blocks:
        return ""
    most = blocks // strategy.pp
    fix = f"use at most {most}" if most > 1 else "leave it out"
    return (
        f"pp {strategy.pp} × --virtual-stages {virtual} = {strategy.pp * virtual} stages need as many blocks, and the "
        f"model has {blocks}; {fix}"
    )


def _optimizer_problems(strategy: Strategy, workload: Workload, pins: Pins) -> list[str]:
    """Return why the optimizer cannot step what a strategy leaves on a rank."""
    early = bool(pins.options.get("optimizer_in_backward"))
    return [f"{workload.optimizer} {line}" for line in refusals(workload.optimizer, strategy, in_backward=early)]


def _tensor_problem(profile: ModelProfile, tp: int, *, cuts_experts: bool = True) -> str:
    if tp == 1:
        return ""
    if profile.heads is None:
        return f"tp {tp} divides attention heads, and this model has none that are known; leave +tp out"
    ops = [op for unit in profile.units if unit.kind == "block" for op in unit.ops if op.tp_sharding == "row"]
    widths = {op.k for op in ops if cuts_experts or not op.experts}
    return tensor_problem(profile.heads, profile.kv_heads or profile.heads, tp, sorted(widths))


def _misplaced(strategy: Strategy, profile: ModelProfile, cluster: ClusterSpec, pins: Pins) -> str:
    """Return why a free search does not try this strategy."""
    if pins.whole_model and strategy.splits_model:
        return "the model is to stay whole on a rank"
    dp = cluster.world_size // (strategy.tp * strategy.pp * strategy.cp)
    if dp == 1 and not strategy.offload and strategy.base not in ("ddp", "fsdp"):
        return "one data-parallel rank: nothing to shard"
    given = pins.dp_replicate is not None or pins.dp_shard is not None
    if strategy.base == "hsdp" and cluster.nodes == 1 and not given:
        return "one node: nothing to gain over fsdp"
    if problem := _stages_problem(strategy, profile.num_blocks, pins):
        return problem
    if strategy.offload and cluster.device == "cpu":
        return "the device's memory is the host's: offload makes no room"
    return ""


def _degrees(strategy: Strategy, cluster: ClusterSpec, pins: Pins) -> tuple[tuple[ParallelDims, ...], str]:
    """Return the possible degrees of a strategy; hybrid sharding has several."""
    return _all_degrees(strategy, cluster.world_size, cluster.devices_per_node, pins.dp_replicate, pins.dp_shard)


@lru_cache(maxsize=4096)
def _all_degrees(
    strategy: Strategy, world: int, per_node: int, dp_replicate: int | None, dp_shard: int | None
) -> tuple[tuple[ParallelDims, ...], str]:
    try:
        first = dims_for(strategy, world, devices_per_node=per_node, dp_replicate=dp_replicate, dp_shard=dp_shard)
    except PlanError as error:
        return (), str(error)
    if strategy.base != "hsdp" or dp_replicate or dp_shard:
        return (first,), ""
    found, shard, ranks = [first], first.dp_shard * 2, first.dp
    while shard < ranks and ranks % shard == 0:
        dims = first.model_copy(update={"dp_replicate": ranks // shard, "dp_shard": shard})
        found += [] if spread_problem(dims) else [dims]
        shard *= 2
    return tuple(found), ""


def split(dp: int, workload: Workload, pins: Pins) -> tuple[int, tuple[int, ...], str]:
    """Return samples per rank, the micro batches that divide them, or why there are none."""
    batch = workload.global_batch
    if batch is None:
        share = (pins.micro_batch or 1) * (pins.grad_accum or 1)
    elif batch % dp or batch < dp:
        return 0, (), f"global batch {batch} is not a multiple of dp {dp}; use {nearest_multiples(batch, dp)}"
    else:
        share = batch // dp
    micros = divisors(share)
    if pins.micro_batch is not None:
        micros = tuple(n for n in micros if n == pins.micro_batch)
    if pins.grad_accum is not None:
        micros = tuple(n for n in micros if n * pins.grad_accum == share)
    if not micros:
        unit = dp * (pins.micro_batch or 1) * (pins.grad_accum or 1)
        words = [f"dp {dp}"]
        words += [f"micro batch {pins.micro_batch}"] if pins.micro_batch else []
        words += [f"accumulation {pins.grad_accum}"] if pins.grad_accum else []
        return (
            0,
            (),
            (
                f"global batch {batch} is not {' × '.join(words)}{' × an integer' if not pins.grad_accum else ''}; "
                f"use {_batches_near(batch or 0, unit, share, pins)}"
            ),
        )
    return share, micros, ""


def _batches_near(batch: int, unit: int, share: int, pins: Pins) -> str:
    """Suggest a valid global batch, or a micro batch where it and the accumulation are pinned."""
    if not pins.micro_batch or not pins.grad_accum:
        return nearest_multiples(batch, unit)
    micro = f", or micro batch {share // pins.grad_accum}" if share % pins.grad_accum == 0 else ""
    early = " (optimizer_in_backward steps after one backward)" if pins.options.get("optimizer_in_backward") else ""
    return f"global batch {unit}{micro}{early}"


def nearest_multiples(number: int, unit: int) -> str:
    """Format the multiples of ``unit`` on both sides of ``number``."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _batch_problems(strategy: Strategy, workload: Workload, cluster: ClusterSpec, pins: Pins) -> list[str]:
    dims, why = _degrees(strategy, cluster, pins)
    if why:
        return [why]
    reasons = [split(one.dp, workload, pins)[2] for one in dims]
    return [] if "" in reasons else [reasons[0]]


def _no_layout(refused: list[Refusal], workload: Workload, cluster: ClusterSpec, pins: Pins) -> str:
    if pins.dp_replicate or pins.dp_shard:
        given = {"dp_replicate": pins.dp_replicate, "dp_shard": pins.dp_shard}
        text = " and ".join(f"{name} {n}" for name, n in given.items() if n)
        return (
            f"no strategy has {text} on {cluster.world_size} ranks; leave it out, or make dp_replicate × dp_shard "
            f"{cluster.world_size}"
        )
    for refusal in refused:
        if "global batch" in refusal.reason:
            return refusal.reason
    return f"no strategy can be laid out on {cluster.world_size} devices: " + "; ".join(
        f"{refusal.strategy}: {refusal.reason}" for refusal in refused[:3]
    )
