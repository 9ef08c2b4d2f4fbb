"""How many rows of a vocabulary were added for new tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENTRY = "added_tokens"
"""Key of `Manifest.model` with the number of rows before tokens were added."""


@dataclass(frozen=True)
class AddedTokens:
    """Rows of a vocabulary before (``old``) and after tokens were added."""

    old: int
    new: int

    @property
    def count(self) -> int:
        """Number of new rows."""
        return self.new - self.old

    @property
    def entry(self) -> dict[str, Any]:
        """Entries of `Manifest.model`."""
        return {ENTRY: {"vocab_size": self.old}}

    def config(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration's keys with the new number of rows."""
        return {**keys, "vocab_size": self.new}


def added_of(entry: Mapping[str, Any] | None) -> AddedTokens | None:
    """Return the tokens that were added to a checkpoint's model, by `Manifest.model`."""
    told, config = (entry or {}).get(ENTRY), (entry or {}).get("config")
    if not isinstance(told, dict) or not isinstance(config, dict):
        return None
    return AddedTokens(int(told["vocab_size"]), int(config["vocab_size"]))
