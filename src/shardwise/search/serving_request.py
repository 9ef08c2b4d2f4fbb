"""Request of ``shardwise plan --serve``: its options, checked at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from shardwise.cost.memory.serving_memory import Quantization
from shardwise.cost.price import Prices, price_of, read_prices
from shardwise.errors import UserError
from shardwise.hardware.gpus import gpu_names
from shardwise.model.kv_cache import KvCache, load_kv_cache
from shardwise.model.load_model import load_profile
from shardwise.model.profile import ModelProfile
from shardwise.search.option_values import choice_problems, read_length
from shardwise.search.plan_request import PlanRequest, find_cluster, is_config, option_of, tried, usual_words, word_of
from shardwise.search.serving_options import KvType, ServingRequest

USUAL_CONTEXT = 8192
PROFILE_TOKENS = 16
SERVED = ("model", "cluster")  # words of a plan that count for serving, too


def read_serving(
    words: Mapping[str, Any], serving: Mapping[str, Any], price: Path | None = None
) -> tuple[ServingRequest, list[str]]:
    """Check all options; also return notes on filled-in values. ``serving`` are the options of serving alone.

    Raises:
        UserError: every invalid option, at once.
    """
    problems = _of_training(words)
    problems += choice_problems(
        [("--quant", serving["quant"], get_args(Quantization)), ("--kv-cache", serving["kv_cache"], get_args(KvType))]
    )
    context = tried(problems, lambda: read_length(serving["context"], "--context"))
    cluster = tried(problems, lambda: find_cluster((words["cluster"] or [None])[0]))
    prices = tried(problems, lambda: Prices() if price is None else read_prices(price, gpu_names())) or Prices()
    model = _model(words["model"], context, problems)
    if problems or model is None or cluster is None:
        raise UserError(*dict.fromkeys(problems))
    profile, cache, tokens, notes = model
    if serving["concurrency"] is None:
        notes.append("--concurrency was not given: 1 sequence")
    if (hour := price_of(prices.hour, cluster.device_name)) is not None:
        cluster = cluster.model_copy(update={"price_per_device_hour": hour})
    request = ServingRequest(
        profile=profile,
        cache=cache,
        cluster=cluster,
        context=tokens,
        concurrency=serving["concurrency"] or 1,
        quant=serving["quant"],
        kv_type=serving["kv_cache"] or "16-bit",
        tp=serving["tp"],
    )
    return request, notes


def _model(model: str, context: int | None, problems: list[str]) -> tuple[ModelProfile, KvCache, int, list[str]] | None:
    """Read the model's profile and cache, and the context, the usual one where none was given.

    The profile is that of a short sequence: no figure of serving depends on its length, and modules that loop over
    tokens can be read.
    """
    if is_config(model):
        problems.append(f"model '{model}': --serve takes a catalogue name, a config.json or its folder")
        return None
    cache = tried(problems, lambda: load_kv_cache(model))
    profile = None if cache is None else tried(problems, lambda: load_profile(model, seq_len=PROFILE_TOKENS))
    if cache is None or profile is None:
        return None
    longest, notes = profile.max_seq_len or cache.max_positions, list[str]()
    tokens = context or min(USUAL_CONTEXT, longest or USUAL_CONTEXT)
    if context is None:
        notes.append(f"--context was not given: {tokens} tokens")
    if longest is not None and tokens > longest:
        problems.append(
            f"--context {tokens} is longer than the {longest} positions that '{profile.name}' was made for; use "
            f"{longest} or less"
        )
    return profile, cache, tokens, notes


def _of_training(words: Mapping[str, Any]) -> list[str]:
    """List options that count for training alone."""
    usual, problems = usual_words(), []
    for name, field in PlanRequest.model_fields.items():
        word, option = word_of(field), option_of(field)
        key = (word.name if word is not None else "") or name
        if word is None or option is None or key in SERVED or words[key] == usual[key]:
            continue
        flag = option.flag or "--" + name.replace("_", "-")
        hint = "; the length of a sequence is --context" if flag == "--seq-len" else ""
        problems.append(f"{flag} is of training, and --serve plans inference; remove it{hint}")
    return problems
