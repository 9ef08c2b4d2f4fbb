"""`logged`: what a test logs, in place of pytest's own plugin.

That one hangs two handlers into each of torch's forty loggers, three times for each test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class Logged(logging.Handler):
    """Records of the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    @property
    def text(self) -> str:
        """The messages, a line each."""
        return "".join(record.getMessage() + "\n" for record in self.records)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[Logged]:
    """What is logged from here on, warnings and worse."""
    handler = Logged()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)
