"""Text to ids with the special tokens that a model expects, cut to a length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.train.data.sources import need
from shardwise.train.data.tokenizer import load_tokenizer, utf8

_PADS, _MASKS = ("[PAD]", "<pad>", "<|pad|>"), ("[MASK]", "<mask>")
BYTES_MASK = 257  # the first id after those of the tokenizer ``bytes``


@dataclass(frozen=True)
class EncodedText:
    """Ids of a text; ``types`` say which of two texts a token is from, ``words`` its word, -1 for special tokens."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    words: NDArray[np.int64]
    was_truncated: bool


class TextEncoder:
    """Encodes texts with a tokenizer of the config, to at most ``length`` ids.

    ``pad`` fills samples up, ``mask`` stands for a token to predict (``None`` without one), ``special`` are the ids
    that are not text.

    Raises:
        DataError: the tokenizer cannot be used.
    """

    def __init__(self, name: str, facts: Any) -> None:
        plain = load_tokenizer(name)
        self.name, self.vocab_size, self.separator = name, plain.vocab_size, plain.separator
        self.fast: Any = None
        self.mask: int | None = BYTES_MASK
        self.special, pad = [plain.separator], None
        if name != "bytes":
            path = Path(name).expanduser()
            file = path / "tokenizer.json" if path.is_dir() else path
            if not file.is_file():
                raise DataError(
                    f"data.tokenizer '{name}' has no tokenizer.json, which this task needs; save it as a fast tokenizer"
                )
            self.fast = need("tokenizers").Tokenizer.from_file(str(file))
            self.fast.no_padding()
            vocab = self.fast.get_vocab(with_added_tokens=True)
            settings = path / "tokenizer_config.json"
            given = json.loads(settings.read_text()) if path.is_dir() and settings.is_file() else {}
            pad = _id_of(given.get("pad_token"), _PADS, vocab)
            self.mask = _id_of(given.get("mask_token"), _MASKS, vocab)
            added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
            self.special = sorted({plain.separator, *(one["id"] for one in added if one.get("special"))})
        own = getattr(facts, "pad_token_id", None)
        self.pad = next((one for one in (own, pad) if isinstance(one, int) and one >= 0), self.separator)

    def encode(self, text: str, pair: str | None, length: int) -> EncodedText:
        """Encode a text, or two, with special tokens; ``bytes`` ends each text with its separator."""
        if self.fast is None:
            parts = [np.append(np.frombuffer(utf8(one), np.uint8), 256) for one in (text, pair) if one is not None]
            ids = np.concatenate(parts).astype(np.int64)
            types = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            return _truncated(ids, types, np.where(ids == self.separator, -1, 0), length, self.separator)
        self.fast.enable_truncation(max_length=length)
        found = self.fast.encode(text, pair) if pair is not None else self.fast.encode(text)
        return _found(found)

    def encode_words(self, words: Sequence[str], length: int) -> EncodedText:
        """Encode a list of words, with special tokens."""
        if self.fast is None:
            data = [np.frombuffer(utf8(word + " "), np.uint8) for word in words]
            at = np.repeat(np.arange(len(data)), [len(one) for one in data])
            ids = np.append(np.concatenate(data), 256).astype(np.int64)
            return _truncated(ids, np.zeros(len(ids), np.int64), np.append(at, -1), length, self.separator)
        self.fast.enable_truncation(max_length=length)
        return _found(self.fast.encode(list(words), is_pretokenized=True))


def _found(encoding: Any) -> EncodedText:
    words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
    ids, types = (np.array(part, np.int64) for part in (encoding.ids, encoding.type_ids))
    return EncodedText(ids, types, words, bool(encoding.overflowing))


def _truncated(ids: NDArray[np.int64], types: NDArray[Any], words: NDArray[Any], length: int, last: int) -> EncodedText:
    was_truncated = len(ids) > length
    ids, types, words = ids[:length].copy(), types[:length].astype(np.int64), words[:length].astype(np.int64)
    if was_truncated:  # it still ends as a whole one does
        ids[-1], words[-1] = last, -1
    return EncodedText(ids, types, words, was_truncated)


def _id_of(given: Any, usual: Sequence[str], vocab: dict[str, int]) -> int | None:
    word = given.get("content") if isinstance(given, dict) else given
    return next((vocab[one] for one in (word, *usual) if one in vocab), None)
