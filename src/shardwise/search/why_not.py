"""Estimate another strategy for the same request, and explain why it is not chosen."""

from __future__ import annotations

from shardwise.errors import PlanError
from shardwise.plan.strategy import Strategy
from shardwise.search.candidate import Candidate
from shardwise.search.enumerate import layouts, misfits
from shardwise.search.explain_plan import against
from shardwise.search.problem import Question
from shardwise.search.search import search


def why_not(question: Question, strategy: Strategy, best: Candidate) -> tuple[Candidate | None, list[str]]:
    """Estimate ``strategy`` and explain why it is not ``best``; the candidate may be None.

    It is None if the strategy is invalid.
    """
    if strategy == best.plan.parsed:
        unfit = f"; it {against(question, best, best)}" if best.fits is False else ""
        return best, [f"{strategy} is the plan{unfit}"]
    pins = question.pins.model_copy(update={"strategy": strategy, "dp_replicate": None, "dp_shard": None})
    problems = misfits(strategy, question.profile, question.workload, question.cluster)
    if problems:
        return None, [f"{strategy} cannot be: {problem}" for problem in problems]
    try:
        layouts(question.profile, question.workload, question.cluster, pins)
    except PlanError as error:
        return None, [f"{strategy} cannot be: {problem}" for problem in error.problems]
    found = search(question.profile, question.workload, question.cluster, pins, costs=question.costs)
    candidate = found.candidates[0]
    return candidate, [f"not {strategy}: {against(question, candidate, best)}"]
