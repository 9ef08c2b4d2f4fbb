"""Environment of a run: versions, system, devices and driver.

Stored with the run, because a report may be made later and elsewhere. It loads no torch, and has no host, user or path.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.hardware.cpu import cores_here, processor_name

ENVIRONMENT = "environment.json"
PACKAGES = ("shardwise", "torch", "triton", "transformers", "tokenizers", "datasets", "safetensors", "numpy")


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
    temporary = folder / f"{ENVIRONMENT}.tmp"
    temporary.write_text(json.dumps(environment_facts(), indent=1))
    temporary.replace(folder / ENVIRONMENT)
