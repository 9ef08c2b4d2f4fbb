"""Checks of GPUs: devices, heat and clocks, PCIe links, memory errors, other processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

from shardwise.doctor.check import Check, error, ok, unknown, warning, worst
from shardwise.doctor.machine_facts import HostFacts
from shardwise.hardware.gpus import find_gpu
from shardwise.measure.gpu.nvml import GpuState
from shardwise.measure.gpu.xids import MEANING
from shardwise.units import bytes_text

NEAR_SLOWDOWN_C = 5.0
"""A GPU this close to its throttling temperature is reported as hot."""
LOW_LIMIT = 0.9
"""A power limit below this share of the card's default is reported."""
USED_BYTES = 1 << 30
"""Memory in use on a GPU before a run; drivers and displays take less."""
IDLE = 0.1


def check_gpus(facts: HostFacts) -> list[Check]:
    """Run all checks of this file, in display order."""
    if not facts.gpus.gpus:
        return [devices(facts)]
    checks: list[Callable[[HostFacts], list[Check]]] = [clocks, pcie, health, sharing]
    return [devices(facts), *(found for check in checks for found in check(facts))]


def devices(facts: HostFacts) -> Check:
    """Check the number and kind of GPUs against the number of ranks."""
    gpus = facts.gpus.gpus
    if not gpus:
        text = f"no NVIDIA GPU: {facts.gpus.problem or 'not checked'}"
        if "CUDA_VISIBLE_DEVICES" in (facts.gpus.problem or ""):
            return warning("devices", text, "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there")
        if facts.torch_cuda is not None:
            fix = "install the driver, or give the container its GPUs (docker run --gpus all)"
            return warning("devices", f"{text}; this torch is built for CUDA {facts.torch_cuda}", fix)
        return ok("devices", f"{text}; ranks run on {facts.cores} CPU cores (gloo)")
    counts = Counter(gpu.name for gpu in gpus)
    text = ", ".join(f"{count} × {name}" for name, count in counts.items())
    memory = sorted({gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None})
    text += f" with {' and '.join(map(bytes_text, memory))}" if memory else ""
    if len(gpus) < facts.ranks:
        return error("devices", f"{text}, and {facts.ranks} ranks: a rank needs a GPU of its own", "lower --nproc")
    if len(counts) > 1:
        slow = "the slowest sets the pace of all, and the smallest the size"
        return warning("devices", f"{text}: {slow}", "name equal ones in CUDA_VISIBLE_DEVICES")
    split = [gpu.index for gpu in gpus if gpu.mig]
    if split:
        what = f"{text}; {_who(split)} split by MIG: a rank sees one slice, and NCCL joins no slices"
        return warning("devices", what, "use one rank on one slice, or turn MIG off: nvidia-smi -mig 0")
    if facts.settings.get("CUDA_VISIBLE_DEVICES"):
        text += f" (CUDA_VISIBLE_DEVICES={facts.settings['CUDA_VISIBLE_DEVICES']})"
    if find_gpu(gpus[0].name) is None:
        return ok("devices", f"{text}; not in the hardware table, so its peak is unknown")
    return ok("devices", text)


def clocks(facts: HostFacts) -> list[Check]:
    """Check heat and the reasons of reduced clocks."""
    gpus, found = facts.gpus.gpus, []
    for reason, what, fix in (
        (
            "hardware thermal slowdown",
            "too hot: the hardware has reduced the clock",
            "cool it: fans, dust, air flow, room",
        ),
        ("software thermal slowdown", "hot: the driver lowers the clock", "cool it: fans, dust, air flow, room"),
        ("power brake", "slowed down by the machine (power brake)", "check the power supplies and their load"),
        ("hardware slowdown", "slowed down by the hardware", "check cooling, power supply and power cables"),
    ):
        throttled_gpus = [gpu for gpu in gpus if reason in (gpu.reasons or ())]
        explained = reason == "hardware slowdown" and all(len(gpu.throttled) > 1 for gpu in throttled_gpus)
        if throttled_gpus and not explained:
            found.append(
                error(
                    "clocks", f"{_who([g.index for g in throttled_gpus])} {what}", fix, *map(_numbers, throttled_gpus)
                )
            )
    throttled = {gpu.index for gpu in gpus if gpu.throttled}
    hot = [
        gpu
        for gpu in gpus
        if gpu.index not in throttled
        and gpu.temperature_c is not None
        and gpu.slowdown_c is not None
        and gpu.temperature_c >= gpu.slowdown_c - NEAR_SLOWDOWN_C
    ]
    if hot:
        text = f"{_who([g.index for g in hot])} within {NEAR_SLOWDOWN_C:g} °C of slowing down"
        found.append(warning("clocks", text, "cool it: fans, dust, air flow, room", *map(_numbers, hot)))
    found += [*_power(gpus), *_fixed(gpus)]
    if found:
        return found
    if all(gpu.reasons is None for gpu in gpus):
        return [unknown("clocks", "the driver does not report what limits the clocks")]
    return [ok("clocks", "nothing limits them but load, power limit or idleness", *map(_numbers, gpus))]


