"""Read a model's ``config.json`` as data; reject sizes that could never be built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.document import read_json
from shardwise.errors import ModelError

MOST_LAYERS = 4096
MOST_EXPERTS = 2**15
MOST_HEADS = 2**16
MOST_POSITIONS = 2**27
MOST_LABELS = 2**20  # transformers creates a name for each
MOST_WIDE = 2**31 - 1


def read_configuration(file: Path, where: str) -> dict[str, Any]:
    """Read the keys of ``file``; ``where`` prefixes each message, such as ``model 'x'``.

    Raises:
        ModelError: it cannot be read, or is not a configuration; or its counts are unrealistically large.
    """
    try:
        keys = read_json(file)
    except OSError as error:
        raise ModelError(f"{where}: '{file}' cannot be read: {error.strerror or error}; repair it") from None
    except ValueError as error:
        raise ModelError(f"{where}: '{file}' cannot be read as JSON: {error}; repair it") from None
    if not isinstance(keys, dict):
        raise ModelError(f"{where}: '{file}' holds {keys!r:.40}, not an object; repair it")
    kind = keys.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ModelError(f"{where}: model_type is {kind!r:.40}, it must be text, such as 'llama'; repair '{file}'")
    problems = [
        f"{where}: {key} is {_number(value)}, and {most} is the most; repair '{file}'"
        for key, value, most in _counts(keys, "")
        if value > most
    ]
    if problems:
        raise ModelError(*problems)
    return keys


def _counts(keys: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int, int]]:
    """Yield integers that are looped over or allocated, with their limits, also of submodels."""
    for key, value in keys.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _counts(value, f"{prefix}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{prefix}{key}", value, _most(key.lower())


def _most(key: str) -> int:
    if key == "num_labels":
        return MOST_LABELS
    if "size" in key or "dim" in key:  # of a tensor, also where it is a layer's
        return MOST_WIDE
    if "layer" in key or key in ("depth", "num_blocks", "n_blocks"):
        return MOST_LAYERS
    if "expert" in key:
        return MOST_EXPERTS
    if "head" in key:
        return MOST_HEADS
    if "position" in key or key in ("max_seq_len", "n_ctx", "seq_length"):
        return MOST_POSITIONS
    return MOST_WIDE


def _number(value: int) -> str:
    return f"{value:,}" if value < 10**30 else f"a number of {value.bit_length() * 3 // 10} digits or so"
