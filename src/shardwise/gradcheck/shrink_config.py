"""Smaller values for a transformers configuration, in steps tried one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

VOCAB = 256
HEAD_DIM = 8
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
)
_KEY_VALUES = ("num_key_value_heads", "num_kv_heads")

Chooser = Callable[[list[Any], int], list[int]]


@dataclass(frozen=True)
class ShrinkLimits:
    """Limits of the small model.

    ``blocks`` is a minimum; ``cuts`` are the (tp, cp) degrees to support; ``seq_len`` is the length of its samples, and
    ``own_seq_len`` that of the original model; ``vocab_size`` the token ids of the data. With ``only_blocks`` all other
    sizes are unchanged.
    """

    blocks: int = 2
    cuts: tuple[tuple[int, int], ...] = ((1, 1),)
    seq_len: int = 32
    own_seq_len: int = 32
    vocab_size: int = 257
    only_blocks: bool = False

    @property
    def granule(self) -> int:
        """Divisor of all sharded widths."""
        return math.lcm(8, *(tp * cp for tp, cp in self.cuts))


@dataclass(frozen=True)
class Attempt:
    """New values for keys of the configuration (of ``section``, a table in it, if not empty)."""

    section: str
    values: dict[str, Any]
    message: tuple[str, ...]
    blocks: list[int] | None = None

    def apply(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``document`` with the new values."""
        if not self.section:
            return {**document, **self.values}
        return {**document, self.section: {**document[self.section], **self.values}}


@dataclass(frozen=True)
class Proposal:
    """Change to make, and the attempts in order."""

    what: str
    attempts: list[Attempt] = field(default_factory=list)


def smaller(
    configuration: Any, document: dict[str, Any], kinds: list[Any], need: ShrinkLimits, chooser: Chooser
) -> Iterator[Proposal]:
    """Yield the proposals for this configuration: blocks, widths, vocabulary, positions."""
    section = "text_config" if isinstance(document.get("text_config"), dict) else ""
    text = configuration.text_config if section else configuration
    reader = _Reader(text, document[section] if section else document, section)
    proposals = [_blocks(reader, kinds, need, chooser)]
    if not need.only_blocks:
        proposals += [_widths(reader, need), _vocab(reader, need), _positions(reader, need)]
    yield from (proposal for proposal in proposals if proposal.attempts)


@dataclass(frozen=True)
class _Reader:
    """Reader of a configuration by transformers' names, with the key that stores each."""

    configuration: Any
    document: dict[str, Any]
    section: str

    def key(self, name: str) -> str:
        """Return the key of ``name`` in the document."""
        return str(getattr(type(self.configuration), "attribute_map", {}).get(name, name))

    def number(self, name: str) -> int | None:
        """Return an integer of the configuration, ``None`` where it has none of that name."""
        value = self.document.get(self.key(name))
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def attempt(self, values: dict[str, Any], blocks: list[int] | None = None) -> Attempt:
        """Build an attempt, described with old and new values."""
        changed = {key: value for key, value in values.items() if self.document.get(key) != value}
        message = tuple(
            f"{key} {value} instead of {self.document[key]}"
            for key, value in changed.items()
            if isinstance(self.document.get(key), int | float)
        )
        return Attempt(self.section, changed, message, blocks)


def _blocks(reader: _Reader, kinds: list[Any], need: ShrinkLimits, chooser: Chooser) -> Proposal:
    number = reader.number("num_hidden_layers")
    proposal = Proposal("the blocks")
    if number is None or len(kinds) != number:
        return proposal
    types = reader.document.get("layer_types") or [None] * number
    taken = chooser(list(zip(kinds, types, strict=True)) if len(types) == number else list(kinds), need.blocks)
    for blocks in (taken, list(range(taken[-1] + 1)), list(range(len(taken)))):
        if len(blocks) >= number:
            continue
        values: dict[str, Any] = {reader.key("num_hidden_layers"): len(blocks)}
        for key, value in reader.document.items():
            if isinstance(value, list) and len(value) == number:  # one entry for each block
                values[key] = [value[i] for i in blocks]
        proposal.attempts.append(reader.attempt(values, blocks))
    return proposal


