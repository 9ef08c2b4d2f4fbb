"""Load a Hugging Face configuration of a causal language model; refuse other models."""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError, did_you_mean
from shardwise.model.configuration import read_configuration

_CAUSAL = ("gpt_neox", "gpt_neox_japanese", "trocr")  # they have ``is_decoder`` but ignore it
_NEAR = 0.85
KindCheck = Callable[[Any, dict[str, Any], str, Path], list[str]]  # the configuration, its keys, the place and the file


def configuration_file(path: Path) -> Path:
    """Return the ``config.json`` that ``model.config`` refers to.

    Raises:
        ModelError: there is none.
    """
    try:
        file = path / "config.json" if path.is_dir() else path
        found = file.is_file()
    except OSError as error:
        raise ModelError(f"model.config '{path}' cannot be read: {error.strerror}; give another path") from None
    if not found:
        raise ModelError(
            f"model.config '{path}': there is no file '{file.absolute()}'; give a config.json or a folder with one "
            "(paths in a config are relative to the folder the command runs in)"
        )
    return file


def causal_configuration(path: Path, notes: list[str] | None = None) -> Any:
    """Load the transformers configuration of a causal language model; see `transformers_configuration`.

    Raises:
        ModelError: it cannot be read or used, is not of a causal language model, or is quantized.
    """
    return transformers_configuration(path, _check_kind, notes)


def transformers_configuration(path: Path, check: KindCheck, notes: list[str] | None = None) -> Any:
    """Load the transformers configuration of ``model.config``.

    No code of the model's folder runs. ``check`` refuses those of another kind of model.

    ``notes`` get a line for each key without effect that resembles a valid one, and for transformers' warnings about
    rotary positions.

    Raises:
        ModelError: it cannot be read or used, is of another kind, or is quantized.
    """
    file, where = configuration_file(path), f"model.config '{path}'"
    keys = read_configuration(file, where)
    kind = keys.get("model_type")
    if "auto_map" in keys:
        raise ModelError(
            f"{where} requests custom code (auto_map), but code of a model's folder is never run; "
            "use a model that transformers has, or model.factory"
        )
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
        from transformers.utils import logging as verbosity
    except ImportError:
        raise ModelError("model.config needs transformers; install it with: pip install 'shardwise[hf]'") from None
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(str(kind), CONFIG_MAPPING)
        raise ModelError(
            f"{where}: transformers has no model_type '{kind}'{hint}; repair '{file}' or update transformers"
        )
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    warned: list[str] = []
    try:
        with _warnings(warned) if notes is not None else contextlib.nullcontext():
            facts = AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (Exception, RecursionError) as error:  # its checks raise classes of several packages
        reason = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, KeyError | AttributeError | TypeError):
            reason = f"{type(error).__name__}: {reason}"
        raise ModelError(f"{where} cannot be used: {reason:.600}; repair '{file}'") from None
    problems = [*check(facts, keys, where, file), *_quantized(keys, where, file)]
    if problems:
        raise ModelError(*problems)
    if notes is not None:
        rotary = [line for line in dict.fromkeys(warned) if "rope" in line]  # the others are about generating text
        notes += [f"{where}: {line}" for line in [*_near_misses(facts, keys), *rotary]]
    facts.use_cache = False
    return facts


def _check_kind(facts: Any, keys: dict[str, Any], where: str, file: Path) -> list[str]:
    """Return why `AutoModelForCausalLM` would not build a model, or train it as a different kind."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = facts.model_type
    if type(facts) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{where}: model_type '{kind}' is not a causal language model; "
            "give the configuration of one, set model.task, or use model.factory"
        )
    problems = []
    built = MODEL_FOR_CAUSAL_LM_MAPPING[type(facts)].__name__
    custom_loop = "train it in a loop of your own, with shardwise.start"
    named = keys.get("architectures") or []
    other = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    if other and not any(name == built or _is_causal(name) for name in other):
        problems.append(
            f"{where} is that of {', '.join(other)} (architectures), and what is trained here is a causal language "
            f"model, {built}; set architectures to [\"{built}\"] in '{file}' if that is meant, or {custom_loop}"
        )
    elif getattr(facts, "is_encoder_decoder", False):
        problems.append(
            f"{where}: model_type '{kind}' is an encoder and a decoder, and a causal language model has one stack; "
            f"set is_encoder_decoder to false in '{file}' to train its decoder alone, or {custom_loop}"
        )
    elif _sees_both_ways(facts):
        problems.append(
            f"{where}: model_type '{kind}' reads in both directions (is_decoder is not true), so it would see each "
            f"token that it is to predict; set is_decoder to true in '{file}', or {custom_loop}"
        )
    return problems


def _quantized(keys: dict[str, Any], where: str, file: Path) -> list[str]:
    if keys.get("quantization_config") is None:
        return []
    asked = keys["quantization_config"]
    method = asked.get("quant_method") if isinstance(asked, dict) else asked
    return [
        f"{where} asks for quantized weights (quantization_config: {method!s:.40}), but training needs full "
        f"ones; remove the key from '{file}', or quantize a frozen base with +qlora (parallel.strategy=fsdp+qlora)"
    ]


def _is_causal(name: str) -> bool:
    """Return whether a class name is of a causal language model, or of a trunk (use unknown)."""
    return bool(re.search(r"CausalLM|LMHead", name)) or not re.search(r"For[A-Z]|Heads", name)


def _sees_both_ways(facts: Any) -> bool:
    if facts.model_type in ("xlnet", "xlm"):
        return facts.model_type == "xlnet" or not facts.causal
    return getattr(facts, "is_decoder", True) is not True and facts.model_type not in _CAUSAL


def _near_misses(facts: Any, keys: dict[str, Any]) -> Iterator[str]:
    """Yield unknown keys whose name resembles a known key that is not given."""
    known = {*type(facts)().to_dict(), *type(facts).attribute_map}
    for key in keys:
        near = difflib.get_close_matches(key, known - set(keys), n=1, cutoff=_NEAR) if key not in known else []
        if near:
            yield f"'{key}' is no key of a {facts.model_type} and has no effect (did you mean '{near[0]}'?)"


@contextlib.contextmanager
def _warnings(into: list[str]) -> Iterator[None]:
    """Collect transformers' warnings, which are silenced otherwise."""
    logger = logging.getLogger("transformers")
    handler, level, passed_on = logging.Handler(logging.WARNING), logger.level, logger.propagate
    handler.emit = lambda record: into.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    others = logger.handlers
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = others, passed_on
        logger.setLevel(level)
