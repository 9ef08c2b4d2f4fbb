"""Verb ``shardwise explain``: repeat a plan file's search, and show a plan's arithmetic.

The plan is the file's, or another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.arguments import Calibration, Json, PlanFile
from shardwise.cli.plan import answer_console
from shardwise.cli.plan_config import profile_of_model
from shardwise.cli.plan_question import read_question
from shardwise.errors import PlanError, UserError
from shardwise.plan.plan import Plan, read_plan
from shardwise.plan.strategy import Strategy, parse_strategy
from shardwise.report.candidates import print_explanation, print_facts
from shardwise.run.calibration import corrected_costs, read_links
from shardwise.search.axis_reasons import purposes
from shardwise.search.candidate import Candidate
from shardwise.search.cost_inputs_of_plan import with_plan
from shardwise.search.enumerate import layouts, misfits
from shardwise.search.explain_plan import against
from shardwise.search.option_values import LOSSES, choice_problems
from shardwise.search.plan_request import PlanRequest
from shardwise.search.problem import SearchProblem, ask
from shardwise.search.search import cost_of, search


def run_explain(
    plan_file: PlanFile,
    not_this: Annotated[
        str | None, typer.Option("--why-not", help="Strategy to compare with, such as fsdp+tp2.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="plain or fused; default: the plan's.")] = None,
    calibration: Calibration = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise explain``. Without ``calibration`` the links are the plan's.

    Raises:
        UserError: the file is not a plan, has no question or one that does not belong to the plan, or the strategy, the
            loss or the calibration cannot be read.
    """
    other, request, plan = _read(plan_file, not_this, loss)
    console = answer_console(as_json)
    if calibration is not None:
        links, notes = read_links(calibration, request.cluster)
        request = request.model_copy(update={"calibration": links})
        for line in notes:
            console.print(line, markup=False)
    profile = profile_of_model(request.model, seq_len=request.seq_len, compiled=request.fuses)
    pins = request.pins.model_copy(update={"precision": plan.precision})
    costs = corrected_costs(request.cluster, request.calibration)
    pinned = pins.model_copy(update={"strategy": plan.parsed})
    problem = ask(profile, with_plan(request.workload, plan), request.cluster, pinned, costs=costs)
    best = cost_of(problem, plan)
    print_facts(problem.profile, request.cluster, console)
    print_explanation(problem.profile, request.cluster, best, console, problem.workload)
    free = pins.model_copy(update={"strategy": None})
    if plan.dims.splits_model or plan.dims.ep > 1:
        others = search(profile, request.workload, request.cluster, free, costs=costs).candidates
        for line in purposes(problem, best, others):
            console.print(f"why: {line}", markup=False)
    found: Candidate | None = None
    lines: list[str] = []
    if other is not None:
        found, lines = why_not(ask(profile, request.workload, request.cluster, free, costs=costs), other, best)
        console.print()
        for line in lines:
            console.print(line, markup=False)
        if found is not None and found is not best:
            print_explanation(profile, request.cluster, found, console, request.workload)
    if as_json:
        print(_json(problem, best, found, lines))


def _read(plan_file: Path, not_this: str | None, loss: str | None) -> tuple[Strategy | None, PlanRequest, Plan]:
    problems: list[str] = []
    other = None
    try:
        other = None if not_this is None else parse_strategy(not_this)
    except PlanError as error:
        problems += [f"--why-not: {text}" for text in error.problems]
    problems += choice_problems([("--loss", loss, LOSSES)])
    try:
        plan = read_plan(plan_file)
        request = read_question(plan_file, plan)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    if problems:
        raise UserError(*problems)
    return other, request if loss is None else request.model_copy(update={"fused_loss": loss == "fused"}), plan


def _json(problem: SearchProblem, best: Candidate, other: Candidate | None, lines: list[str]) -> str:
    import json

    def entry(candidate: Candidate) -> dict[str, object]:
        plan: Plan = candidate.plan
        return {
            "plan": plan.model_dump(mode="json", by_alias=True),
            "fits": candidate.fits,
            "memory": candidate.memory.model_dump(mode="json"),
            "time": candidate.time.model_dump(mode="json") if candidate.time else None,
        }

    document: dict[str, object] = {"schema": 1, "chosen": entry(best)}
    if other is not None:
        reason = "" if other is best else against(problem, other, best)
        document["other"] = {**entry(other), "reason": reason}
    return json.dumps({**document, "why_not": lines})


def why_not(problem: SearchProblem, strategy: Strategy, best: Candidate) -> tuple[Candidate | None, list[str]]:
    """Estimate ``strategy`` and explain why it is not ``best``; the candidate may be None.

    It is None if the strategy is invalid.
    """
    if strategy == best.plan.parsed:
        unfit = f"; it {against(problem, best, best)}" if best.fits is False else ""
        return best, [f"{strategy} is the plan{unfit}"]
    pins = problem.pins.model_copy(update={"strategy": strategy, "dp_replicate": None, "dp_shard": None})
    problems = misfits(strategy, problem.profile, problem.workload, problem.cluster, problem.pins)
    if problems:
        return None, [f"{strategy} cannot be: {text}" for text in problems]
    try:
        layouts(problem.profile, problem.workload, problem.cluster, pins)
    except PlanError as error:
        return None, [f"{strategy} cannot be: {text}" for text in error.problems]
    found = search(problem.profile, problem.workload, problem.cluster, pins, costs=problem.costs)
    candidate = found.candidates[0]
    return candidate, [f"not {strategy}: {against(problem, candidate, best)}"]
