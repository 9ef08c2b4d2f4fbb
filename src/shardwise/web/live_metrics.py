"""Live metrics of a run: the tail of ``metrics.jsonl`` as server-sent events, for a bounded number of readers."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

MOST_STREAMS = 32
EVERY_S = 0.5
ALIVE_S = 15.0
TAIL_BYTES = 2**20
READ_BYTES = 2**18
LINE_BYTES = 2**16
COLUMNS = ("step", "loss", "tokens_per_s", "samples_per_s", "step_time_s", "grad_norm", "learning_rate", "tokens")


@dataclass
class MetricsTail:
    """Reader of new lines of a metrics file, from its last `TAIL_BYTES` on.

    ``bad_lines`` counts lines that are no JSON object with a step, or too long. A file that was replaced or cut is read
    anew, and ``restarted`` is set.
    """

    path: Path
    bad_lines: int = 0
    skipped_bytes: int = 0
    restarted: bool = False
    _identity: tuple[int, int] | None = None
    _offset: int = 0
    _rest: bytes = b""
    _skipping: bool = field(default=False)

    def read(self) -> list[dict[str, float | None]]:
        """Return the complete lines that were added since last time, at most `READ_BYTES` of them.

        Raises:
            OSError: the file cannot be read, or is a link or a pipe.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._begin(identity, status.st_size)
            data = os.pread(descriptor, READ_BYTES, self._offset)
        finally:
            os.close(descriptor)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if len(self._rest) > LINE_BYTES:
            self.bad_lines += not self._skipping
            self._rest, self._skipping = b"", True
        return [row for line in lines if line.strip() and (row := self._parsed(line)) is not None]

    def _begin(self, identity: tuple[int, int], size: int) -> None:
        self.restarted = self._identity is not None
        self._identity, self._rest, self.bad_lines = identity, b"", 0
        self._offset = self.skipped_bytes = max(0, size - TAIL_BYTES)
        self._skipping = self._offset > 0

    def _parsed(self, line: bytes) -> dict[str, float | None] | None:
        try:
            found = json.loads(line) if len(line) <= LINE_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            self.bad_lines += 1
            return None
        row = {name: finite(found.get(name)) for name in COLUMNS}
        return row if row["loss"] is not None or "loss" in found else None


def finite(value: Any) -> float | None:
    """Return a finite number as a float; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def event(name: str, data: Any) -> str:
    """Format one server-sent event; JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n"


async def metrics_events(path: Path, stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield events of a metrics file until the reader leaves or the server stops: ``rows``, ``note``, ``restart``."""
    tail, said, quiet = MetricsTail(path), "", 0.0
    yield "retry: 3000\n\n"
    while not stopping():
        try:
            rows = await asyncio.to_thread(tail.read)
            note = _note(tail)
        except OSError as error:
            rows, note = [], f"metrics.jsonl cannot be read: {error.strerror}"
        if tail.restarted:
            tail.restarted = False
            yield event("restart", {})
        if note != said:
            said = note
            yield event("note", {"text": note})
        if rows:
            quiet = 0.0
            yield event("rows", [[row[name] for name in COLUMNS] for row in rows])
            continue
        quiet += EVERY_S
        if quiet >= ALIVE_S:
            quiet = 0.0
            yield ": alive\n\n"
        await asyncio.sleep(EVERY_S)


def _note(tail: MetricsTail) -> str:
    parts = []
    if tail.skipped_bytes:
        parts.append("only the last 1 MiB of metrics.jsonl is drawn")
    if tail.bad_lines:
        parts.append(f"unreadable lines of metrics.jsonl: {tail.bad_lines:,}")
    return "; ".join(parts)


class Streams:
    """Number of open event streams, at most `MOST_STREAMS`."""

    def __init__(self) -> None:
        self.open = 0


class EventStream(StreamingResponse):
    """Server-sent events; refused with 503 while `MOST_STREAMS` are open."""

    def __init__(self, events: AsyncIterator[str], streams: Streams) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and count the stream while it is open."""
        if self._streams.open >= MOST_STREAMS:
            text = f"{MOST_STREAMS} event streams are open, which is the limit: close a tab and try again.\n"
            refusal = PlainTextResponse(text, 503, {"Retry-After": "5", "Connection": "close"})
            await refusal(scope, receive, send)
            return
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1
