"""What a CPU is called: enough to tell that a measurement comes from another machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor_name() -> str:
    """The processor's own name; of other systems than Linux what Python knows, which may be its architecture alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