def _power(gpus: Sequence[GpuState]) -> list[Check]:
    lowered = [
        gpu
        for gpu in gpus
        if gpu.power_limit_w and gpu.default_power_limit_w and gpu.power_limit_w < LOW_LIMIT * gpu.default_power_limit_w
    ]
    if not lowered:
        return []
    one = lowered[0]
    text = (
        f"{_who([g.index for g in lowered])} limited to {one.power_limit_w:.0f} W of {one.default_power_limit_w:.0f} W"
    )
    fix = f"nvidia-smi -pl {one.default_power_limit_w:.0f}, unless it is meant so"
    return [warning("clocks", f"{text}: the clock falls under load", fix, *map(_numbers, lowered))]


def _fixed(gpus: Sequence[GpuState]) -> list[Check]:
    fixed = [
        gpu
        for gpu in gpus
        if "application clocks" in (gpu.reasons or ())
        and gpu.sm_clock_hz is not None
        and gpu.max_sm_clock_hz is not None
        and gpu.sm_clock_hz < LOW_LIMIT * gpu.max_sm_clock_hz
    ]
    if not fixed:
        return []
    text = f"{_who([g.index for g in fixed])} limited below the highest clock by application clocks"
    return [warning("clocks", text, "nvidia-smi -rac, unless it is meant so", *map(_numbers, fixed))]


def pcie(facts: HostFacts) -> list[Check]:
    """Check lanes and generation of each GPU's host link against card and slot.

    An idle link drops to a low generation, so only a busy GPU's low generation is a finding.
    """
    gpus = [gpu for gpu in facts.gpus.gpus if gpu.pcie_lanes is not None or gpu.pcie_generation is not None]
    if not gpus:
        return [unknown("PCIe", "the driver does not report it")]
    found = []
    narrow = [gpu for gpu in gpus if gpu.pcie_lanes and gpu.pcie_max_lanes and gpu.pcie_lanes < gpu.pcie_max_lanes]
    if narrow:
        lanes = f"x{narrow[0].pcie_lanes} of x{narrow[0].pcie_max_lanes}"
        text = f"{_who([g.index for g in narrow])} on fewer PCIe lanes than card and slot have: {lanes}"
        fix = "reseat the card, try another slot or riser; see whether the BIOS splits the slot's lanes"
        found.append(warning("PCIe", text, fix, *map(_link, narrow)))
    slot = [
        gpu
        for gpu in gpus
        if gpu.pcie_slot_generation and gpu.pcie_card_generation and gpu.pcie_slot_generation < gpu.pcie_card_generation
    ]
    if slot:
        text = (
            f"{_who([g.index for g in slot])} in a slot of PCIe {slot[0].pcie_slot_generation}, "
            f"and the card can do {slot[0].pcie_card_generation}"
        )
        found.append(warning("PCIe", text, "use a slot of the card's generation, or see the BIOS", *map(_link, slot)))
    busy = [
        gpu
        for gpu in gpus
        if gpu.pcie_generation
        and gpu.pcie_slot_generation
        and gpu.pcie_generation < gpu.pcie_slot_generation
        and (gpu.utilisation or 0) > IDLE
        and "idle" not in (gpu.reasons or ())
    ]
    if busy:
        slow, most = busy[0].pcie_generation, busy[0].pcie_slot_generation
        text = f"{_who([g.index for g in busy])} at work over PCIe {slow}, and card and slot can do {most}"
        fix = "see the BIOS (link speed, ASPM), try without the riser, reseat the card"
        found.append(warning("PCIe", text, fix, *map(_link, busy)))
    resting = any(
        g.pcie_generation and g.pcie_slot_generation and g.pcie_generation < g.pcie_slot_generation for g in gpus
    )
    rest = "; idle links rest at a lower generation and rise under load" if resting and not busy else ""
    return worst(found, ok("PCIe", f"{_links(gpus)}{rest}", *map(_link, gpus)))


