"""Answer of the planner page: the document of ``shardwise plan --json``, and its numbers as text.

Runs in the browser under Pyodide, so nothing here imports torch, typer or rich. A question is a mapping of the words of
``shardwise plan`` to texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.document import MOST_DEEP
from shardwise.errors import UserError
from shardwise.hardware.gpus import find_gpu, gpu_names
from shardwise.model.architecture import parameter_count
from shardwise.model.catalogue import catalogue_names, find_architecture
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.program import OWN, program_names
from shardwise.report.plan_json import document
from shardwise.report.plan_sentences import sentences
from shardwise.search.option_values import read_length
from shardwise.search.plan_request import (
    PlanRequest,
    build_request,
    option_of,
    plan_file_text,
    search_request,
    tried,
    usual_words,
    word_of,
)
from shardwise.search.problem import ask, default_costs
from shardwise.units import bytes_text, count_text, hours_text, money_text, number_text, seconds_text
from shardwise.web.serving_answer import serving_answer

CONFIG = "config.json"
BYTES = ("memory_bytes", "phases")
SECONDS = ("time_parts_s", "step_parts_s")
MONEY = ("cost", "dollars_per_million_tokens", "dollars", "per_device_hour", "price_per_device_hour")
FLAGS = ("compiled", "any_plan", "optimizer_in_backward", "offload_activations")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)  # of JSON; one that does not end takes the rest


def answer(question: Mapping[str, str]) -> dict[str, Any]:
    """Answer a question: the document, its numbers as text, sentences, the command line and the plan file.

    A wrong question has ``problems`` instead, in the words of the command line.
    """
    try:
        _check_places(question)
        if question.get("serve"):
            served = serving_answer(question, _integer)
            return {**served, "texts": texts(served["document"])}
        request, profile, prices, notes = _read(question)
        result = search_request(request, profile, costs=default_costs(), profile_of=_profile_of)
    except UserError as error:
        return {"problems": list(error.problems)}
    if result.optimizer is not None:
        request = request.model_copy(update={"optimizer": result.optimizer})
    if request.pins.strategy is not None and request.pins.strategy.adapter != "none":
        profile = ask(profile, request.workload, request.cluster, request.pins).profile
    found = document(profile, request.cluster, request.workload, result, notes=notes, prices=prices)
    data = json.loads(found.model_dump_json(by_alias=True))
    best = None if result.recommended is None else result.candidates[result.recommended]
    shown = best or (result.candidates[0] if result.candidates else None)
    return {
        "document": data,
        "texts": texts(data),
        "sentences": [] if best is None else sentences(best, request.cluster, result, profile.num_blocks),
        "batch": None if best is None else best.plan.batch_equation(),
        "command": request.command({}),
        "plan": None if shown is None else plan_file_text(shown.plan.to_toml(), request),
        "problems": [],
    }


def _profile_of(model: str, *, seq_len: int | None, compiled: bool) -> ModelProfile:
    if model == CONFIG:
        return load_profile(model, seq_len=seq_len, compiled=compiled)
    return _named_profile(model, seq_len, compiled)


@lru_cache(maxsize=64)  # costs are kept by the identity of their profile
def _named_profile(model: str, seq_len: int | None, compiled: bool) -> ModelProfile:
    return load_profile(model, seq_len=seq_len, compiled=compiled)


def nesting(text: str) -> int:
    """Return how deep a JSON text is nested, without parsing it: WebAssembly's stack ends before Python's limit."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[{\]}]", STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _check_places(question: Mapping[str, str]) -> None:
    """Refuse what the page cannot reach: files, factories, this machine."""
    model, cluster = question.get("model", "").strip(), question.get("cluster", "").strip()
    if not model or not cluster:
        raise UserError("a question needs a model and a cluster, such as llama-3.1-8b and 8xA100-80GB")
    here = cluster.lower()
    if here in ("auto", "local") or here.endswith(("cpu", ".toml", ".json")):
        raise UserError(
            f"cluster '{here:.80}': the page sees neither this machine nor its files; name GPUs, such as 8xA100-80GB, "
            "or use the command line"
        )
    if model != CONFIG and (":" in model or "/" in model or Path(model).suffix in (".py", ".json", ".toml")):
        raise UserError(
            f"model '{model:.80}': the page plans names of the catalogue and a config.json that is dropped on it; for "
            f"others run: shardwise plan {model:.80}"
        )
    if model == CONFIG and Path(CONFIG).is_file() and nesting(Path(CONFIG).read_text()) > MOST_DEEP:
        raise UserError(f"model '{CONFIG}' cannot be read as JSON: it is nested more than {MOST_DEEP} deep; repair it")


