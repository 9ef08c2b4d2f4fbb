"""Styles as data: module pattern to style name, from the user, transformers, or a layout."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.errors import ModelError, did_you_mean

KNOWN = {
    "colwise": "colwise",
    "packed_colwise": "colwise",
    "colwise_gather_output": "colwise",
    "colwise_loss": "colwise",
    "rowwise_split_input": "rowwise",
    "rowwise": "rowwise",
    "packed_rowwise": "rowwise",
    "embedding": "embedding",
    "embedding_rowwise": "embedding",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate",  # partial gradients are detected, not declared
}
ATTRIBUTE = "tp_styles"


def chosen_styles(
    module: nn.Module, given: Mapping[str, str] | None, names: Iterable[str], blocks: Sequence[str]
) -> tuple[dict[str, str] | None, bool]:
    """Map module names to ``colwise``, ``rowwise``, ``embedding`` or ``replicate``.

    ``None``: by structure.

        The user's own (given, or the module's ``tp_styles``) take precedence and make the second value ``True``:
        modules that they do not name stay unsharded. ``names`` are the modules that may be sharded.

    Raises:
        ModelError: an unknown style, or a pattern that matches nothing.
    """
    names = list(names)
    own = given if given is not None else getattr(module, ATTRIBUTE, None)
    if own is not None:
        return _own(own, names, blocks), True
    inner = [name for name in names if any(name.startswith(f"{block}.") for block in blocks)]
    published = _matched(_published(module), inner)
    found = {name: KNOWN.get(style, "replicate") for name, style in published.items()}
    return (found if {"colwise", "rowwise"} <= set(found.values()) else None), False


def _own(own: Mapping[str, str], names: list[str], blocks: Sequence[str]) -> dict[str, str]:
    problems = []
    patterns = sorted({starred(name, blocks) for name in names})
    for pattern, style in own.items():
        if style not in KNOWN:
            hint = did_you_mean(str(style), KNOWN) or f"; styles are {', '.join(sorted(set(KNOWN.values())))}"
            problems.append(f"{ATTRIBUTE} '{pattern}': there is no style '{style}'{hint}")
        if not fnmatch.filter(names, pattern):
            hint = did_you_mean(pattern, patterns) or f"; names are such as {', '.join(patterns[:3])}"
            problems.append(f"{ATTRIBUTE} '{pattern}' matches no linear layer or embedding{hint}")
    if problems:
        raise ModelError(*problems)
    return {name: KNOWN[style] for name, style in _matched(own, names).items()}


def _published(module: nn.Module) -> dict[str, str]:
    plan: Any = getattr(module, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    return {str(pattern): style for pattern, style in plan.items() if isinstance(style, str)}


def _matched(styles: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the style of each name that a pattern matches; the last matching pattern decides."""
    found: dict[str, str] = {}
    for pattern, style in styles.items():
        found |= dict.fromkeys(fnmatch.filter(names, pattern), style)
    return found


def starred(name: str, blocks: Iterable[str]) -> str:
    """Replace the block number in a name: ``layers.*.mlp.up_proj`` for ``layers.3.mlp.up_proj``."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return re.sub(r"(?<=\.)\d+$", "*", block) + name.removeprefix(block)
    return name
