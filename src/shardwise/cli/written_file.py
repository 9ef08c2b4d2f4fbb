"""Write the file that a verb's ``-o`` names."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import UserError


def write_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path``.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"-o '{path}' cannot be written: {error.strerror}; choose another file") from None