def _read(question: Mapping[str, str]) -> tuple[PlanRequest, ModelProfile, Any, list[str]]:
    problems: list[str] = []
    words = usual_words()
    unknown = question.keys() - words.keys()
    problems += [f"'{name:.40}': the page has no such field" for name in sorted(unknown)]
    forms = {name: word_of(field) for name, field in PlanRequest.model_fields.items()}
    fields = {word.name or name: name for name, word in forms.items() if word is not None}
    for name, text in question.items():
        if name in unknown or not text.strip():
            continue
        option = option_of(PlanRequest.model_fields[fields[name]])
        if name in FLAGS:
            words[name] = text == "on"
        elif option is not None and option.min is not None:
            words[name] = _integer(name, text, option.min, option.max, problems)
        else:
            words[name] = text.strip()
    words["seq_len"] = tried(problems, lambda: read_length(words["seq_len"]))
    return build_request(words, problems=problems, notes=[], profile_of=_profile_of)


def _integer(name: str, text: str, least: int, most: int | None, problems: list[str]) -> int | None:
    plain = text.strip().replace(",", "")
    if plain.isascii() and plain.isdigit() and len(plain) < 12 and least <= int(plain) <= (most or 2**31):
        return int(plain)
    problems.append(f"--{name.replace('_', '-')} '{text:.20}' must be an integer from {least} to {most:,}")
    return None


def texts(data: Any) -> dict[str, str]:
    """Return each number of a document as the command line prints it, by its dotted place; null is ``unknown``."""
    return dict(_texts(data, ()))


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*path, str(key)))
    elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield ".".join(path), number(value, path)


def number(value: float | None, path: tuple[str, ...]) -> str:
    """Format a number of the document by its key."""
    key = path[-1]
    if value is None:
        return "unknown"
    if any(part in BYTES for part in path) or key.endswith(("_bytes", "bytes_of_a_sequence")):
        return bytes_text(value)
    if key.endswith("_bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if (key.endswith("_s") and not key.endswith("_per_s")) or any(part in SECONDS for part in path):
        return seconds_text(value)
    if key in MONEY:
        return money_text(value)
    if key == "mfu":
        return f"{value:.0%}"
    if key == "hours":
        return hours_text(value)
    if key in ("parameters", "trainable", "flops_per_sample"):
        return count_text(value)
    return number_text(value) if isinstance(value, float) else f"{value:,}"


def lists() -> dict[str, Any]:
    """Return what the page offers: models with their size, GPUs with memory, node and price, optimizers, programs."""
    models, gpus = [], []
    for name in catalogue_names():
        found = find_architecture(name)
        if found is not None:
            models.append(
                {"name": name, "parameters": count_text(parameter_count(found)), "positions": found.max_seq_len}
            )
    for gpu in filter(None, map(find_gpu, gpu_names())):
        gpus.append(
            {
                "name": gpu.name,
                "memory": bytes_text(gpu.memory_bytes),
                "per_node": gpu.devices_per_node,
                "network": gpu.network is not None,
                "price": money_text(gpu.price_per_hour),
            }
        )
    return {
        "models": models,
        "gpus": gpus,
        "optimizers": list(OPTIMIZERS),
        "programs": [name for name in program_names() if name != OWN],
    }


def reply(kind: str, text: str) -> str:
    """Reply to a message of the page, JSON to JSON; ``config`` keeps a dropped configuration for later questions."""
    try:
        if kind == "lists":
            return json.dumps(lists())
        if kind == "config":
            Path(CONFIG).write_text(text)
            return json.dumps({"problems": []})
        return json.dumps(answer(json.loads(text)))
    except Exception as error:  # a fault of ours: the page says so, and answers the next question
        return json.dumps({"problems": [f"the engine failed: {type(error).__name__}: {error}; please report it"]})
