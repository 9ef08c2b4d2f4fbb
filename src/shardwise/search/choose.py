"""Choose the plan of a run on this machine; every rejected plan keeps its reason.

`choose_profiled` is the planner's search among runnable plans. `choose` is for models that cannot be traced, and for
custom loops that give no sample, whose batch and length are not known: the simplest plan whose known bytes fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import ShardPlacement, estimate_memory
from shardwise.cost.memory.framework_overhead import context_bytes
from shardwise.cost.memory.local_shapes import layout_of
from shardwise.cost.time.step_time import StepTime
from shardwise.errors import DoesNotFit, ModelError, PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.facts import ModelSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from shardwise.search.advice import Command, search_and_advise
from shardwise.search.candidate import Candidate, Pins, SearchResult
from shardwise.search.enumerate import complexity
from shardwise.search.explain_plan import with_reasons
from shardwise.search.problem import Costs, SearchProblem, ask, usable_bytes
from shardwise.search.search import USABLE_IF_UNKNOWN, cost_of, rank
from shardwise.units import bytes_text

SIMPLEST_FIRST = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "zero2+offload", "fsdp+offload")

# raises ModelError or PlanError where the live module does not support the plan
ShardingCheck = Callable[[Plan], ShardPlacement | None]


@dataclass(frozen=True)
class Choice:
    """Chosen plan, its predicted memory, the reasons against simpler ones, and its precision with the reason."""

    plan: Plan
    estimate: Estimate
    rejected: tuple[tuple[str, str], ...] = ()
    time: StepTime | None = None
    precision: str = ""


def check_degrees(
    strategy: str, cluster: ClusterSpec, *, dp_replicate: int | None = None, dp_shard: int | None = None
) -> None:
    """Check that the strategy, or with ``auto`` any strategy, has these degrees; needs no model.

    Raises:
        PlanError: it does not have them.
    """
    refused = []
    for name in SIMPLEST_FIRST if strategy == "auto" else (strategy,):
        try:
            _dims(name, cluster, dp_replicate, dp_shard)
            return
        except PlanError as error:
            refused.append(error)
    if len(refused) == 1:
        raise refused[0]
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
    world, text = cluster.world_size, " and ".join(f"parallel.{name} {n}" for name, n in given.items() if n)
    raise PlanError(f"no strategy has {text} on {world} ranks; leave it out, or make dp_replicate × dp_shard {world}")


def _dims(name: str, cluster: ClusterSpec, dp_replicate: int | None, dp_shard: int | None) -> ParallelDims:
    return dims_for(
        parse_strategy(name),
        cluster.world_size,
        devices_per_node=cluster.devices_per_node,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
    )


def choose(
    draft: Plan,
    spec: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    *,
    strategy: str = "auto",
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    check_sharding: ShardingCheck | None = None,
) -> Choice:
    """Complete ``draft`` (batch split, precision, recompute) with a strategy and its degrees.

    A named strategy is kept, fitting or not. ``auto`` takes the first of `SIMPLEST_FIRST` whose known bytes, with the
    device's context, are usable (60 % of its memory where saved activations are unknown); unknown memory counts as
    enough.
    ``check_sharding`` checks the live module under a named strategy that shards it.

    Raises:
        PlanError: the strategy and the degrees do not match the world size.
        ModelError: the live module does not support the requested strategy.
        DoesNotFit: ``auto`` found none; the message has every candidate with its bytes.
    """
    check_degrees(strategy, cluster, dp_replicate=dp_replicate, dp_shard=dp_shard)

    def candidate(name: str, reason: str) -> Choice:
        dims = _dims(name, cluster, dp_replicate, dp_shard)
        plan = draft.model_copy(update={"strategy": str(parse_strategy(name)), "dims": dims, "reason": reason})
        cut = plan.dims.splits_model or plan.dims.ep > 1
        parts = check_sharding(plan) if check_sharding is not None and cut else None
        return Choice(plan=plan, estimate=estimate_memory(spec, plan, workload, parts))

    if strategy != "auto":
        return candidate(strategy, "asked for by name")
    rejected: list[tuple[str, str]] = []
    for name in SIMPLEST_FIRST:
        if name == "hsdp" and cluster.nodes == 1 and dp_replicate is None and dp_shard is None:
            rejected.append((name, "one node: nothing to gain over fsdp"))
            continue
        try:
            found = candidate(name, "")
        except PlanError as error:
            rejected.append((name, str(error)))
            continue
        memory = cluster.device_memory_bytes
        some = None if memory is None else int(memory * USABLE_IF_UNKNOWN)
        limit = some if found.estimate.unknown else usable_bytes(cluster)
        needed = found.estimate.device_bytes + context_bytes(layout_of(found.plan), cluster)
        if limit is None or needed <= limit:
            room = "device memory unknown" if limit is None else f"of {bytes_text(limit)} usable"
            reason = f"the simplest that fits: {bytes_text(needed)} {room}"
            plan = found.plan.model_copy(update={"reason": reason})
            return Choice(plan=plan, estimate=found.estimate, rejected=tuple(rejected))
        rejected.append((name, f"needs {bytes_text(needed)}, {bytes_text(limit)} usable"))
    lines = "\n".join(f"  {name}: {why}" for name, why in rejected)
    raise DoesNotFit(
        f"no plan fits {cluster.world_size} × {cluster.device_name}:\n{lines}\n"
        "use more or larger devices, a smaller micro batch, or parallel.recompute=full"
    )


def choose_profiled(
    profile: ModelProfile,
    spec: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    pins: Pins,
    shorter: Callable[[int], ModelProfile] | None = None,
    costs: Costs | None = None,
    check_sharding: ShardingCheck | None = None,
    command: Command | None = None,
) -> Choice:
    """Return the search's recommendation among runnable plans.

    A pinned one is kept, fitting or not. ``costs`` are used for the choice; its reported values are the cost model's
    own, uncorrected. ``check_sharding`` checks the live module under a plan that shards it: rejected plans are
    skipped, unless requested by name. ``command`` formats what trains an alternative, where nothing fits.

    Raises:
        PlanError: the pinned values have no layout.
        ModelError: the live module does not support the requested strategy.
        DoesNotFit: nothing fits; the message has every candidate with its bytes, and alternatives that fit.
    """
    result = search_and_advise(
        profile, workload, cluster, pins, only_runnable=True, shorter=shorter, costs=costs, command=command
    )
    problem = ask(profile, workload, cluster, pins, costs=costs, only_runnable=True)
    best, parts, refused = _allowed(problem, result, check_sharding)
    if best is None:
        lines = [f"  {c.plan.strategy}: {c.reason}" for c in result.candidates if c.plan.strategy not in dict(refused)]
        lines += [f"  {name}: {why}" for name, why in refused] + [f"  {line}" for line in result.advice]
        lines += ["use more or larger devices, shorter samples, a smaller batch, or parallel.recompute=full"]
        raise DoesNotFit(f"no plan fits {cluster.world_size} × {cluster.device_name}:\n" + "\n".join(lines))
    simpler = complexity(best.plan.parsed)
    others = [c for c in result.candidates if c.plan.strategy not in (best.plan.strategy, *dict(refused))]
    passed = [c for c in others if complexity(c.plan.parsed) < simpler or c.tie]
    rejected = [(c.plan.strategy, c.reason) for c in sorted(passed, key=lambda c: complexity(c.plan.parsed))]
    if costs is not None:
        plain = pins.model_copy(update={"strategy": best.plan.parsed})
        best = cost_of(ask(profile, workload, cluster, plain), best.plan)
    estimate = exact(best, spec, workload, parts)
    return Choice(plan=best.plan, estimate=estimate, rejected=(*rejected, *refused), time=best.time)


def _allowed(
    problem: SearchProblem, result: SearchResult, check_sharding: ShardingCheck | None
) -> tuple[Candidate | None, ShardPlacement | None, list[tuple[str, str]]]:
    """Return the best supported candidate, its placement, and the rejected ones.

    The live module decides. Rejected ones come with their messages.
    """
    refused: list[tuple[str, str]] = []
    ranked, chosen = list(result.candidates), result.recommended
    if problem.pins.strategy is not None:
        chosen = 0
    while chosen is not None:
        best = ranked[chosen]
        strategy = best.plan.parsed
        if check_sharding is None or not (strategy.splits_model or strategy.ep > 1):
            return best, None, refused
        try:
            return best, check_sharding(best.plan), refused
        except (ModelError, PlanError) as error:
            if problem.pins.strategy is not None:
                raise
            why, axes = "; ".join(error.problems), (strategy.tp, strategy.pp, strategy.cp)
        same = [c for c in ranked if (c.plan.parsed.tp, c.plan.parsed.pp, c.plan.parsed.cp) == axes]
        refused += [(c.plan.strategy, why) for c in same]
        ranked, chosen = rank(problem, [c for c in ranked if c not in same])
        ranked = with_reasons(problem, ranked, chosen, result.considered)
    return None, None, refused


def exact(candidate: Candidate, spec: ModelSpec, workload: Workload, parts: ShardPlacement | None = None) -> Estimate:
    """Estimate the candidate with the live module's parameters, gradients and optimizer state.

    Under tensor or pipeline parallel ``parts`` gives the placement; by default, the profile.
    """
    if parts is None and candidate.plan.dims.tp * candidate.plan.dims.pp > 1:
        return candidate.memory
    estimated = estimate_memory(spec, candidate.plan, workload, parts)
    kept = {"parameters": estimated.parameters, "gradients": estimated.gradients, "optimizer": estimated.optimizer}
    return candidate.memory.model_copy(update=kept)
