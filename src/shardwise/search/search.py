"""Search every plan of the grammar for a model on a cluster: ranked, with reasons.

Order: plans that fit, by predicted time; plans within a tie of the fastest are one class, and the simplest of them is
recommended. Where no time is known, the simplest that fits is. A plan that does not fit comes last, with its bytes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.collector import no_collector
from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.local_shapes import with_stages
from shardwise.cost.price import training_cost, training_hours
from shardwise.cost.time.step_time import StepTime
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.objective import SEQUENCES
from shardwise.plan.parallel_options import OPTION_DEFAULTS, TRAIN_DEFAULTS, GradientSync, has_effect
from shardwise.plan.plan import Plan, Recompute, not_runnable
from shardwise.plan.program import SHARDWISE, ProgramTraits
from shardwise.plan.strategy import Strategy
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, Pins, SearchResult
from shardwise.search.cost_inputs_of_plan import adapter_of
from shardwise.search.enumerate import (
    RECOMPUTES,
    Layout,
    Refusal,
    complexity,
    layouts,
    option_problem,
    with_options,
)
from shardwise.search.heuristics import min_bytes, rough_step_time_s
from shardwise.units import bytes_text

if TYPE_CHECKING:
    from shardwise.cost.time.estimate_time import Rates

from shardwise.search.expert_reasons import unrun_experts
from shardwise.search.explain_plan import with_reasons
from shardwise.search.problem import SAID_TIE, TIE, USABLE, Costs, SearchProblem, ask, tie_of, type_options
from shardwise.search.recompute_layers import with_fewest_layers

USABLE_IF_UNKNOWN = 0.6  # where a category is unknown
LOWER_BOUND_SLACK = 1.03  # a plan is dropped only if its lower bound exceeds the limit by this factor
ALIKE = 0.8  # of a strategy's gap between lower bound and estimate, what it has at other degrees: 0.86 and more seen
HOPELESS = 1.1  # a layout whose smallest plan exceeds that by this factor is not examined further
TIMED = 128  # layouts that are timed, best rough estimates first
MICROS = 3  # micro batches examined per layout and recompute mode: the largest that pass
OPTIONS = 8  # options of a layout that are timed, best rough estimates first
TRIES = 6  # full estimates per strategy
FULL = 20  # strategies that get a full estimate of memory, fastest first; and of those that this version runs
SHOWN_UNFIT = 12
HOST_UNKNOWN = "which is not known (host_memory_bytes of a cluster file)"


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a layout, with a rough estimate of its seconds."""

    layout: Layout
    micro: int
    recompute: Recompute
    sync: GradientSync
    rough_s: float


@dataclass(frozen=True, slots=True)
class Timed:
    """Plan of an option with its predicted time, ``None`` where unknown."""

    option: Option
    plan: Plan
    time: StepTime | None

    @property
    def layout(self) -> Layout:
        """Layout of the option."""
        return self.option.layout

    @property
    def step_s(self) -> float:
        """Predicted seconds, infinite where unknown."""
        return float("inf") if self.time is None else self.time.step_s


@no_collector()
def search(
    profile: ModelProfile,
    workload: Workload,
    cluster: ClusterSpec,
    pins: Pins | None = None,
    *,
    costs: Costs | None = None,
    rates: Rates | None = None,
    only_runnable: bool = False,
    any_plan: bool = False,
) -> SearchResult:
    """Search all plans for ``profile`` on ``cluster``, best first.

    One for each strategy, in its best split and recompute. ``rates`` are this machine's measured ones;
    ``only_runnable`` excludes plans that this version does not run; ``any_plan`` recommends them like all others, which
    is otherwise done only where nothing that runs fits. `shardwise.search.advice.search_and_advise` adds
    alternatives where nothing fits.

    Raises:
        PlanError: the pinned values have no layout, or the global batch matches no strategy.
    """
    asked = pins or Pins()
    problem = ask(
        profile, workload, cluster, asked, costs=costs, rates=rates, only_runnable=only_runnable, any_plan=any_plan
    )
    found, refused = laid_out(problem)
    ways = len(recomputes(problem))
    considered = sum(len(layout.micros) * ways for layout in found) + len(refused)
    candidates = with_fewest_layers(problem, _best_of_each(problem, found), cost_of, _step_s)
    ranked, chosen = rank(problem, candidates)
    explained = with_reasons(problem, ranked, chosen, considered)
    return SearchResult(candidates=tuple(explained), recommended=chosen, considered=considered, advice=())


