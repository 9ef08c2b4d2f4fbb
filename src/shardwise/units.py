"""Text formats of SI values."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def bytes_text(num_bytes: float | None) -> str:
    """Format ``1.50 GiB``; ``unknown`` for ``None``."""
    if num_bytes is None:
        return "unknown"
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
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
    """Format ``1.9 M``, ``12.0 k`` or ``512``; ``unknown`` for ``None``."""
    if number is None:
        return "unknown"
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f} {name}"
    return f"{number:g}"