def heads_for(heads: int, key_values: int, cuts: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the fewest heads and key-value heads with the same ratio and divisibility.

    At least two key-value heads if the model has two, and two per tensor-parallel rank where it has as many: so a wrong
    split is detected.
    """
    if heads % key_values:
        return heads, key_values
    ratio = heads // key_values

    def allows(number: int) -> bool:
        for tp, cp in cuts:
            for degree in (tp, tp * cp):
                if key_values % degree == 0 and number % degree:
                    return False
                if heads % degree == 0 and (ratio * number) % degree:
                    return False
        return True

    tp = max(tp for tp, _ in cuts)
    least = min(key_values, max(2, 2 * tp))
    number = next(n for n in range(least, key_values + 1) if n == key_values or allows(n))
    return ratio * number, number


def _widths(reader: _Reader, need: ShrinkLimits) -> Proposal:
    """Propose heads, their size, and matching widths, in the model's proportions."""
    proposal = Proposal("the widths")
    heads, hidden = reader.number("num_attention_heads"), reader.number("hidden_size")
    if not heads or not hidden:
        return proposal
    key = next((name for name in _KEY_VALUES if reader.number(name)), None)
    key_values = reader.number(key) if key else None
    new_heads, new_key_values = heads_for(heads, key_values or heads, need.cuts)
    size = reader.number("head_dim") or hidden // heads
    for new_size in dict.fromkeys((min(size, HEAD_DIM), min(size, 16), size)):
        values: dict[str, Any] = {reader.key("num_attention_heads"): new_heads}
        if key and key_values:
            values[reader.key(key)] = new_key_values
        if reader.number("head_dim"):
            values[reader.key("head_dim")] = new_size
        width = new_heads * new_size
        if hidden != heads * size:
            width = _near(width * hidden / (heads * size), need.granule)
        if width > hidden:
            continue
        values[reader.key("hidden_size")] = width
        for name in ("word_embed_proj_dim",):
            if reader.number(name) == hidden:
                values[reader.key(name)] = width
        for name in _INNER:
            inner = reader.number(name)
            if inner:
                values[reader.key(name)] = min(inner, _near(inner * width / hidden, need.granule))
        proposal.attempts.append(reader.attempt(values))
    proposal.attempts.extend(_inner_alone(reader, need))
    return proposal


def _inner_alone(reader: _Reader, need: ShrinkLimits) -> Iterator[Attempt]:
    found = {reader.key(name): inner for name in _INNER if (inner := reader.number(name))}
    if found:
        yield reader.attempt({key: min(inner, need.granule * 8) for key, inner in found.items()})


def _near(value: float, granule: int) -> int:
    return max(granule, round(value / granule) * granule)


def _vocab(reader: _Reader, need: ShrinkLimits) -> Proposal:
    """Propose a small vocabulary with the same remainder, and so the same divisibility."""
    proposal = Proposal("the vocabulary")
    size = reader.number("vocab_size")
    if size is None or size <= 2 * VOCAB:
        return proposal
    least = need.vocab_size if need.vocab_size <= 2 * VOCAB else VOCAB
    new = least + (size - least) % need.granule
    values: dict[str, Any] = {reader.key("vocab_size"): new}
    for key, value in reader.document.items():
        if not key.endswith(("_token_id", "_token_index")):
            continue
        if isinstance(value, int) and value >= new:
            values[key] = value % new
        elif isinstance(value, list):
            values[key] = [v % new for v in value]
    attempt = reader.attempt(values)
    modulo = f" (token ids modulo {new})" if new < need.vocab_size else ""
    message = (f"vocab_size {new} instead of {size}{modulo}",)
    proposal.attempts.append(Attempt(attempt.section, attempt.values, message))
    return proposal


def _positions(reader: _Reader, need: ShrinkLimits) -> Proposal:
    """Propose positions, and a sliding window that is active if it is in the original."""
    proposal = Proposal("positions and windows")
    values: dict[str, Any] = {}
    longest = reader.number("max_position_embeddings")
    rope = str(reader.document.get("rope_parameters") or reader.document.get("rope_scaling") or "default")
    if longest and longest > 2 * need.seq_len and "default" in rope and "factor" not in rope.replace("rotary_fa", ""):
        values[reader.key("max_position_embeddings")] = 2 * need.seq_len
    window = reader.number("sliding_window")
    if window and window < need.own_seq_len:
        values[reader.key("sliding_window")] = max(2, need.seq_len * window // need.own_seq_len)
    if values:
        proposal.attempts.append(reader.attempt(values))
    return proposal
