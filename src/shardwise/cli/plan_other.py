"""Other questions of ``shardwise plan``: inference (``--serve``), where to rent (``--where``), several clusters.

Their options, and which of them is asked; a question's module is imported when it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwise.errors import UserError

SERVING = ("context", "concurrency", "quant", "kv_cache", "tp")
RANKING = ("deadline", "budget", "prices")
ONE_PLAN = {"prove": "--prove", "output": "-o", "target": "--for", "calibration": "--calibration"}
OPTIONS: dict[str, Any] = {
    "serve": Annotated[bool, typer.Option("--serve", help="Plan inference: memory, concurrency, tokens/s.")],
    "context": Annotated[str | None, typer.Option(help="--serve: tokens of a sequence with its answer, as 32k.")],
    "concurrency": Annotated[int | None, typer.Option(help="--serve: sequences at once.", min=1, max=2**20)],
    "quant": Annotated[str | None, typer.Option(help="--serve: weights in int8, int4 or fp8.")],
    "kv_cache": Annotated[str | None, typer.Option(help="--serve: keys and values in 16-bit or fp8.")],
    "tp": Annotated[int | None, typer.Option(help="--serve: devices of a replica.", min=1, max=2**10)],
    "where": Annotated[bool, typer.Option("--where", help="Rank clusters to rent by cost of the run.")],
    "deadline": Annotated[str | None, typer.Option(help="--where: longest run, such as 48h or 2d.")],
    "budget": Annotated[float | None, typer.Option(help="--where: most dollars of the run.", min=0)],
    "prices": Annotated[
        Path | None, typer.Option(help="--where: CSV of instances in the schema of SkyPilot's vms.csv.")
    ],
}
FLAGS = ("serve", "where")


def with_other_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give ``verb`` the options of `OPTIONS`; it receives them as a mapping, its second argument."""

    def command(words: Mapping[str, Any], **given: Any) -> None:
        verb(words, {name: given.pop(name) for name in OPTIONS}, **given)

    first, _, *rest = inspect.signature(verb, eval_str=True).parameters.values()
    alone = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, alone, default=False if name in FLAGS else None, annotation=kind)
        for name, kind in OPTIONS.items()
    ]
    signature = inspect.Signature([first, *options, *(parameter.replace(kind=alone) for parameter in rest)])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def is_other(words: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the question is another one than that of one cluster's plans."""
    return len(words["cluster"] or ()) > 1 or any(value not in (None, False) for value in other.values())


def answer_other(
    words: Mapping[str, Any],
    other: Mapping[str, Any],
    one_plan: Mapping[str, Any],
    price: Path | None,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Answer the question that ``other`` asks; ``one_plan`` are options that count for one cluster's plans alone.

    Raises:
        UserError: options of two questions, or without theirs.
        DoesNotFit: the answer is no.
    """
    _check(words, other, one_plan)
    if other["serve"]:
        from shardwise.cli.plan_serve import run_serve

        run_serve(words, other, price, console, as_json=as_json)
    elif other["where"]:
        from shardwise.cli.plan_where import run_where

        run_where(words, other, price, console, as_json=as_json)
    else:
        from shardwise.cli.plan_where import run_compare

        run_compare(words, words["cluster"], price, console, as_json=as_json)


def _check(words: Mapping[str, Any], other: Mapping[str, Any], one_plan: Mapping[str, Any]) -> None:
    """Refuse what does not go together, all at once."""
    clusters = words["cluster"] or ()
    asked = "--serve" if other["serve"] else "--where" if other["where"] else ""
    name = asked or "several --cluster"
    problems = [f"{ONE_PLAN[key]} has no meaning with {name}; remove it" for key, value in one_plan.items() if value]
    for flag, keys in (("--serve", SERVING), ("--where", RANKING)):
        given = [f"--{key.replace('_', '-')}" for key in keys if other[key] is not None and not other[flag[2:]]]
        problems += [f"{option} is an option of {flag}; add that, or remove it" for option in given]
    if other["serve"] and other["where"]:
        problems.append("--serve and --where are two questions; ask one")
    if other["serve"] and len(clusters) > 1:
        problems.append(f"--serve plans for one cluster at a time, and --cluster is given {len(clusters)} times")
    if other["where"] and clusters:
        problems.append("--where ranks clusters itself; remove --cluster")
    if problems:
        raise UserError(*problems)
