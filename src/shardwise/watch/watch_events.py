"""``watch.json``: what the watchdog has found in a run."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.train.run_files import replace_file


def add_event(report: Path, event: Mapping[str, object]) -> None:
    """Append an event to the report, whole or not at all: on a full disk the console alone has it.

    Its folder is made: a loop that is only watched has written nothing there.
    """
    events: list[object] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        events = list(json.loads(report.read_text())["events"])
    events.append({"time": time.time(), "node": platform.node(), **event})
    with contextlib.suppress(OSError):
        report.parent.mkdir(parents=True, exist_ok=True)
        replace_file(report, json.dumps({"schema": 1, "events": events}, indent=1))
