"""Verb ``shardwise import``: another tool's configuration as a plan and keys of a config."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from shardwise.cli.arguments import Json
from shardwise.cli.written_file import write_file
from shardwise.errors import PlanError, UserError
from shardwise.interop.deepspeed.import_config import Imported, import_deepspeed
from shardwise.interop.deepspeed.optimizer_section import FileKey
from shardwise.interop.files.import_file import FORMATS, config_document, format_of, import_file, read_file
from shardwise.plan.plan import Plan, Recompute
from shardwise.plan.strategy import Engine
from shardwise.search.option_values import choice_problems
from shardwise.search.plan_request import find_cluster

TOOLS = ("deepspeed", *FORMATS)


def run_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration of a trainer.", show_default=False)],
    tool: Annotated[str | None, typer.Option(help=f"Whose file it is: {', '.join(TOOLS)}; found if left out.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks; default: from the file's batch keys.", min=1)] = None,
    cluster: Annotated[str | None, typer.Option(help="Instead of --nproc: 8xA100-80GB, 2xcpu, or a TOML file.")] = None,
    engine: Annotated[str | None, typer.Option(help="deepspeed, or torch for the equivalent PyTorch strategy.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sample.", min=1, max=2**27)] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full (not in the file).")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File for the plan.")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="File for the config of train.")] = None,
    as_json: Json = False,
) -> None:
    """Run ``shardwise import``.

    Raises:
        UserError: every invalid argument and every error in the file.
    """
    problems = choice_problems(
        [
            ("--engine", engine, get_args(Engine)),
            ("--recompute", recompute, get_args(Recompute)),
            ("--tool", tool, TOOLS),
        ]
    )
    if nproc is not None and cluster is not None:
        problems.append(f"--nproc {nproc} and --cluster {cluster} both say how many ranks there are; leave one out")
    found = None
    try:
        found = None if cluster is None else find_cluster(cluster)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None  # without the ranks, the file cannot be checked
    given = {"seq_len": seq_len, "recompute": recompute if recompute in get_args(Recompute) else None}
    try:
        document = read_file(file)
        kind = format_of(file, document) if tool is None or problems else tool
        common: dict[str, Any] = {
            "ranks": nproc if found is None else found.world_size,
            "device": None if found is None else found.device,
            "here": "cpu" if found is not None else find_cluster(None).device,
            "given": {key: value for key, value in given.items() if value is not None},
        }
        if kind == "deepspeed":
            result = import_deepspeed(document, engine=None if problems else _engine(engine), **common)
        else:
            problems += [f"--engine {engine} is for DeepSpeed's files; leave it out"] if engine is not None else []
            result = import_file(kind, document, **common)
    except PlanError as error:
        raise PlanError(*problems, *(_named(file, problem) for problem in error.problems)) from None
    if problems:
        raise PlanError(*problems)
    plan = result.plan.model_copy(update={"reason": f"read from {file.name}"})
    print_import(result, plan, sys.stderr if as_json else sys.stdout)
    if output is not None:
        write_file(output, plan.to_toml())
        print(f"plan: {output} (shardwise train CONFIG --plan {output})", file=sys.stderr if as_json else sys.stdout)
    if config_file is not None:
        import tomli_w

        write_file(config_file, tomli_w.dumps(config_document(result.keys)))
        print(f"config: {config_file}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(import_json(result, plan), ensure_ascii=False))


def print_import(result: Imported, plan: Plan, stream: Any) -> None:
    """Print every key of the file by its result, the keys for a config file, and the plan."""

    def section(title: str, rows: Sequence[FileKey]) -> None:
        if rows:
            print(title, file=stream)
        for row in rows:
            value = "(left out)" if row.value is None else _json(row.value)
            print(f"  {row.key}: {row.why}" if row.value == "" else f"  {row.key} = {value}: {row.why}", file=stream)

    section("taken over", result.taken)
    section("the same in Shardwise", result.same)
    section("not taken over", result.not_taken)
    section("without effect on the plan", result.no_effect)
    section("left to you", result.open)
    if result.means:
        print("what it does there", file=stream)
    for line in result.means:
        print(f"  {line}", file=stream)
    print("for the config file", file=stream)
    for line in config_lines(result.keys):
        print(f"  {line}", file=stream)
    on = f"{plan.dims.world_size} {'rank' if plan.dims.world_size == 1 else 'ranks'} ({result.ranks_from})"
    print(f"plan: {plan.strategy} on {on}, {plan.device}, {plan.precision}, {plan.batch_equation()}", file=stream)


def config_lines(keys: dict[str, Any]) -> list[str]:
    """Format ``table.key`` → value as the lines of a TOML file."""
    tables = dict.fromkeys(key.partition(".")[0] for key in keys)
    lines = []
    for table in tables:
        inner = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith(f"{table}.")}
        lines += [f"[{table}]", *(f"{key} = {_json(value)}" for key, value in inner.items())]
    return lines


def import_json(result: Imported, plan: Plan) -> dict[str, Any]:
    """Build the document of ``--json``."""
    kinds = ("taken", "same", "not_taken", "no_effect", "open")
    return {
        "schema": 1,
        "plan": plan.model_dump(mode="json", by_alias=True),
        "fingerprint": plan.fingerprint,
        "ranks_from": result.ranks_from,
        "config": result.keys,
        "means": result.means,
        **{kind: [{"key": r.key, "value": r.value, "why": r.why} for r in getattr(result, kind)] for kind in kinds},
    }


def _engine(text: str | None) -> Engine | None:
    return next((engine for engine in get_args(Engine) if engine == text), None)


def _named(file: Path, problem: str) -> str:
    return problem if problem.startswith(f"'{file}'") else f"'{file}': {problem}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
