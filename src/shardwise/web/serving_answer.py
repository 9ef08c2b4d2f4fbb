"""Answer of the planner page about serving: the document of ``shardwise plan --serve --json``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.report.serving_json import serving_document
from shardwise.search.plan_request import usual_words
from shardwise.search.serving_options import find_serving
from shardwise.search.serving_request import read_serving

WORDS = ("context", "concurrency", "quant", "kv_cache", "tp")
MOST = {"concurrency": 2**20, "tp": 2**10}  # the bounds of the command line

Integer = Callable[[str, str, int, int, list[str]], int | None]  # name, text, least, most, problems


def serving_answer(question: Mapping[str, str], integer: Integer) -> dict[str, Any]:
    """Return the document and the command line of a question.

    Raises:
        UserError: every wrong word, at once.
    """
    problems: list[str] = []
    unknown = question.keys() - {"model", "cluster", "serve", *WORDS}
    problems += [f"'{name:.40}': the page has no such field for serving" for name in sorted(unknown)]
    given = {name: text.strip() for name in WORDS if (text := question.get(name, "")).strip()}
    serving: dict[str, Any] = dict.fromkeys(WORDS) | given
    for name, most in MOST.items():
        if name in given:
            serving[name] = integer(name, given[name], 1, most, problems)
    words = usual_words() | {"model": question["model"].strip(), "cluster": [question["cluster"].strip()]}
    try:
        request, notes = read_serving(words, serving)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    except ImportError:
        raise UserError(
            "what this family of models keeps of a token is read from transformers' own modules, which the page does "
            f"not have; run: shardwise plan {question['model']} --serve"
        ) from None
    if problems:
        raise UserError(*problems)
    document = serving_document(request, find_serving(request), notes)
    command = ["shardwise", "plan", words["model"], "--cluster", words["cluster"][0], "--serve"]
    for name in given:
        command += [f"--{name.replace('_', '-')}", given[name]]
    return {
        "document": json.loads(document.model_dump_json(by_alias=True)),
        "command": shlex.join(command),
        "serving": True,
        "plan": None,
        "problems": [],
    }
