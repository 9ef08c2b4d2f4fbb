"""Samples as text with their roles in colour: what has a loss, and what has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.text import Text

from shardwise.report.html.text import rendered
from shardwise.train.config import Config
from shardwise.train.data.chat import ROLES
from shardwise.train.data.corpus import Corpus
from shardwise.train.data.packing import PLAIN
from shardwise.train.data.tokenizer import Tokenizer

_COLOURS = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow", "template": "bright_black"}


@dataclass(frozen=True)
class MarkedText:
    """Text of consecutive tokens of one role, with or without a loss; ``cut``: in no sample."""

    text: str
    role: str
    trained: bool
    cut: bool = False


def parts_of(corpus: Corpus, tokenizer: Tokenizer, document: int, config: Config) -> list[MarkedText]:
    """Return a document of the training side as it is trained on, from its tokens.

    The first token of a document is never a label: nothing stands before it. A conversation is cut where
    `packing.pieces_of` cuts it, and is in no sample if no label is left.
    """
    tokens = corpus.train
    begin, end = int(tokens.starts[document]), int(tokens.starts[document + 1])
    ids = np.asarray(tokens.tokens[begin:end])
    marks = np.full(len(ids), PLAIN, np.uint8) if tokens.marks is None else np.array(tokens.marks[begin:end])
    kept = len(ids)
    if config.packing(corpus.kind) != "joined" and marks[0] != PLAIN:
        kept = config.data.seq_len + 1
        kept = kept if (marks[1:kept] & 1).any() else 0
    marks[:1] &= 0xFE
    marks[kept:] &= 0xFE
    found = []
    for (mark, cut), group in groupby(range(len(ids)), key=lambda index: (int(marks[index]), index >= kept)):
        run = list(group)
        found.append(MarkedText(tokenizer.decode(ids[run[0] : run[-1] + 1]), ROLES[mark // 2], bool(mark & 1), cut))
    return found


def terminal_text(parts: Iterable[MarkedText]) -> Text:
    """Return parts in colours; what has a loss is bold and reversed, what is cut struck through.

    Where there are no colours, what has a loss is in «», and what is cut follows ✂.
    """
    text = Text()
    kept = True
    for part in parts:
        colour = _COLOURS.get(part.role, "default")
        if part.cut:
            text.append("✂" if kept else "", "dim").append(part.text, f"strike {colour}")
            kept = False
        elif part.trained:
            text.append("«", "dim")
            text.append(part.text, f"bold reverse {colour}")
            text.append("»", "dim")
        else:
            text.append(part.text, colour)
    return text


def html_page(title: str, facts: Sequence[str], documents: Sequence[tuple[str, list[MarkedText]]]) -> str:
    """Return a page of its own: no script, nothing fetched."""
    return rendered("sample_preview.html.j2", title=title, facts=facts, documents=documents, roles=_COLOURS)
