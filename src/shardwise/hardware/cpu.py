"""Processor name and cores, to recognize measurements from another machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor_name() -> str:
    """Processor name; on systems other than Linux Python's, which may be only the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
