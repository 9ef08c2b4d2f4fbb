"""Files of a run's folder: their names, and the environment, which is written as the run starts.

The environment is stored with the run, because a report may be made later and elsewhere. It loads no torch, and has no
host, user or path.
"""

from __future__ import annotations

import contextlib
import json
import platform
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.hardware.cpu import cores_here, processor_name

PACKAGES = ("shardwise", "torch", "triton", "transformers", "tokenizers", "datasets", "safetensors", "numpy")


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
    LOCK = ".lock"


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


def environment_facts() -> dict[str, str]:
    """Return names and values of this machine and its packages; missing ones are left out."""
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    facts["CPU"] = f"{processor_name()}, {cores_here()} cores for this process"
    return {**facts, **gpu_facts()}


def gpu_facts() -> dict[str, str]:
    """Return the GPUs' names and driver version from NVML; empty without a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        count = pynvml.nvmlDeviceGetCount()
        names = [str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)]
        found = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return {"GPU": found, "driver": str(pynvml.nvmlSystemGetDriverVersion())} if names else {}
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def write_environment(folder: Path) -> None:
    """Write the current facts to ``folder``; a run that resumes elsewhere replaces them.

    Raises:
        OSError: the folder cannot be written.
    """
    replace_file(folder / RunFile.ENVIRONMENT, json.dumps(environment_facts(), indent=1))
