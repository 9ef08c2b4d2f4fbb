"""Text of the pages: numbers in words, and the templates around them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from shardwise.units import bytes_text, count_text, counted, money_text, seconds_text

if TYPE_CHECKING:
    from jinja2 import Environment

UNKNOWN = "unknown"
NUMBERS = 12
"""Rows of the table under a chart: about one for each tenth of the run."""


def rendered(template: str, **facts: Any) -> str:
    """Lay out ``facts`` by a template of this package.

    Every text of theirs is escaped; only what a template marks as ``safe`` is not, and it marks only our own assets.
    """
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # 0.1 s, and only a page needs it

    environment = Environment(
        loader=PackageLoader("shardwise.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    named = (milliseconds, percent, number, fixed, bytes_text, seconds_text, count_text, counted, money_text, sentence)
    environment.filters |= {function.__name__: function for function in named}
    return environment


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


def sentence(text: str) -> str:
    """Begin with a capital letter and end with a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def sampled(length: int) -> list[int]:
    """Return up to `NUMBERS` row indices, including the first and the last."""
    if length <= NUMBERS:
        return list(range(length))
    return sorted({round(i * (length - 1) / (NUMBERS - 1)) for i in range(NUMBERS)})
