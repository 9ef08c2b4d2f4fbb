"""Samples as text with their roles in colour: what has a loss, and what has none."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.text import Text

from shardwise.train.data.chat import ROLES
from shardwise.train.data.corpus import Corpus
from shardwise.train.data.tokenizer import Tokenizer

_COLOURS = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow", "template": "bright_black"}
_CSS = {"system": "#8250df", "user": "#0550ae", "assistant": "#116329", "tool": "#7d4e00", "template": "#6e7781"}


@dataclass(frozen=True)
class MarkedText:
    """Text of consecutive tokens of one role, with or without a loss."""

    text: str
    role: str
    trained: bool


def parts_of(corpus: Corpus, tokenizer: Tokenizer, document: int) -> list[MarkedText]:
    """Return a document of the training side as it is trained on, from its tokens.

    The first token of a document is never a label: nothing stands before it.
    """
    tokens = corpus.train
    begin, end = int(tokens.starts[document]), int(tokens.starts[document + 1])
    ids = np.asarray(tokens.tokens[begin:end])
    plain = 2 * ROLES.index("text") + 1
    marks = np.full(len(ids), plain, np.uint8) if tokens.marks is None else np.array(tokens.marks[begin:end])
    marks[:1] &= 0xFE
    found = []
    for mark, group in groupby(range(len(ids)), key=lambda index: int(marks[index])):
        run = list(group)
        found.append(MarkedText(tokenizer.decode(ids[run[0] : run[-1] + 1]), ROLES[mark // 2], bool(mark & 1)))
    return found


def terminal_text(parts: Iterable[MarkedText]) -> Text:
    """Return parts in colours; what has a loss is bold and reversed, also where there are no colours: in «»."""
    text = Text()
    for part in parts:
        colour = _COLOURS.get(part.role, "default")
        if part.trained:
            text.append("«", "dim")
            text.append(part.text, f"bold reverse {colour}")
            text.append("»", "dim")
        else:
            text.append(part.text, colour)
    return text


def html_page(title: str, facts: Sequence[str], documents: Sequence[tuple[str, list[MarkedText]]]) -> str:
    """Return a page of its own: no script, nothing fetched."""
    return "".join(_page(title, facts, documents))


def _page(title: str, facts: Sequence[str], documents: Sequence[tuple[str, list[MarkedText]]]) -> Iterator[str]:
    colours = "".join(f".{role}{{color:{colour}}}" for role, colour in _CSS.items())
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>body{{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #d0d7de;padding:1rem;"
        f"border-radius:6px}}mark{{background:#dafbe1;font-weight:600;color:inherit}}{colours}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>Green background: tokens with a loss.</p><ul>"
    )
    for fact in facts:
        yield f"<li>{html.escape(fact)}</li>"
    yield "</ul><p>"
    yield " · ".join(f'<span class="{role}">{role}</span>' for role in _CSS)
    yield "</p>"
    for name, parts in documents:
        yield f"<h2>{html.escape(name)}</h2><pre>"
        for part in parts:
            text, tag = html.escape(part.text), "mark" if part.trained else "span"
            yield f'<{tag} class="{part.role}">{text}</{tag}>'
        yield "</pre>"
    yield "</body></html>\n"
