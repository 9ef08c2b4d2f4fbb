"""Verb ``shardwise export``: a plan, and the config that it trains, as the file of another tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.arguments import Json
from shardwise.cli.written_file import write_file
from shardwise.errors import AnswerIsNo, UserError, did_you_mean
from shardwise.interop.exported import Exported
from shardwise.interop.targets import TARGETS, export_to
from shardwise.plan.plan import Plan, read_plan

CLIP_NORM = 1.0


def run_export(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE.KEY=VALUE", help="Overrides of --config.", show_default=False)
    ] = None,
    *,
    to: Annotated[str, typer.Option(help=f"Target: {', '.join(TARGETS)}.")],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Config of shardwise train: model, data, optimizer, length.")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Maximum gradient norm, without --config; 0 disables clipping.", min=0)
    ] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Write the file, also where it lacks something.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Output file; default: stdout.")] = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise export``.

    Without ``output`` and ``as_json`` stdout is the file and nothing else.

    Raises:
        UserError: there is no such target, the file has no plan or one without an equivalent there, or the output
            cannot be written.
        AnswerIsNo: the target cannot express all of it, and ``lossy`` is not set.
    """
    problems = [] if to in TARGETS else [f"--to '{to}' is not a target{did_you_mean(to, TARGETS)}; {_known()}"]
    if config_file is not None and clip_norm is not None:
        problems.append(f"--clip-norm {clip_norm:g} and --config both say the largest norm; leave --clip-norm out")
    if overrides and config_file is None:
        problems.append(f"override '{overrides[0]}' is of a config, and there is none; add --config")
    try:
        plan = read_plan(plan_file)
        if problems:
            raise UserError
        found = _exported(plan, to, config_file, overrides or [], clip_norm, output)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    stream = sys.stdout if output is not None and not as_json else sys.stderr
    print(f"plan: {plan.strategy} on {plan.dims}, {plan.precision}, {plan.batch_equation()}", file=stream)
    for kind, lines in (("note", found.notes), ("lost", found.lost)):
        for line in lines:
            print(f"{kind}: {line}", file=stream)
    if found.lost and not lossy:
        number = f"{len(found.lost)} line{'s' if len(found.lost) > 1 else ''} marked 'lost'"
        raise AnswerIsNo(
            f"{to} cannot express all of this ({number} above), so nothing was written; accept with --lossy"
        )
    if output is not None:
        write_file(output, found.text)
        if found.beside is not None:
            found.beside(output.parent)
        print(f"{to}: {output}", file=stream)
    if as_json:
        answer = {"schema": 1, "target": to, "fingerprint": plan.fingerprint, "notes": found.notes, "lost": found.lost}
        file = {"config": found.document} if found.document is not None else {"text": found.text}
        where = {"ranks": plan.dims.world_size, "output": None if output is None else str(output)}
        print(json.dumps({**answer, **file, **where}))
    elif output is None:
        print(found.text, end="")


def _known() -> str:
    return f"targets are {', '.join(TARGETS)}"


def _exported(
    plan: Plan,
    to: str,
    config_file: Path | None,
    overrides: Sequence[str],
    clip_norm: float | None,
    output: Path | None,
) -> Exported:
    from shardwise.hardware.cluster import detect
    from shardwise.run.checks import check_plan
    from shardwise.run.job import completed
    from shardwise.train.config import read_config

    config = None
    if config_file is not None:
        config = read_config(config_file, overrides, planned=plan.strategy)
        cluster = detect("cpu", plan.dims.world_size).model_copy(update={"device": plan.device})
        check_plan(config, cluster, plan)
        plan = completed(plan, config)
    limit = CLIP_NORM if clip_norm is None else clip_norm
    found = export_to(to, plan, config, limit or None, output)
    if config is None and TARGETS[to].clips:
        clip = "no clipping" if not limit else f"gradients are clipped to {limit:g}"
        found.notes.insert(0, f"{clip}, which a plan does not say; --clip-norm sets it")
    return found