def health(facts: HostFacts) -> list[Check]:
    """Check memory errors, and the driver's messages in the kernel log."""
    found = []
    for gpu in facts.gpus.gpus:
        if gpu.remap_failed:
            found.append(error("health", f"GPU {gpu.index}: memory rows could not be remapped", "replace the card"))
        elif gpu.remap_pending:
            fix = f"reset it when it is free: nvidia-smi -r -i {gpu.index}"
            found.append(warning("health", f"GPU {gpu.index}: memory rows wait to be remapped", fix))
        if gpu.ecc_uncorrected:
            text = f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrectable memory errors since the driver was loaded"
            found.append(error("health", text, f"reset it: nvidia-smi -r -i {gpu.index}; replace it if they come back"))
    for xid in facts.xids or ():
        if xid.is_hardware:
            text = f"Xid {xid.number} of the card at {xid.bus}, {xid.times} ×: {xid.text}"
            found.append(error("health", text, MEANING[xid.number][1]))
    if found:
        return found
    known = any(gpu.ecc_uncorrected is not None for gpu in facts.gpus.gpus)
    log = "no hardware error in the kernel's log" if facts.xids is not None else "the kernel's log may not be read"
    if not known and facts.xids is None:
        return [unknown("health", f"these GPUs count no memory errors, and {log}", "run it as root once")]
    memory = "no uncorrectable memory error" if known else "these GPUs count no memory errors"
    return [ok("health", f"{memory}; {log}")]


def sharing(facts: HostFacts) -> list[Check]:
    """Check for other processes on the GPUs."""
    found = []
    gpus = facts.gpus.gpus
    prohibited = [gpu.index for gpu in gpus if gpu.compute_mode == "prohibited"]
    if prohibited:
        fix = "nvidia-smi -c 0"
        found.append(error("sharing", f"{_who(prohibited)} closed to programs (compute mode prohibited)", fix))
    own = os.getpid()
    for gpu in gpus:
        others = [pid for pid in gpu.processes or () if pid != own]
        if others or (gpu.used_bytes or 0) > USED_BYTES:
            who = f"processes {', '.join(map(str, others))}" if others else "something that this process may not see"
            used = bytes_text(gpu.used_bytes)
            text = f"GPU {gpu.index}: {who} hold {used} of {bytes_text(gpu.memory_bytes)}"
            found.append(warning("sharing", text, "end them, or leave this GPU out by CUDA_VISIBLE_DEVICES"))
    if found:
        return found
    if all(gpu.processes is None and gpu.used_bytes is None for gpu in gpus):
        return [unknown("sharing", "the driver does not report who is on the GPUs")]
    return [ok("sharing", "no other process is on the GPUs")]


def _numbers(gpu: GpuState) -> str:
    """Format one GPU's clock, heat and power in a line."""
    words = []
    if gpu.sm_clock_hz is not None:
        most = "" if gpu.max_sm_clock_hz is None else f" of {gpu.max_sm_clock_hz / 1e6:.0f}"
        words.append(f"{gpu.sm_clock_hz / 1e6:.0f}{most} MHz")
    if gpu.temperature_c is not None:
        slow = "" if gpu.slowdown_c is None else f" (slows down at {gpu.slowdown_c:.0f})"
        words.append(f"{gpu.temperature_c:.0f} °C{slow}")
    if gpu.power_w is not None:
        most = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        words.append(f"{gpu.power_w:.0f}{most} W")
    if gpu.reasons:
        words.append(", ".join(gpu.reasons))
    return f"GPU {gpu.index}: {', '.join(words) or 'unknown'}"


def _link(gpu: GpuState) -> str:
    lanes = f"x{gpu.pcie_lanes or '?'}" + (f" of x{gpu.pcie_max_lanes}" if gpu.pcie_max_lanes else "")
    most = f" of {gpu.pcie_slot_generation}" if gpu.pcie_slot_generation else ""
    return f"GPU {gpu.index}: PCIe {gpu.pcie_generation or '?'}{most}, {lanes}"


def _links(gpus: Sequence[GpuState]) -> str:
    """Format all links in a line; once where they are equal."""
    kinds = {_link(gpu).split(": ", 1)[1] for gpu in gpus}
    if len(kinds) == 1 and len(gpus) > 1:
        return f"all {len(gpus)} GPUs: {kinds.pop()}"
    return "; ".join(map(_link, gpus))


def _who(indices: Sequence[int]) -> str:
    """Format ``GPU 3 is`` or ``GPUs 1, 2 are``."""
    return f"GPU {indices[0]} is" if len(indices) == 1 else f"GPUs {', '.join(map(str, indices))} are"
