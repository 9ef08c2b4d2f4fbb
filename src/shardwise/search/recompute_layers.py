"""Recompute as few blocks as memory allows, where a plan recomputes at all.

A plan's memory falls with each more block that is recomputed, and its time rises, so the fewest are found by bisection:
first by the lower bound, which takes microseconds, then by the full estimate from there on. Smaller micro batches leave
room for blocks that are not recomputed, so a few of them are tried, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardwise.plan.plan import Plan
from shardwise.plan.stage_balance import longest_stage
from shardwise.search.candidate import Candidate
from shardwise.search.problem import SAID_TIE, SearchProblem

SPLITS = (1, 2, 4, 8)  # parts of the candidate's micro batch that are tried
VERIFIED = 1  # of them, those that get a full estimate
# Of the usable memory. Other plans are near the limit by chance; a number of blocks that is fitted to it always is, and
# the estimate has an error of 3.8 % in the median of published rows.
ROOM = 0.95
GAIN = 0.01  # of the step's time, for which all blocks but some few are not worth a number to keep

CostOf = Callable[[SearchProblem, Plan], Candidate]
TimeOf = Callable[[SearchProblem, Plan], float]


def with_fewest_layers(
    problem: SearchProblem, candidates: Sequence[Candidate], cost_of: CostOf, time_of: TimeOf
) -> list[Candidate]:
    """Return the candidates; those that could then be the fastest recompute as few blocks as fit, if that is faster.

    The fastest of all, or of those that this version runs where only these are recommended. A pinned recompute is kept,
    and so are the plans of other programs, which may not be able to recompute some blocks.
    """
    times = [(one, one.time) for one in candidates if one.fits is True and one.time is not None]
    fastest = min((time.step_s for _, time in times), default=0.0)
    run = [time.step_s for one, time in times if one.other_run and not problem.any_plan]
    fastest_run = min(run, default=fastest)
    hopeful = {
        id(one)
        for one, time in times
        if time.step_s - time.recompute_s <= (fastest_run if one.other_run else fastest) * (1 + SAID_TIE)
    }
    return [_fewer(problem, one, cost_of, time_of) if id(one) in hopeful else one for one in candidates]


def _fewer(problem: SearchProblem, candidate: Candidate, cost_of: CostOf, time_of: TimeOf) -> Candidate:
    plan, pins = candidate.plan, problem.pins
    free = pins.recompute is None and "recompute_layers" not in pins.options and problem.workload.program.is_own
    if not free or plan.recompute == "none" or candidate.time is None or problem.usable is None:
        return candidate
    best, seconds = candidate, candidate.time.step_s * (1 - GAIN)
    for _, split in sorted(_guesses(problem, plan, time_of), key=lambda pair: pair[0])[:VERIFIED]:
        found = _fewest(problem, split, cost_of, time_of, under_s=seconds)
        if found is not None and found.time is not None and found.time.step_s < seconds:
            best, seconds = found, found.time.step_s
    return best


def _guesses(problem: SearchProblem, plan: Plan, time_of: TimeOf) -> Iterator[tuple[float, Plan]]:
    """Yield plans with the fewest blocks that pass the lower bound, and their seconds."""
    micro, longest = plan.micro_batch or 1, longest_stage(plan, problem.profile.num_blocks)
    for parts in (n for n in SPLITS if micro % n == 0 and (n == 1 or problem.pins.micro_batch is None)):
        split = {"micro_batch": micro // parts, "grad_accum": plan.grad_accum * parts, "recompute": "full"}
        low, high = 0, longest  # with none it does not fit, or that would be the candidate
        while low < high:
            middle = (low + high) // 2
            if _screened(problem, plan.model_copy(update={**split, "recompute_layers": middle or 1})):
                high = middle
            else:
                low = middle + 1
        if low < longest:
            found = plan.model_copy(update={**split, "recompute_layers": max(1, low)})
            yield time_of(problem, found), found


def _screened(problem: SearchProblem, plan: Plan) -> bool:
    return problem.costs.peak_lower_bound(problem.profile, plan, problem.workload) <= (problem.usable or 0) * ROOM


def _fewest(
    problem: SearchProblem, plan: Plan, cost_of: CostOf, time_of: TimeOf, *, under_s: float
) -> Candidate | None:
    """Return the plan with the fewest blocks that fits, from those of ``plan`` on; None where it is not faster."""
    low, high, found = plan.recompute_layers or 1, longest_stage(plan, problem.profile.num_blocks), None
    while low < high:
        middle = (low + high) // 2 if found is not None or low + 1 >= high else (low * 2 + high) // 3
        one = plan.model_copy(update={"recompute_layers": middle})
        if time_of(problem, one) >= under_s:
            high = middle
            continue
        tried = cost_of(problem, one)
        if tried.fits is True and tried.memory.device_bytes <= (problem.usable or 0) * ROOM:
            found, high = tried, middle
        else:
            low = middle + 1
    return found
