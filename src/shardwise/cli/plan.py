"""Verb ``shardwise plan``: read the request, search, print the answer.

The exit code is 1 if nothing fits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwise.cli.arguments import Calibration, Json
from shardwise.cli.plan_config import profile_of_model
from shardwise.cli.plan_lists import print_list
from shardwise.cli.plan_options import read_request, with_plan_options
from shardwise.cli.plan_other import answer_other, is_other, with_other_options
from shardwise.cli.plan_question import write_plan_file
from shardwise.errors import DoesNotFit, UserError
from shardwise.report.candidates import print_candidates, print_recommendation
from shardwise.run.calibration import corrected_costs
from shardwise.search.plan_request import PlanRequest, search_request
from shardwise.search.problem import ask

PIPED = 132


@with_plan_options
@with_other_options
def run_plan(
    words: Mapping[str, Any],
    other: Mapping[str, Any],
    price: Annotated[Path | None, typer.Option(help="TOML file of prices in $/h, such as A100-80GB = 1.89.")] = None,
    calibration: Calibration = None,
    prove: Annotated[bool, typer.Option("--prove", help="Dry run of the plan under fake tensors.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File for the recommended plan.")] = None,
    listed: Annotated[
        str | None, typer.Option("--list", metavar="models|gpus", help="Print the names that are known, and exit.")
    ] = None,
    target: Annotated[str | None, typer.Option("--for", help="Print the plan that a tool runs, and its file.")] = None,
    as_json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json and exit.")] = False,
) -> None:
    """Run ``shardwise plan``.

    Raises:
        UserError: every invalid argument.
        DoesNotFit: nothing fits, or the pinned plan does not.
    """
    if schema:
        from shardwise.report.plan_json import json_schema

        print(json_schema())
        return
    if listed is not None:
        print_list(listed, answer_console(as_json))
        return
    if words["model"] is None:
        raise UserError("shardwise plan needs a model, such as: shardwise plan llama-3.1-8b --cluster 8xA100-80GB")
    console = answer_console(as_json)
    if is_other(words, other):
        one_plan = {"prove": prove, "output": output, "target": target, "calibration": calibration}
        answer_other(words, other, one_plan, price, console, as_json=as_json)
        return
    if target is not None:  # what writes the files of other tools is not loaded for other plans
        from shardwise.cli.plan_for import check_target

        check_target(target, str(words["model"]), as_json=as_json)
    request, profile, prices, notes = read_request(dict(words), price=price, calibration=calibration, output=output)
    for line in notes:
        console.print(line, markup=False)
    pins, costs = request.pins, corrected_costs(request.cluster, request.calibration)
    result = search_request(request, profile, costs=costs, profile_of=profile_of_model)
    if result.optimizer is not None:
        request = request.model_copy(update={"optimizer": result.optimizer})
    if pins.strategy is not None and pins.strategy.adapter != "none":
        profile = ask(profile, request.workload, request.cluster, pins).profile
    print_candidates(profile, request.cluster, result, console)
    print_recommendation(profile, request.cluster, result, prices, console)
    best = result.candidates[result.recommended or 0]
    if target is not None and result.recommended is not None:
        from shardwise.cli.plan_for import print_for

        best = print_for(target, request, result, console)
    proof = None
    if prove:
        from shardwise.cli.prove import prove_candidate

        proof = prove_candidate(request.model, request, best, console)
    if as_json:
        from shardwise.report.plan_json import document

        answer = document(profile, request.cluster, request.workload, result, proof, notes=notes, prices=prices)
        print(answer.model_dump_json(by_alias=True))
    if output is not None:
        _write(output, best.plan.to_toml(), request, result.recommended is not None, console)
    if result.recommended is None:
        raise DoesNotFit(_verdict(request))


def _write(output: Path, plan: str, request: PlanRequest, fits: bool, console: Console) -> None:
    if not fits and request.strategy is None:
        console.print(f"-o {output}: not written, because nothing fits", markup=False)
        return
    write_plan_file(output, plan, request)
    console.print(f"plan: {output} (shardwise explain {output})", markup=False)


def answer_console(as_json: bool) -> Console:
    """Create a console with the terminal's width; in a file or a pipe, without truncation."""
    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() else PIPED
    return Console(stderr=as_json, highlight=False, soft_wrap=width is not None, width=width)


def _verdict(request: PlanRequest) -> str:
    what = f"the pinned {request.strategy} does not fit" if request.strategy else "no plan fits"
    return f"{what} {request.cluster.world_size} × {request.cluster.device_name}; what would fit stands above"
