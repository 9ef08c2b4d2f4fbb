"""Options of ``shardwise plan``: one for each word of `PlanRequest`, and how its arguments are read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.plan_config import profile_of_model, with_config
from shardwise.cost.price import Prices
from shardwise.errors import UserError
from shardwise.model.profile import ModelProfile
from shardwise.run.calibration import read_links
from shardwise.search.option_values import read_length
from shardwise.search.plan_request import (
    CommandOption,
    PlanRequest,
    build_request,
    is_config,
    option_of,
    tried,
    word_of,
)


def with_plan_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give ``verb`` an option for each `Word` of `PlanRequest`, before its other ones.

    The verb receives them as a mapping.
    """
    alone = inspect.Parameter.KEYWORD_ONLY
    options = []
    for name, field in PlanRequest.model_fields.items():
        if (word := word_of(field)) is not None:
            kind: Any = word.kind
            read: Any = Annotated[kind, _typer_info(option_of(field) or CommandOption())]
            options.append(inspect.Parameter(word.name or name, alone, default=word.usual, annotation=read))

    def command(**words: Any) -> None:
        request = {option.name: words.pop(option.name, option.default) for option in options}
        verb(request, **words)

    _, *other = inspect.signature(verb, eval_str=True).parameters.values()
    signature = inspect.Signature([*options, *(parameter.replace(kind=alone) for parameter in other)])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def _typer_info(option: CommandOption) -> Any:
    if option.is_argument:
        return typer.Argument(help=option.help, show_default=False)
    flags = () if option.flag is None else (option.flag,)
    return typer.Option(*flags, help=option.help, min=option.min, max=option.max)


def read_request(
    words: dict[str, Any], *, price: Path | None, calibration: Path | None, output: Path | None
) -> tuple[PlanRequest, ModelProfile, Prices, list[str]]:
    """Check all arguments, find model and cluster; also return notes on filled-in values.

    Raises:
        UserError: every invalid argument, at once.
    """
    problems, notes = _unwritable(output), list[str]()
    words["seq_len"] = tried(problems, lambda: read_length(words["seq_len"]))
    words["cluster"] = tried(problems, lambda: _only(words["cluster"]))
    if is_config(words["model"]):
        words, notes = tried(problems, partial(with_config, words)) or (words, [])
    return build_request(
        words,
        problems=problems,
        notes=notes,
        profile_of=profile_of_model,
        price=price,
        links_of=None if calibration is None else partial(read_links, calibration, threads=words.get("threads")),
    )


def _only(clusters: list[str] | None) -> str | None:
    if clusters and len(clusters) > 1:
        raise UserError(f"--cluster is given {len(clusters)} times ({', '.join(clusters)}); plan for one at a time")
    return clusters[0] if clusters else None


def _unwritable(path: Path | None) -> list[str]:
    """Reason why a file cannot be written, checked before the search."""
    why = ""
    if path is None:
        return []
    try:
        if path.is_dir():
            why = "it is a folder"
        elif not path.parent.is_dir():
            why = f"there is no folder '{path.parent}'"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "permission denied"
    except OSError as error:
        why = error.strerror or str(error)
    return [f"-o '{path}' cannot be written: {why}; choose another file"] if why else []
