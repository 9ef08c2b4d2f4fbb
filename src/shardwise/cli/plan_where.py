"""``shardwise plan --where`` and several ``--cluster``: one question, asked of many clusters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.cli.plan_config import profile_of_model
from shardwise.cli.plan_options import read_request
from shardwise.cost.price_catalogue import read_catalogue
from shardwise.errors import DoesNotFit, PlanError, UserError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.report.plan_json import document
from shardwise.report.where_report import (
    ComparedDocument,
    compared_notes,
    print_compared,
    print_offers,
    where_document,
    where_notes,
)
from shardwise.run.calibration import corrected_costs
from shardwise.search.candidate import Candidate, SearchResult
from shardwise.search.memory_savers import saving_memory
from shardwise.search.plan_request import is_config, search_request, tried
from shardwise.search.problem import ask
from shardwise.search.search import search
from shardwise.search.where import SpotRuns, offers_at, owned_places, places_of

USUAL_BATCH = 64
USUAL_TOKENS = 1e9
ANY_CLUSTER = "8xH100-SXM"  # whose words are checked; each place is planned for itself
_HOURS = {"": 1.0, "h": 1.0, "m": 1 / 60, "d": 24.0}


def run_where(
    words: Mapping[str, Any], ranking: Mapping[str, Any], price: Path | None, console: Console, *, as_json: bool
) -> None:
    """Rank the clusters of a price catalogue, and bought ones of ``--price``.

    Raises:
        UserError: every invalid option, or what no cluster can be planned with.
        DoesNotFit: no offer does what was asked.
    """
    problems = list[str]()
    hours = tried(problems, lambda: _hours(ranking["deadline"]))
    catalogue = tried(problems, lambda: read_catalogue(ranking["prices"]))
    given, notes = dict(words) | {"cluster": [ANY_CLUSTER]}, list[str]()
    if given["global_batch"] is None:
        given["global_batch"] = USUAL_BATCH
        notes.append(f"--global-batch was not given: {USUAL_BATCH} samples a step, on every cluster")
    if given["tokens"] is None:
        given["tokens"] = f"{USUAL_TOKENS:g}"
        notes.append("--tokens was not given: costs and hours are those of a billion tokens")
    found = tried(problems, lambda: read_request(given, price=price, calibration=None, output=None))
    if problems or found is None or catalogue is None:
        raise UserError(*dict.fromkeys(problems))
    request, profile, prices, more = found
    notes += [note for note in more if not note.startswith("--precision")]

    refused = list[Sequence[str]]()
    planned = 0

    def plan(cluster: ClusterSpec) -> SearchResult:
        nonlocal planned
        try:
            facts: Any = {"costs": corrected_costs(cluster), "any_plan": request.any_plan}
            found = search(profile, request.workload, cluster, request.pins, **facts)
            problem = ask(profile, request.workload, cluster, request.pins, **facts)
        except PlanError as error:
            refused.append(error.problems)
            return SearchResult(candidates=(), recommended=None, considered=0)
        planned += 1
        saved = found if is_config(request.model) else saving_memory(problem, found)
        return saved if saved.optimizer is None else found  # another optimizer is another training

    runs = SpotRuns(prices.interruptions_per_day, prices.save_minutes, prices.restart_minutes)
    places = [*places_of(catalogue), *owned_places(prices)]
    offers = offers_at(places, plan, runs, deadline_hours=hours, budget=ranking["budget"])
    if refused and not planned:
        raise PlanError(*_of_all(refused))
    for note in notes:
        console.print(note, markup=False)
    about = where_notes(catalogue.source, runs, catalogue.unknown, nodes=any(p.cluster.nodes > 1 for p in places))
    print_offers(offers, about, console)
    if as_json:
        answer = where_document(profile.name, request.tokens or 0.0, catalogue.source, offers, [*notes, *about])
        print(answer.model_dump_json(by_alias=True))
    if not offers or offers[0].why_not:
        raise DoesNotFit("no offer does what was asked; the table has the nearest, with the reason")


def run_compare(
    words: Mapping[str, Any], clusters: Sequence[str], price: Path | None, console: Console, *, as_json: bool
) -> None:
    """Plan each of several clusters, and print the best plans side by side.

    Raises:
        UserError: every invalid option, of any cluster.
        DoesNotFit: nothing fits any of them.
    """
    problems = list[str]()
    given = dict(words)
    if given["global_batch"] is None:
        given["global_batch"] = USUAL_BATCH
        console.print(f"--global-batch was not given: {USUAL_BATCH} samples a step, on every cluster", markup=False)
    asked = []
    for text in clusters:
        read = partial(read_request, given | {"cluster": [text]}, price=price, calibration=None, output=None)
        asked.append(tried(problems, read))
    if problems:
        raise UserError(*dict.fromkeys(problems))
    best: list[Candidate | None] = []
    documents = []
    requests = [one[0] for one in filter(None, asked)]
    for request, profile, prices, notes in filter(None, asked):
        costs = corrected_costs(request.cluster)
        result = search_request(request, profile, costs=costs, profile_of=profile_of_model)
        best.append(None if result.recommended is None else result.candidates[result.recommended])
        documents.append(document(profile, request.cluster, request.workload, result, notes=notes, prices=prices))
    known = all(request.tokens is not None or request.seq_len is None for request in requests)
    footer = compared_notes(clusters, [request.cluster for request in requests], best, tokens=known)
    print_compared(clusters, best, footer, console)
    if as_json:
        print(ComparedDocument(clusters=documents).model_dump_json(by_alias=True))
    if not any(best):
        raise DoesNotFit(f"nothing fits {' or '.join(clusters)}")


def _of_all(refused: Sequence[Sequence[str]]) -> list[str]:
    """Return what is wrong on every cluster; where there is no such thing, what is wrong on most comes first."""
    times = Counter(text for problems in refused for text in problems)
    return [text for text in times if times[text] == len(refused)] or [text for text, _ in times.most_common()]


def _hours(text: str | None) -> float | None:
    """Read ``48h``, ``2d`` or ``90m``."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([hmd]?)", text.strip().lower())
    hours = float(found[1]) * _HOURS[found[2]] if found else 0.0
    if not hours:
        raise UserError(f"--deadline '{text}' must be a time above 0, such as 48h, 2d or 90m")
    return hours
