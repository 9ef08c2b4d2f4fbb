"""Read GPU facts from the text of ``nvidia-smi -q``, live or from a file, without NVML.

The text is for people, and its names change with the driver: missing values are ``None``. It follows the
manual of nvidia-smi, drivers 450 to 580.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from shardwise.measure.gpu.nvml import GpuMachine, GpuState
from shardwise.units import MIB

TIMEOUT_S = 30.0
_REASONS = {
    "Idle": "idle",
    "Applications Clocks Setting": "application clocks",
    "SW Power Cap": "power cap",
    "HW Slowdown": "hardware slowdown",
    "Sync Boost": "sync boost",
    "SW Thermal Slowdown": "software thermal slowdown",
    "HW Slowdown/HW Thermal Slowdown": "hardware thermal slowdown",
    "HW Slowdown/HW Power Brake Slowdown": "power brake",
    "Display Clock Setting": "display clocks",
}
_MODES = {"Default": "default", "Prohibited": "prohibited", "Exclusive_Process": "exclusive process"}
Facts = dict[str, list[str]]


class QuerySource:
    """Source that runs ``nvidia-smi -q``; no GPUs, with the reason, if that does not answer."""

    def read(self) -> GpuMachine:
        """Read all GPUs now."""
        try:
            done = subprocess.run(
                ["nvidia-smi", "-q"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return GpuMachine(problem=f"nvidia-smi does not answer: {error}")
        if done.returncode != 0:
            message = (done.stdout or done.stderr).strip().splitlines()
            return GpuMachine(problem=f"nvidia-smi fails: {message[0] if message else f'exit code {done.returncode}'}")
        return parse_query(done.stdout)


def parse_query(text: str) -> GpuMachine:
    """Parse the GPUs that the text lists, in its order."""
    head, *blocks = re.split(r"(?m)^(?=GPU [0-9A-Fa-f]+:[0-9A-Fa-f:.]+\s*$)", text)
    top = _facts(head)
    version = re.fullmatch(r"(\d+)\.(\d+)", _one(top, "CUDA Version") or "")
    gpus = tuple(_state(index, _facts(block)) for index, block in enumerate(blocks))
    return GpuMachine(
        gpus=gpus,
        driver=_one(top, "Driver Version"),
        cuda=(int(version[1]), int(version[2])) if version else None,
        problem=None if gpus else "nvidia-smi -q lists no GPU",
    )


def _facts(block: str) -> Facts:
    """Map the path of headings to each value: ``PCI/GPU Link Info/Link Width/Max``."""
    found: Facts = {}
    path: list[tuple[int, str]] = []
    for line in block.splitlines():
        match = re.match(r"( *)(.*?)(?:\s+: (.*))?$", line)
        if match is None or not match[2].strip():
            continue
        depth, name, value = len(match[1]), match[2].strip(), match[3]
        while path and path[-1][0] >= depth:
            path.pop()
        path.append((depth, name))
        if value is not None and value.strip() not in ("N/A", "[N/A]", "Requested functionality has been deprecated"):
            key = "/".join(part for _, part in path if not re.match(r"GPU [0-9A-Fa-f]+:", part))
            found.setdefault(key, []).append(value.strip())
    return found


def _state(index: int, facts: Facts) -> GpuState:
    link = "PCI/GPU Link Info"
    maximum, memory = _number(facts, f"{link}/PCIe Generation/Max"), _number(facts, "FB Memory Usage/Total")
    used, utilisation = _number(facts, "FB Memory Usage/Used"), _number(facts, "Utilization/GPU", "Utilization/Gpu")
    persistence, mig, mode = (_one(facts, key) for key in ("Persistence Mode", "MIG Mode/Current", "Compute Mode"))
    power = [f"{title}/" for title in ("GPU Power Readings", "Power Readings")]
    ecc = _one(facts, "ECC Mode/Current", "Ecc Mode/Current")
    pending, failed = (_one(facts, f"Remapped Rows/{key}") for key in ("Pending", "Remapping Failure Occurred"))
    return GpuState(
        index=index,
        name=_one(facts, "Product Name") or "unknown",
        uuid=_one(facts, "GPU UUID"),
        bus=_one(facts, "PCI/Bus Id"),
        sm_clock_hz=_scaled(_number(facts, "Clocks/SM"), 1e6),
        max_sm_clock_hz=_scaled(_number(facts, "Max Clocks/SM"), 1e6),
        memory_clock_hz=_scaled(_number(facts, "Clocks/Memory"), 1e6),
        max_memory_clock_hz=_scaled(_number(facts, "Max Clocks/Memory"), 1e6),
        temperature_c=_number(facts, "Temperature/GPU Current Temp"),
        slowdown_c=_number(facts, "Temperature/GPU Slowdown Temp"),
        power_w=_number(facts, *(f"{title}{key}" for title in power for key in ("Power Draw", "Average Power Draw"))),
        power_limit_w=_number(
            facts,
            *(f"{title}{key}" for title in power for key in ("Current Power Limit", "Enforced Power Limit")),
        ),
        default_power_limit_w=_number(facts, *(f"{title}Default Power Limit" for title in power)),
        reasons=_reasons(facts),
        utilisation=_scaled(utilisation, 0.01),
        memory_bytes=None if memory is None else int(memory * MIB),
        used_bytes=None if used is None else int(used * MIB),
        pcie_generation=_full(_number(facts, f"{link}/PCIe Generation/Current")),
        pcie_slot_generation=_full(maximum),
        pcie_card_generation=_full(_number(facts, f"{link}/PCIe Generation/Device Max")),
        pcie_lanes=_full(_number(facts, f"{link}/Link Width/Current")),
        pcie_max_lanes=_full(_number(facts, f"{link}/Link Width/Max")),
        ecc=None if ecc is None else ecc == "Enabled",
        ecc_uncorrected=_errors(facts),
        remap_pending=None if pending is None else pending == "Yes",
        remap_failed=None if failed is None else failed == "Yes",
        mig=None if mig is None else mig == "Enabled",
        persistence=None if persistence is None else persistence == "Enabled",
        compute_mode=None if mode is None else _MODES.get(mode, mode),
        fabric=(_one(facts, "Fabric/State") or "").lower() or None,
        processes=_processes(facts),
    )


def _reasons(facts: Facts) -> tuple[str, ...] | None:
    for title in ("Clocks Event Reasons", "Clocks Throttle Reasons"):
        reasons = {name: _one(facts, f"{title}/{key}") for key, name in _REASONS.items()}
        if any(value is not None for value in reasons.values()):
            return tuple(name for name, value in reasons.items() if value == "Active")
    return None


def _errors(facts: Facts) -> int | None:
    """Count uncorrectable errors since driver load; newer drivers list SRAM's as two kinds."""
    counts = [
        int(values[0])
        for key, values in facts.items()
        if key.startswith("ECC Errors/Volatile/") and "Uncorrectable" in key and values[0].isdigit()
    ]
    return sum(counts) if counts else None


def _processes(facts: Facts) -> tuple[int, ...] | None:
    if _one(facts, "Processes") == "None":
        return ()
    found = [int(value) for value in facts.get("Processes/Process ID", []) if value.isdigit()]
    return tuple(found) if found else None


def _one(facts: Facts, *keys: str) -> str | None:
    """Return the value of the first key that exists."""
    return next(_values(facts, keys), None)


def _values(facts: Facts, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        yield from facts.get(key, [])[:1]


def _number(facts: Facts, *keys: str) -> float | None:
    """Parse the number at the start of a value: ``70.00 W``, ``16x``, ``35 C``."""
    found = re.match(r"-?\d+(\.\d+)?", _one(facts, *keys) or "")
    return float(found.group()) if found else None


def _full(value: float | None) -> int | None:
    return None if value is None else int(value)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
