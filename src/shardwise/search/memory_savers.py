"""Ways to run a plan that save memory: the loss in chunks, and where nothing fits the optimizer in the backward.

Neither changes what is trained. Where not even they fit, optimizers with less state than AdamW are tried, whose updates
differ; the result names them. A pinned strategy, and options that were pinned, are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.workload import Workload
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.search.explain_plan import with_reasons
from shardwise.search.problem import Question
from shardwise.search.search import TIE, rank, search

CHUNKS = 8  # of the loss

Order = tuple[str, dict[str, object], dict[str, str | None]]  # name, options of the plan, options of the command


def orders(question: Question) -> Iterator[Order]:
    """Yield chunked loss, optimizer in backward, and both."""
    given, found = question.pins.options, list[Order]()
    if question.profile.vocab_size and not question.workload.fused_loss and given.get("loss_chunks", 1) == 1:
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


def saving_memory(question: Question, found: SearchResult) -> SearchResult:
    """Return ``found`` with these ways: chunks where they fit or are faster, the others where nothing fits."""
    best = None if found.recommended is None else found.candidates[found.recommended]
    is_roomy = best is not None and best.plan.recompute == "none" and not best.plan.parsed.offload
    if question.pins.strategy is not None or is_roomy:
        return found
    ways = list(orders(question))
    if ways and "loss_chunks" in ways[0][1] and (other := _search(question, ways[0][1], question.workload)):
        found = _merged(question, found, other)
    if found.recommended is not None:
        return found
    for name, workload in (("", question.workload), *lean_workloads(question.workload)):
        for _, options, _ in (*([("", {}, {})] if name else []), *ways):
            other = _search(question, options, workload)
            if other is not None and other.recommended is not None:
                return other.model_copy(update={"optimizer": name or None})
    return found


def _search(question: Question, options: dict[str, Any], workload: Workload) -> SearchResult | None:
    pins = question.pins.model_copy(update={"options": {**question.pins.options, **options}})
    try:
        return search(
            question.profile,
            workload,
            question.cluster,
            pins,
            costs=question.costs,
            only_runnable=question.only_runnable,
            any_plan=question.any_plan,
        )
    except PlanError:
        return None


def _merged(question: Question, found: SearchResult, other: SearchResult) -> SearchResult:
    """Take the better candidate of each strategy, and rank them anew."""
    again = {candidate.plan.strategy: candidate for candidate in other.candidates}
    both = [_better(candidate, again.pop(candidate.plan.strategy, None)) for candidate in found.candidates]
    ranked, chosen = rank(question, [*both, *(one for one in again.values() if one.fits)])
    considered = found.considered + other.considered
    explained = with_reasons(question, ranked, chosen, considered)
    return found.model_copy(update={"candidates": tuple(explained), "recommended": chosen, "considered": considered})


def _better(plain: Candidate, chunked: Candidate | None) -> Candidate:
    if chunked is None or chunked.fits is False:
        return plain
    if plain.fits is False:
        return chunked
    if plain.time is None or chunked.time is None or chunked.fits != plain.fits:
        return plain
    return chunked if chunked.time.step_s < plain.time.step_s * (1 - TIE) else plain
