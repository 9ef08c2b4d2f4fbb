"""Checks of versions: known broken ones, and driver, torch and GPU compatibility."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.doctor.check import Check, error, ok, unknown, warning, worst
from shardwise.doctor.machine_facts import HostFacts

# Minimum driver for a CUDA major version (NVIDIA, "CUDA Compatibility": minor versions).
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Broken:
    """Known broken version: package, condition, effect, fix, and source."""

    name: str
    applies: Callable[[HostFacts], bool]
    breaks: str
    fix: str
    source: str
    fatal: bool = False


def numbers(version: str) -> tuple[int, ...]:
    """Parse ``2.13.0+cpu`` as ``(2, 13, 0)``; empty for text that does not begin with a number."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


BROKEN = (
    Broken(
        "torch",
        lambda facts: () != numbers(facts.versions.get("torch", "")) < (2, 11),
        "Shardwise uses what torch has since 2.11 only",
        "install torch 2.11 or newer",
        "Shardwise's own requirement",
        fatal=True,
    ),
    Broken(
        "NCCL",
        lambda facts: facts.nccl == (2, 29, 2),
        "NCCL 2.29.2 may hang",
        "install a torch with NCCL 2.29.3 or newer",
        "pytorch/pytorch pull request 174338",
        fatal=True,
    ),
    Broken(
        "NCCL",
        lambda facts: facts.machine == "aarch64" and facts.nccl is not None and facts.nccl < (2, 29, 3),
        "NCCL before 2.29.3, built by an old gcc, loses slots on ARM hosts (GB200, GH200): all ranks spin, no error",
        "install a torch with NCCL 2.29.3 or newer",
        "NCCL 2.29.3-1 release notes; marin-community/marin pull request 8038",
    ),
    Broken(
        "Linux",
        lambda facts: facts.system == "Linux" and () != numbers(facts.kernel)[:2] < (5, 5),
        "processes have hung under Linux before 5.5",
        "update the kernel; a distribution may have mended an old one",
        "accelerate warns of it; huggingface/accelerate issue 1929",
    ),
)


def check_versions(facts: HostFacts) -> list[Check]:
    """Check for installed `BROKEN` versions, and that driver, torch and GPUs are compatible."""
    found = []
    for entry in BROKEN:
        if entry.applies(facts):
            level = error if entry.fatal else warning
            found.append(level("versions", entry.breaks, entry.fix, f"source: {entry.source}"))
    have = {**facts.versions, "Python": facts.python, "Linux": facts.kernel}
    if facts.nccl is not None:
        have["NCCL"] = ".".join(map(str, facts.nccl))
    both = sorted(name for name in facts.versions if name.startswith("nvidia-nccl"))
    if len(both) > 1:
        found.append(
            warning(
                "versions",
                f"{' and '.join(both)} are both installed; they share a place, and one overwrote the other",
                "uninstall the one that torch does not ask for",
            )
        )
    text = ", ".join(f"{name} {version}" for name, version in have.items() if version)
    return [*worst(found, ok("versions", f"none known to be broken: {text}")), *driver(facts)]


def driver(facts: HostFacts) -> list[Check]:
    """Check the driver against torch's CUDA, and torch's kernels against the GPUs."""
    if not facts.gpus.gpus:
        return []
    if facts.torch_cuda is None:
        return [
            error(
                "driver",
                f"torch {facts.versions.get('torch', '')} was built without CUDA, so the GPUs stay idle",
                "install the CUDA build of torch (pytorch.org/get-started names the index for your CUDA)",
            )
        ]
    text, major = f"driver {facts.gpus.driver or 'unknown'}, torch for CUDA {facts.torch_cuda}", facts.torch_cuda
    have, needed = numbers(facts.gpus.driver or ""), LEAST_DRIVER.get(numbers(major)[0])
    if not have or needed is None:
        return [unknown("driver", f"{text}: whether they go together is not known")]
    if have[0] < needed:
        return [
            error(
                "driver",
                f"{text}, which needs driver {needed} or newer",
                f"update the driver to {needed} or newer, or install a torch for an older CUDA",
                "source: NVIDIA, CUDA Compatibility",
            )
        ]
    return [*_starts(facts, text), *_kernels(facts)]


def _starts(facts: HostFacts, text: str) -> list[Check]:
    if facts.cuda_problem is None:
        return [ok("driver", text)]
    unregistered = [gpu.index for gpu in facts.gpus.gpus if gpu.fabric in ("not started", "in progress")]
    if unregistered or "802" in facts.cuda_problem or "system not yet initialized" in facts.cuda_problem:
        fix = "start nvidia-fabricmanager, in the very version of the driver; the NVSwitches are not set up without it"
    else:
        fix = "see whether nvidia-smi works; restart after an update of the driver, and give a container its GPUs"
    return [error("driver", f"{text}, but CUDA does not start: {facts.cuda_problem}", fix)]


def _kernels(facts: HostFacts) -> list[Check]:
    """Check torch's kernels.

    One for an older generation of the same major version runs, and PTX (``compute_``) of any older one.
    """
    archs = facts.torch_archs
    if not archs:
        return []
    missing = []
    for gpu in facts.gpus.gpus:
        if gpu.capability is None:
            continue
        major, minor = gpu.capability
        found = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch) for arch in archs]
        runs = any(
            (int(one[2]) == major and int(one[3]) <= minor)
            if one[1] == "sm"
            else (int(one[2]), int(one[3])) <= gpu.capability
            for one in found
            if one is not None
        )
        if not runs:
            missing.append(f"GPU {gpu.index} ({gpu.name}, sm_{major}{minor})")
    if not missing:
        return []
    return [
        error(
            "driver",
            f"this torch has no kernels for {', '.join(missing)}: it has {', '.join(archs)}",
            "install a torch that has them: a newer one for a new GPU, an older one for an old GPU",
        )
    ]
