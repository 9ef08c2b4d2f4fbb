"""Catalogue of public architectures: the rows of ``catalogue.csv``, each with its source.

The file's columns are the keys of a Hugging Face config by their plain names; ``options`` are further keys of it,
``key=value`` with JSON values, separated by semicolons. ``parameters`` is the total that the source publishes, where
one was found; the count of this package must equal it. Weights are never read.
"""

from __future__ import annotations

import csv
import json
import re
from functools import lru_cache
from pathlib import Path

from shardwise.errors import did_you_mean
from shardwise.model.architecture import Architecture, architecture_from_config

CONVNETS = ("resnet-50",)  # known by name, but not an `Architecture`: see `shardwise.model.convnet`

# Parts of a name that do not change the shape.
_NOISE = frozenset({"meta", "instruct", "chat", "it", "pt", "hf", "base", "deduped", "uncased", "4k", "8k", "128k"})
_NUMBER, _FAMILY = re.compile(r"\d+(?:\.\d+)?"), re.compile(r"[a-z]{3,}")
NEWEST = 5  # names of a family in a message
_NUMBERS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}


def find_architecture(name: str) -> Architecture | None:
    """Find the architecture called ``name``; ``None`` if unknown or one of `CONVNETS`.

    Case, dashes, an organisation in front (``meta-llama/``) and words such as ``-instruct`` or ``-hf`` do not matter.
    """
    found = _spellings()
    known = found.get(_plain(name)) or found.get(_plain(name, quiet=True))
    return None if known is None else _architectures()[known]


def find_convnet(name: str) -> str | None:
    """Find the member of `CONVNETS` called ``name``."""
    return next((net for net in CONVNETS if _plain(net) == _plain(name)), None)


def catalogue_names() -> tuple[str, ...]:
    """List all names in the order of the file, for messages and completion."""
    return (*(row["name"] for row in _rows()), *CONVNETS)


def published_parameters(name: str) -> int | None:
    """Return the published number of parameters of a catalogue name; ``None`` if not found."""
    return next((int(row["parameters"]) for row in _rows() if row["name"] == name and row["parameters"]), None)


def unknown_model_message(name: str) -> str:
    """Format the message for an unknown model: the nearest name, and other ways to give a model."""
    return (
        f"model '{name}' is not in the catalogue{_nearest(name)}; give one of its names "
        "(shardwise plan --list models), a config.json or its folder, or package.module:factory for any nn.Module"
    )


def _nearest(name: str) -> str:
    """Suggest the names that begin so, or a misspelt one; of an unknown version, the newest ones of its family."""
    plain, names = name.lower().rsplit("/", 1)[-1], catalogue_names()
    if longer := sorted((known for known in names if _begins(known, plain)), key=len)[:NEWEST]:
        shown = [f"'{known}'" for known in longer]
        return f" (did you mean {' or '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}?)"
    hint = did_you_mean(plain, names)
    close = next((known for known in names if f"'{known}'" in hint), "")
    version = _NUMBER.findall(plain)[:1]
    if close and set(version) <= set(_NUMBER.findall(close)):
        return hint
    family = _FAMILY.match(plain)
    found = [known for known in names if family is not None and known.startswith(family[0])]
    return f" (of {family[0]} it has {', '.join(found[-NEWEST:])})" if family is not None and found else hint


def _begins(known: str, plain: str) -> bool:
    """Return whether a name begins with ``plain``, whatever the separators, and not in the middle of a number."""
    letters = re.sub(r"[-_.]", "", plain)
    found = re.match(r"[-_.]*".join(map(re.escape, letters)), known) if len(letters) > 1 else None
    return found is not None and not (letters[-1].isdigit() and known[found.end() : found.end() + 1].isdigit())


def _plain(name: str, *, quiet: bool = False) -> str:
    """Normalize ``name``: no organisation, case or separators.

    ``quiet`` also drops words and dates without effect on the shape.
    """
    words = re.split(r"[^a-z0-9.]+", name.lower().rsplit("/", 1)[-1])
    if quiet:
        words = [word for word in words if word not in _NOISE and not re.fullmatch(r"\d{4}", word)]
    return "".join(words)


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[str, str], ...]:
    with Path(__file__).with_name("catalogue.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    """Map every normalized spelling to its name; full spellings come first."""
    found: dict[str, str] = {}
    names = [(row["name"], [row["name"], *filter(None, row["aliases"].split(";"))]) for row in _rows()]
    for quiet in (False, True):
        for name, ways in names:
            for way in ways:
                found.setdefault(_plain(way, quiet=quiet), name)
    return found


@lru_cache(maxsize=1)
def _architectures() -> dict[str, Architecture]:
    return {row["name"]: _architecture(row) for row in _rows()}


def configuration_of(name: str) -> dict[str, object]:
    """Return the keys of a Hugging Face configuration that a row of the catalogue states.

    Raises:
        KeyError: there is no row of that name.
    """
    return _configuration({row["name"]: row for row in _rows()}[name])


def _configuration(row: dict[str, str]) -> dict[str, object]:
    config: dict[str, object] = {key: int(row[own]) for own, key in _NUMBERS.items() if row[own]}
    if row["family"] == "opt" and row["ffn"]:
        config["ffn_dim"] = int(row["ffn"])
    if row["tied"]:
        config["tie_word_embeddings"] = row["tied"] == "true"
    for option in filter(None, row["options"].split(";")):
        key, _, value = option.partition("=")
        config[key] = json.loads(value)
    return config | {"model_type": row["family"]}


def _architecture(row: dict[str, str]) -> Architecture:
    found = architecture_from_config(_configuration(row), row["name"], row["source"])
    if found is None:
        raise ValueError(f"catalogue.csv: {row['name']} cannot be described")
    return found
