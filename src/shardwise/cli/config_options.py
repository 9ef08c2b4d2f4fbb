"""Hints for config keys that are given as options: ``--lr 3e-4`` is ``optimizer.lr=3e-4``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shardwise.train.config import Config

_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.grad_accum",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "output_dir": "train.output",
}
"""Names of other tools."""


def config_key_hint(option: str, words: Sequence[str], options: Sequence[str]) -> str | None:
    """Return the message for an ``option`` that does not exist, if it is the name of a config key.

    ``words`` are those of the command, ``options`` existing ones that it resembles.
    """
    name = option.lstrip("-").replace("-", "_").lower()
    keys: dict[str, list[str]] = {}
    for table, field in Config.model_fields.items():
        for key in getattr(field.annotation, "model_fields", {}):
            keys.setdefault(key, []).append(f"{table}.{key}")
    found = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else keys.get(name, [])
    if not found and not options:
        found = [key for close in difflib.get_close_matches(name, keys, n=1, cutoff=0.75) for key in keys[close]]
    if not found:
        return None
    value = _value(option, words)
    meant = " or ".join(f"{key}={value}" for key in found)
    return f"there is no option {option}; config keys are given as key=value (did you mean {meant}?)"


def _value(option: str, words: Sequence[str]) -> str:
    """Return what the option was given."""
    for number, word in enumerate(words):
        before, equals, after = word.partition("=")
        if before == option:
            following = words[number + 1] if number + 1 < len(words) else "-"
            return after if equals else "VALUE" if following.startswith("-") else following
    return "VALUE"