def laid_out(problem: SearchProblem) -> tuple[list[Layout], list[Refusal]]:
    """Return the layouts of a request, and the rejected ones.

    Raises:
        PlanError: there is no layout.
    """
    kept, refused = _kept_layouts(problem)
    allowed, without = with_options(kept, problem.pins, lambda one: _first_plan(problem, one))
    return allowed, [*refused, *without]


def _first_plan(problem: SearchProblem, layout: Layout) -> Plan:
    return plan_for(problem, layout, layout.micros[0], "none")


def _kept_layouts(problem: SearchProblem) -> tuple[list[Layout], list[Refusal]]:
    """Return the layouts of a request, with those that do not support the pinned options, and the rejected ones."""
    found, refused = layouts(problem.profile, problem.workload, problem.cluster, problem.pins)
    program = problem.workload.program
    others = {one.name: why for one in found if (why := program.refuses(one.strategy))}
    if others and len({one.name for one in found}) == len(others):
        raise PlanError(next(iter(others.values())))
    refused += [Refusal(name, why) for name, why in others.items()]
    found = [one for one in found if one.name not in others]
    kept = [one for one in found if not (problem.only_runnable and one.strategy.not_runnable)]
    if not kept:
        only_planned = [f"{one.name} is planned, not run" for one in found]
        why = (only_planned or [refusal.reason for refusal in refused])[0]
        raise PlanError(f"no strategy that this version runs can be laid out: {why}")
    return kept, refused


def recomputes(problem: SearchProblem) -> tuple[Recompute, ...]:
    """Return the recompute modes to try: the pinned one, or all where there are blocks."""
    if problem.pins.recompute is not None:
        return (problem.pins.recompute,)
    return RECOMPUTES if problem.profile.num_blocks else ("none",)


def plan_for(
    problem: SearchProblem, layout: Layout, micro: int, recompute: Recompute, sync: GradientSync = "last"
) -> Plan:
    """Build the plan of one option."""
    options = axis_options(problem.pins, layout.strategy, problem.workload.program)
    if recompute == "none":
        options.pop("recompute_layers", None)
    return Plan(
        strategy=layout.name,
        dims=layout.dims,
        micro_batch=micro,
        grad_accum=layout.share // micro,
        seq_len=problem.workload.seq_len or problem.profile.seq_len,
        precision=problem.precision,
        recompute=recompute,
        gradient_sync=sync if layout.share > micro else "last",
        device=problem.cluster.device,
        objective=problem.workload.objective,
        **type_options(problem),
        adapter=adapter_of(problem.pins, problem.workload) if layout.strategy.adapter != "none" else None,
        **options,
    )


def axis_options(pins: Pins, strategy: Strategy, program: ProgramTraits = SHARDWISE) -> dict[str, Any]:
    """Return the options of a plan's axes: pinned, or the defaults of the program, ``train`` or another."""
    usual = {name: default for name, default in TRAIN_DEFAULTS.items() if default != OPTION_DEFAULTS[name]}
    wanted = usual | program.plan_options | {key: value for key, value in pins.options.items() if key != "adapter"}
    return {name: value for name, value in wanted.items() if has_effect(name, strategy)}


def fitting_options(problem: SearchProblem, layout: Layout) -> list[Option]:
    """Return micro batch and recompute options that pass the lower bound, best first.

    Memory grows with the micro batch while gradients accumulate, so the largest that fits is found by bisection,
    bounded above by more recompute and below by unsharded gradients; smaller ones are kept too, since they leave more
    micro batches to a pipeline. Without accumulation sharded gradients are reduced at once, which may need less: the
    rank's full share, which a pinned micro batch leaves out, is examined separately.
    """
    options: list[Option] = []
    base = plan_for(problem, layout, layout.micros[0], "none")
    full = layout.share if layout.micros[-1] == layout.share else None
    parts = layout.micros if full is None else layout.micros[:-1]
    ways = syncs(layout, problem.workload.program)
    most = {sync: len(parts) - 1 for sync in ways}
    for recompute in reversed(recomputes(problem)):
        least = -1
        for sync in ways:
            plan = base.model_copy(update={"recompute": recompute, "gradient_sync": sync})
            last = least = _largest(problem, layout, plan, least, most[sync])
            most[sync] = min(most[sync], max(0, last))
            micros = list(parts[max(0, last - MICROS + 1) : last + 1])
            if sync == ways[0] and full is not None and _passes(problem, layout, plan, full):
                micros.append(full)
            for micro in micros:
                rough_s = rough_step_time_s(problem.totals, layout, micro, recompute, every=sync == "every")
                options.append(Option(layout, micro, recompute, sync, rough_s))
            if micros and micros[-1] == full:
                break  # more traffic has no benefit here
        if not options and _is_hopeless(problem, layout):
            break
    return sorted(options, key=lambda option: option.rough_s)


