"""Safe HTML: every plain string is escaped, only `Safe` is used unchanged."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from shardwise.units import bytes_text, seconds_text

UNKNOWN = "unknown"
_VOID = {"meta", "br", "link"}
NUMBERS = 12
"""Rows of the table under a chart: about one for each tenth of the run."""


class Safe(str):
    """Text that is HTML already."""

    __slots__ = ()


def el(name: str, *children: str | None, **attributes: str | None) -> Safe:
    """Build one element; children that are not `Safe`, and attributes, are escaped.

    ``None`` is left out.

    ``class_`` is the attribute class, ``data_label`` is data-label.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(value, quote=True)}"')
    opening = f"<{' '.join(words)}>"
    return Safe(opening) if name in _VOID else Safe(f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[str | None]) -> Safe:
    """Concatenate children."""
    kept = (child for child in children if child is not None)
    return Safe("".join(child if isinstance(child, Safe) else html.escape(child, quote=True) for child in kept))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | None]],
    *,
    numbers: Iterable[int] = (),
    caption: str | None = None,
    class_: str = "",
) -> Safe:
    """Build a table that scrolls if it is wider than the page.

    ``numbers`` are the right-aligned columns.

    With class ``receipt`` it becomes a list of cards on a phone.
    """
    right = set(numbers)
    names = [el("th", name, scope="col", class_="n" if place in right else None) for place, name in enumerate(head)]
    body = []
    for row in rows:
        cells = [
            el("td", cell, data_label=name or None, class_="n" if place in right else None)
            for place, (name, cell) in enumerate(zip(head, row, strict=True))
        ]
        body.append(el("tr", *cells))
    title = None if caption is None else el("h3", caption)
    inner = el("table", el("thead", el("tr", *names)), el("tbody", *body), class_=class_ or None)
    return joined([title, el("div", inner, class_="scroll", tabindex="0")])


def pairs(rows: Iterable[tuple[str, str]]) -> Safe:
    """Build a list of names and values, one below the other."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in rows), class_="pairs")


def milliseconds(seconds: float | None) -> str:
    """Format in milliseconds with three digits below ten seconds; else in seconds."""
    if seconds is None:
        return UNKNOWN
    if not seconds:
        return "0 ms"
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def percent(share: float | None) -> str:
    """Format ``12 %``, ``3.4 %``, ``< 0.1 %``; ``unknown`` for ``None``."""
    if share is None:
        return UNKNOWN
    value = share * 100
    if 0 < value < 0.1:
        return "< 0.1 %"
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.1f} %"


def number(value: float | None, digits: int = 4) -> str:
    """Format with ``digits`` significant digits; ``unknown`` for ``None``."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def fixed(value: float | None) -> str:
    """Format with three decimals, for losses; ``unknown`` for ``None``."""
    return UNKNOWN if value is None else f"{value:.3f}"


def size(num_bytes: float | None) -> str:
    """Format a number of bytes."""
    return bytes_text(num_bytes)


def span(seconds: float | None) -> str:
    """Format a long time."""
    return seconds_text(seconds)


def sampled(length: int) -> list[int]:
    """Return up to `NUMBERS` row indices, including the first and the last."""
    if length <= NUMBERS:
        return list(range(length))
    return sorted({round(i * (length - 1) / (NUMBERS - 1)) for i in range(NUMBERS)})


def section(key: str, title: str, *children: str | None) -> Safe:
    """Build a section with its heading."""
    return el("section", el("h2", title), *children, id=key)


def chart(
    key: str, caption: str, numbers: Safe | None = None, *, drawn: bool = True, keys: Iterable[tuple[str, str]] = ()
) -> Safe:
    """Build a chart's place with its colour keys, its caption, and its numbers as a table."""
    box = el("div", class_="chart", data_figure=key, role="img", aria_label=caption) if drawn else None
    table_of = None
    if numbers is not None:
        table_of = el("details", el("summary", "the numbers"), numbers, open=None if drawn else "")
    return el("figure", box, colour_keys(keys) if drawn else None, el("figcaption", caption), table_of)


def colour_keys(keys: Iterable[tuple[str, str | Safe]]) -> Safe | None:
    """Build a legend of style sheet variables and words; nothing for fewer than two."""
    lines = [el("li", el("i", style=f"background:var(--{colour})"), text) for colour, text in keys]
    return el("ul", *lines, class_="keys") if len(lines) > 1 else None
