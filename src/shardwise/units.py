"""Text formats of SI values."""

from __future__ import annotations

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
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {name}"
    return f"{num_bytes:.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Format ``250 ms``, ``12.3 s`` or ``3 min 04 s``; ``unknown`` for ``None``."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count_text(number: float | None) -> str:
    """Format ``1.9 M``, ``12.0 k``, ``512`` or ``58.3``; ``unknown`` for ``None``."""
    if number is None:
        return "unknown"
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f} {name}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """Format ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def money_text(dollars: float | None) -> str:
    """Format ``$12.30``, ``$1,230``, ``$0.0021``; ``unknown`` for ``None``."""
    if dollars is None:
        return "unknown"
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    return f"${dollars:.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.2g}"


def listed(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
