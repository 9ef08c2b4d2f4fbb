"""Ways to run a plan that save memory: the loss in chunks, and where nothing fits the optimizer in the backward.

Neither changes what is trained. Where not even they fit, optimizers with less state than AdamW are tried, whose updates
differ; the result names them. Options that were pinned are left as they are; a pinned strategy gets only the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.search.explain_plan import with_reasons
from shardwise.search.problem import TIE, SearchProblem
from shardwise.search.search import rank, search

CHUNKS = 8  # of the loss

Order = tuple[str, dict[str, object], dict[str, str | None]]  # name, options of the plan, options of the command


def orders(problem: SearchProblem) -> Iterator[Order]:
    """Yield chunked loss, optimizer in backward, and both."""
    given, found = problem.pins.options, list[Order]()
    of_text = problem.workload.objective == "lm"  # trainers of pairs have no loss in chunks
    if of_text and problem.profile.vocab_size and not problem.workload.fused_loss and "loss_chunks" not in given:
        found.append((f"the loss in {CHUNKS} chunks", {"loss_chunks": CHUNKS}, {"--loss-chunks": str(CHUNKS)}))
    if not given.get("optimizer_in_backward"):
        early: dict[str, object] = {"optimizer_in_backward": True}
        found.append(("the optimizer in the backward", early, {"--optimizer-in-backward": None}))
    yield from found
    if len(found) == 2:
        first, second = found
        yield f"{first[0]} and {second[0]}", {**first[1], **second[1]}, {**first[2], **second[2]}


def lean_workloads(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the proposed optimizers with less state than AdamW, where AdamW is asked for."""
    is_adamw = workload.optimizer == "adamw" and workload.optimizer_states == OPTIMIZERS["adamw"].states
    for name, spec in OPTIMIZERS.items() if is_adamw else ():
        if spec.proposed:
            lean = {"optimizer": name, "optimizer_states": spec.states, "optimizer_temporaries": spec.temporaries[0]}
            yield name, workload.model_copy(update=lean)


def saving_memory(problem: SearchProblem, found: SearchResult) -> SearchResult:
    """Return ``found`` with these ways: chunks where they fit or are faster, the others where nothing fits."""
    best = None if found.recommended is None else found.candidates[found.recommended]
    is_roomy = best is not None and best.plan.recompute == "none" and not best.plan.parsed.offload
    is_roomy = is_roomy and best is not None and (best.other_run or problem.any_plan)
    if is_roomy:
        return found
    ways = list(orders(problem))
    if ways and "loss_chunks" in ways[0][1] and (other := _search(problem, ways[0][1], problem.workload)):
        found = _merged(problem, found, other)
    if found.recommended is not None or problem.pins.strategy is not None:
        return found
    for name, workload in (("", problem.workload), *lean_workloads(problem.workload)):
        for _, options, _ in (*([("", {}, {})] if name else []), *ways):
            other = _search(problem, options, workload)
            if other is not None and other.recommended is not None:
                return other.model_copy(update={"optimizer": name or None})
    return found


def _search(problem: SearchProblem, options: dict[str, Any], workload: Workload) -> SearchResult | None:
    pins = problem.pins.model_copy(update={"options": {**problem.pins.options, **options}})
    try:
        return search(
            problem.profile,
            workload,
            problem.cluster,
            pins,
            costs=problem.costs,
            only_runnable=problem.only_runnable,
            any_plan=problem.any_plan,
        )
    except PlanError:
        return None


def _merged(problem: SearchProblem, found: SearchResult, other: SearchResult) -> SearchResult:
    """Take the better candidate of each strategy, and rank them anew."""
    again = {candidate.plan.strategy: candidate for candidate in other.candidates}
    both = [_better(candidate, again.pop(candidate.plan.strategy, None)) for candidate in found.candidates]
    ranked, chosen = rank(problem, [*both, *(one for one in again.values() if one.fits)])
    considered = found.considered + other.considered
    explained = with_reasons(problem, ranked, chosen, considered)
    return found.model_copy(update={"candidates": tuple(explained), "recommended": chosen, "considered": considered})


def _better(plain: Candidate, chunked: Candidate | None) -> Candidate:
    if chunked is None or chunked.fits is False:
        return plain
    if plain.fits is False:
        return chunked
    if plain.time is None or chunked.time is None or chunked.fits != plain.fits:
        return plain
    return chunked if chunked.time.step_s < plain.time.step_s * (1 - TIE) else plain