def _is_hopeless(problem: SearchProblem, layout: Layout) -> bool:
    if problem.usable is None:
        return False
    least_bytes = problem.costs.peak_lower_bound(problem.profile, smallest(problem, layout), problem.workload)
    return least_bytes > problem.usable * LOWER_BOUND_SLACK * HOPELESS


def syncs(layout: Layout, program: ProgramTraits = SHARDWISE) -> tuple[GradientSync, ...]:
    """Return when gradients are reduced: as the program does, or both ways where it leaves that open.

    Sharded strategies that accumulate may do it after every micro batch. A pipeline reduces them once, when all its
    micro batches are through.
    """
    dims = layout.dims
    accumulates = layout.share > layout.micros[0] and layout.strategy.shards_parameters and dims.dp_shard * dims.cp > 1
    if not accumulates or dims.pp > 1:
        return ("last",)
    return ("last", "every") if program.gradient_sync is None else (program.gradient_sync,)


def _passes(problem: SearchProblem, layout: Layout, base: Plan, micro: int) -> bool:
    if problem.usable is None:
        return True
    return _screened(problem, layout, base, micro) <= problem.usable * LOWER_BOUND_SLACK


def _screened(problem: SearchProblem, layout: Layout, base: Plan, micro: int) -> int:
    plan = base.model_copy(update={"micro_batch": micro, "grad_accum": layout.share // micro})
    return problem.costs.peak_lower_bound(problem.profile, plan, problem.workload)


def _largest(problem: SearchProblem, layout: Layout, base: Plan, low: int, high: int) -> int:
    """Return the index of the largest micro batch that passes the lower bound; else ``low``.

    From ``low`` to ``high``.
    """
    while low < high:
        middle = (low + high + 1) // 2
        if _passes(problem, layout, base, layout.micros[middle]):
            low = middle
        else:
            high = middle - 1
    return low


def cost_of(problem: SearchProblem, plan: Plan, estimate: Estimate | None = None) -> Candidate:
    """Estimate the full costs of a plan."""
    memory = estimate or problem.costs.estimate(problem.profile, plan, problem.workload, problem.cluster)
    time = time_of(problem, plan)
    return _priced(problem, plan, memory, time)


def time_of(problem: SearchProblem, plan: Plan) -> StepTime | None:
    """Predict the seconds of a plan; ``None`` where the speed of a device or link is unknown."""
    if not problem.timed:
        return None
    try:
        return problem.costs.step_time(problem.profile, plan, problem.workload, problem.cluster)
    except PlanError:
        return None


def _step_s(problem: SearchProblem, plan: Plan) -> float:
    time = time_of(problem, plan)
    return float("inf") if time is None else time.step_s


def _priced(problem: SearchProblem, plan: Plan, memory: Estimate, time: StepTime | None) -> Candidate:
    """Build a candidate with hours and dollars, the pipeline's stages, and a note if the host's memory is unknown."""
    cluster = problem.cluster
    if memory.uses_host and memory.host_bytes and cluster.host_memory_bytes is None:
        note = f"needs {bytes_text(memory.host_bytes)} of host memory on a node, {HOST_UNKNOWN}"
        memory = memory.model_copy(update={"notes": (*memory.notes, note)})
    candidate = Candidate(
        plan=with_stages(problem.profile, plan),
        fits=fits(problem, memory),
        reason="",
        memory=memory,
        time=time,
        unrun=unrun_experts(problem.profile, plan),
    )
    step_tokens = (plan.global_batch or 0) * SEQUENCES[plan.objective] * (plan.seq_len or 0)
    hours = training_hours(problem.workload.tokens, step_tokens, time.step_s if time else None)
    cost = training_cost(hours, cluster.world_size, cluster.price_per_device_hour)
    return candidate if hours is None else candidate.model_copy(update={"hours": hours, "cost": cost})


def fits(problem: SearchProblem, memory: Estimate) -> bool | None:
    """Return whether an estimate is within the usable memory; ``None`` where one is unknown.

    Offloaded bytes must also be under the host's memory; where that is not known, the candidate's notes say so.
    """
    host = problem.cluster.host_memory_bytes
    if memory.uses_host and memory.host_bytes is not None and host is not None and memory.host_bytes > host:
        return False
    if problem.usable is None:
        return None
    if memory.unknown:
        return None if memory.device_bytes <= problem.usable else False
    return memory.device_bytes <= problem.usable


def _best_of_each(problem: SearchProblem, found: Sequence[Layout]) -> list[Candidate]:
    """Return the best variant of each promising strategy; others are only counted.

    The rough estimate selects layouts to time, the time selects strategies for a full memory estimate. Strategies that
    this version does not run take none of the places of those that it runs, as long as these may still be the fastest.
    """
    fitting, unfit = _screen_all(problem, found)
    by_name: dict[str, list[Timed]] = {}
    kept: dict[str, list[Option]] = {}
    rest: dict[str, list[Option]] = {}
    for place, (layout, options) in enumerate(fitting):
        if place < TIMED or _is_plain(layout):
            best_ones = options[:OPTIONS] if problem.timed else options
            by_name.setdefault(layout.name, []).extend(_timed(problem, _least_recompute(best_ones)))
            kept.setdefault(layout.name, []).extend(best_ones)
            rest.setdefault(layout.name, []).extend(options[len(best_ones) :])
    strategies = sorted((_in_order(ways) for ways in by_name.values()), key=lambda ways: _rank_of(ways[0]))
    best: dict[str, Candidate] = {}
    runs, limit_s = 0, float("inf")
    for place, ways in enumerate(strategies):
        is_run = not problem.any_plan and _is_run(problem, ways[0].plan)
        is_hopeful = is_run and runs < FULL and _least_s(ways) <= limit_s * (1 + SAID_TIE)
        if place < FULL or _is_plain(ways[0].layout) or is_hopeful:
            name = ways[0].layout.name
            best[name] = one = _first_that_fits(problem, ways, kept[name], rest[name])
            runs += is_run
            if is_run and one.fits is True and one.time is not None:
                limit_s = min(limit_s, one.time.step_s)
    shown = 0
    for layout in unfit:
        wanted = _is_plain(layout) or problem.pins.strategy is not None or (not fitting and shown < SHOWN_UNFIT)
        if layout.name not in best and wanted:
            shown += not _is_plain(layout)
            best[layout.name] = cost_of(problem, smallest(problem, layout))
    return list(best.values())


def _screen_all(
    problem: SearchProblem, found: Sequence[Layout]
) -> tuple[list[tuple[Layout, list[Option]]], list[Layout]]:
    """Return the layouts that pass the lower bound with their options, and those that do not.

    Layouts are examined in the order of their rough times with unlimited memory; once `TIMED` of them are known to be
    better than that, the rest is skipped.
    """
    limit = None if problem.usable is None else problem.usable * LOWER_BOUND_SLACK
    small = [one for one in found if limit is None or min_bytes(problem.totals, one) <= limit]
    hopes = {id(one): _optimistic_step_time_s(problem, one) for one in small} if problem.timed else {}
    small.sort(key=lambda one: hopes.get(id(one), 0.0))
    fitting: list[tuple[Layout, list[Option]]] = []
    unfit = [one for one in found if limit is not None and min_bytes(problem.totals, one) > limit]
    best: list[float] = []
    for layout in small:
        if len(best) >= TIMED and hopes and best[TIMED - 1] <= hopes[id(layout)] and not _is_plain(layout):
            continue
        options = fitting_options(problem, layout)
        if options:
            fitting.append((layout, options))
            insort(best, options[0].rough_s)
        else:
            unfit.append(layout)
    if problem.timed:
        fitting.sort(key=lambda pair: pair[1][0].rough_s)
    return fitting, sorted(unfit, key=lambda one: complexity(one.strategy))


def _optimistic_step_time_s(problem: SearchProblem, layout: Layout) -> float:
    """Return an optimistic rough time: no option of the layout is faster."""
    recompute = recomputes(problem)[0]
    return min(rough_step_time_s(problem.totals, layout, micro, recompute) for micro in layout.micros)


def _least_recompute(options: Sequence[Option]) -> list[Option]:
    """Return a layout's options with the least recompute for their micro batch.

    The others are never faster, so the best is not among them unless it does not fit.
    """
    least: dict[tuple[int, GradientSync], int] = {}
    for option in options:
        key, mode = (option.micro, option.sync), RECOMPUTES.index(option.recompute)
        least[key] = min(mode, least.get(key, mode))
    return [one for one in options if least[one.micro, one.sync] == RECOMPUTES.index(one.recompute)]


def _timed(problem: SearchProblem, options: Sequence[Option]) -> list[Timed]:
    """Time options; without times, where speeds are unknown."""
    plans = [plan_for(problem, option.layout, option.micro, option.recompute, option.sync) for option in options]
    return [Timed(option, plan, time_of(problem, plan)) for option, plan in zip(options, plans, strict=True)]


def _in_order(ways: list[Timed]) -> list[Timed]:
    """Order the variants of one strategy: ties with the fastest by simplicity, others by time."""
    limit = min(way.step_s for way in ways) * (1 + TIE)
    return sorted(ways, key=lambda way: (0.0 if way.step_s <= limit else way.step_s, *_plainness(way.plan)))


def _rank_of(way: Timed) -> tuple[float, ...]:
    return way.step_s, *complexity(way.layout.strategy)


def _first_that_fits(
    problem: SearchProblem, ways: Sequence[Timed], kept: Sequence[Option], rest: Sequence[Option]
) -> Candidate:
    """Return the first that fits by the full estimate, else the best rough one, else the smallest.

    The gap between lower bound and estimate of one plan rules out others. The ``kept`` options that are not among
    ``ways`` are timed only where the best of these does not fit.
    """
    ratio, tries = 1.0, 0
    every = list(ways)

    def plans() -> Iterator[tuple[Plan, StepTime | None]]:
        yield ways[0].plan, ways[0].time
        known = {id(way.option): way for way in ways}
        slower = _timed(problem, [option for option in kept if id(option) not in known])
        known |= {id(way.option): way for way in slower}
        every[:] = _in_order([known[id(option)] for option in kept])
        yield from ((way.plan, way.time) for way in every[1:])
        yield from ((plan_for(problem, o.layout, o.micro, o.recompute, o.sync), None) for o in rest)

    for place, (plan, known) in enumerate(plans()):
        if tries >= TRIES:
            break
        screened = problem.costs.peak_lower_bound(problem.profile, plan, problem.workload)
        if place and problem.usable is not None and screened * ratio > problem.usable:
            continue
        memory = problem.costs.estimate(problem.profile, plan, problem.workload, problem.cluster)
        if fits(problem, memory) is not False:
            time = known or time_of(problem, plan)
            return _priced(problem, plan, memory, time)
        ratio, tries = max(ratio, memory.device_bytes / max(1, screened)), tries + 1
    return cost_of(problem, smallest(problem, every[-1].layout))


def smallest(problem: SearchProblem, layout: Layout) -> Plan:
    """Return a layout's plan with least memory: most recompute, extreme micro batch.

    The smallest micro batch, reduced after each, or the largest, which accumulates no gradients.
    """
    recompute = recomputes(problem)[-1]
    ends = sorted({layout.micros[0], layout.micros[-1]})
    plans = [
        plan_for(problem, layout, micro, recompute, sync)
        for micro in ends
        for sync in syncs(layout, problem.workload.program)
    ]
    return min(plans, key=lambda plan: problem.costs.peak_lower_bound(problem.profile, plan, problem.workload))


def _is_run(problem: SearchProblem, plan: Plan) -> bool:
    """Return whether this version runs a plan, or would with its own objective."""
    return not not_runnable(plan.model_copy(update={"objective": "lm"})) and not unrun_experts(problem.profile, plan)


def _least_s(ways: Sequence[Timed]) -> float:
    """Return the seconds of a strategy's fastest variant, with no block recomputed."""
    return min(way.step_s - (0.0 if way.time is None else way.time.recompute_s) for way in ways)


def _is_plain(layout: Layout) -> bool:
    strategy = layout.strategy
    return strategy.tp * strategy.pp * strategy.cp * strategy.ep == 1


def _plainness(plan: Plan) -> tuple[float, ...]:
    """Return the sort key within a strategy: less recompute, fewer micro batches, one reduction."""
    return RECOMPUTES.index(plan.recompute), plan.grad_accum, plan.gradient_sync == "every"


def _order(problem: SearchProblem, candidate: Candidate) -> tuple[float, ...]:
    """Return the sort key: fitting plans first, then time, or simplicity without times."""
    verdict = {True: 0, None: 1, False: 2}[candidate.fits]
    simple = complexity(candidate.plan.parsed)
    if candidate.fits is False:
        return (verdict, candidate.memory.device_bytes)
    step_s = (float("inf") if problem.timed else 0.0) if candidate.time is None else candidate.time.step_s
    return (verdict, step_s, *simple, *_plainness(candidate.plan))


def rank(problem: SearchProblem, candidates: Sequence[Candidate]) -> tuple[list[Candidate], int | None]:
    """Return all candidates in order, and the index of the recommended one."""
    ordered = sorted(candidates, key=lambda candidate: _order(problem, candidate))
    eligible = [c for c in ordered if _eligible(problem, c)]
    if not problem.any_plan:
        eligible = [c for c in eligible if c.runnable] or [c for c in eligible if c.other_run] or eligible
    if not eligible:
        return ordered, None
    best = eligible[0]
    if best.time is not None:
        close = [c for c in eligible if c.fits == best.fits and _is_close(c, best.time.step_s)]
        best = min(close, key=lambda c: _simplicity(c.plan))
    ordered.remove(best)
    return [best, *ordered], 0


def _simplicity(plan: Plan) -> tuple[float, ...]:
    """Return the sort key of plans within a tie: blocks fitted to the memory make up for no less sharding."""
    axes, swaps, foreign, *rest = complexity(plan.parsed)
    return (axes, swaps, foreign, plan.recompute_layers is not None, *rest, *_plainness(plan))


def _is_close(candidate: Candidate, fastest_s: float) -> bool:
    return candidate.time is not None and candidate.time.step_s <= fastest_s * (1 + tie_of(candidate.plan))


def _eligible(problem: SearchProblem, candidate: Candidate) -> bool:
    if candidate.fits is None and candidate.memory.unknown and problem.usable is not None:
        share = USABLE_IF_UNKNOWN / USABLE[problem.cluster.device]
        return candidate.memory.device_bytes <= problem.usable * share
    return candidate.fits is not False


def simplest_fit(problem: SearchProblem, below: tuple[int, ...] | None = None) -> Candidate | None:
    """Return the simplest plan that fits at all, in its smallest form; for advice only.

    Only one of a `complexity` ``below`` the given one is wanted. Plans that do not fit show by how much the lower bound
    is low at least, which rules out others; most of all those of the same strategy with other degrees.

    Raises:
        PlanError: there is no layout.
    """
    plain, ratio, alike = replace(problem, timed=False), 0.0, dict[str, float]()
    found = [one for one in _kept_layouts(problem)[0] if below is None or complexity(one.strategy) < below]
    for layout in found if problem.any_plan else sorted(found, key=lambda one: bool(one.strategy.not_runnable)):
        if problem.usable is not None and min_bytes(problem.totals, layout) > problem.usable:
            continue
        if option_problem(problem.pins, layout, lambda one: _first_plan(problem, one)):
            continue
        plan = smallest(plain, layout)
        if problem.usable is not None:
            screened = problem.costs.peak_lower_bound(problem.profile, plan, problem.workload)
            least = max(ratio, ALIKE * alike.get(layout.name, 0.0))
            if screened > problem.usable * LOWER_BOUND_SLACK or screened * least > problem.usable:
                continue
        candidate = cost_of(plain, plan)
        if candidate.fits is not False:
            return candidate
        if problem.usable is not None:
            low = candidate.memory.device_bytes / max(1, screened)
            ratio = min(ratio, low) if ratio else low
            alike[layout.name] = min(low, alike.get(layout.name, low))
    return None
