"""Text formats of SI values."""

from __future__ import annotations

import math
from collections.abc import Sequence

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4


def bytes_text(num_bytes: float | None) -> str:
    """Format ``1.50 GiB``; ``unknown`` for ``None``."""
    if num_bytes is None:
        return "unknown"
    for size, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size * (1 - 0.005 / 1024):  # what would round to 1024.00 of the next
            return f"{num_bytes / size:.2f} {name}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Format ``80 µs``, ``250 ms``, ``12.3 s`` or ``3 min 04 s``; ``unknown`` for ``None``."""
    if seconds is None:
        return "unknown"
    if 0 < seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def hours_text(hours: float | None) -> str:
    """Format the length of a run: ``1,230 hours (51.2 days)``, ``9.6 hours`` or ``3 min 04 s``."""
    if hours is None or hours < 1:
        return seconds_text(None if hours is None else hours * 3600)
    days = f" ({hours / 24:.1f} days)" if hours >= 24 else ""
    return f"{number_text(hours)} {'hour' if number_text(hours) == '1' else 'hours'}{days}"


def count_text(number: float | None) -> str:
    """Format ``1.9 M``, ``12.0 k``, ``512`` or ``58.3``; ``unknown`` for ``None``."""
    if number is None:
        return "unknown"
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * (1 - 0.5e-3 if size == 1e3 else 1 - 0.5e-4):  # what would round to 1000 of the next
            return f"{number / size:.1f} {name}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def number_text(number: float | None) -> str:
    """Format ``1,440``, ``12.3`` or ``0.042``: three digits, or all of the integer; ``unknown`` for ``None``."""
    if number is None:
        return "unknown"
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """Format ``1 rank``, ``1,200 ranks`` or ``3 micro batches``."""
    several = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{several * (number != 1)}"


def money_text(dollars: float | None) -> str:
    """Format ``$12.30``, ``$1,230``, ``$197.5 k``, ``$0.0021``; ``unknown`` for ``None``."""
    if dollars is None:
        return "unknown"
    if dollars >= 1e4:
        return f"${count_text(dollars)}"
    if dollars >= 99.995:
        return f"${dollars:,.0f}"
    if dollars >= 0.0995 or dollars == 0:
        return f"${dollars:.2f}"
    return f"${dollars:.{1 - math.floor(math.log10(dollars))}f}".rstrip("0")


def listed(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
