"""Files of a run's folder: their names, and how one is replaced."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path


class RunFile(StrEnum):
    """Names of the files in a run's folder (``train.output``)."""

    JOB = "job.json"
    PLAN = "plan.toml"
    ENVIRONMENT = "environment.json"
    METRICS = "metrics.jsonl"
    TIMING = "timing.json"
    FINDINGS = "findings.json"
    SUMMARY = "summary.json"
    RECORD = "report.json"
    PAGE = "report.html"
    PREEMPTED = "preempted"
    LOCK = ".lock"
    HEARTBEATS = "watch"
    WATCH = "watch.json"
    NONFINITE = "nonfinite.json"
    OBSERVED = "observed.json"


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically by ``text``: no reader sees half of it.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
