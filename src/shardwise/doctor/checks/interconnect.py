"""Checks of the links between GPUs, network cards and CPU cores of a machine."""

from __future__ import annotations

from shardwise.doctor.check import Check, error, ok, unknown, warning, worst
from shardwise.doctor.machine_facts import HostFacts
from shardwise.hardware.gpus import GpuSpec, find_gpu
from shardwise.hardware.topology import Topology, explain_path, explain_topology, link_of, nearest_nic, parse_cores

FAR = ("PHB", "NODE", "SYS")
"""Paths to a network card over which NCCL does not let GPUs read from it directly by default (NCCL_NET_GDR_LEVEL)."""


def check_links(facts: HostFacts) -> list[Check]:
    """Run all checks of this file; none for a machine without GPUs."""
    if not facts.gpus.gpus:
        return []
    if facts.topology is None:
        if len(facts.gpus.gpus) == 1:
            return [ok("topology", "one GPU: nothing to join")]
        fix = "see whether nvidia-smi topo -m works"
        return [unknown("topology", "nvidia-smi topo -m has output in an unknown format", fix)]
    gpu = find_gpu(facts.gpus.gpus[0].name)
    return [*_pairs(facts, facts.topology, gpu), *_cards(facts.topology), *_cores(facts, facts.topology)]


def _pairs(facts: HostFacts, topology: Topology, gpu: GpuSpec | None) -> list[Check]:
    lines, size, found = explain_topology(topology), len(topology.paths), []
    if size < 2:
        return [ok("topology", "one GPU: nothing to join", *lines)]
    closed = sorted(pair for pair, opened in (facts.gpus.peers or {}).items() if not opened)
    if closed and not topology.nvlink_ring:
        found.append(
            warning(
                "topology",
                f"{_some(closed)} cannot read each other's memory: every byte goes through the host's",
                "GeForce cards give no peer access over PCIe; for others, turn off ACS and the IOMMU in the BIOS",
                *lines,
            )
        )
    farthest = topology.farthest
    some_nvlink = any(topology.nvlinks(i, j) for i in range(size) for j in range(size))
    if farthest is not None and some_nvlink and not topology.nvlink_ring:
        found.append(
            warning(
                "topology",
                f"NVLink joins some of the {size} GPUs only: a ring over all of them goes by {farthest} "
                f"({explain_path(farthest)})",
                "keep tensor parallelism inside of the joined ones (hsdp, +tp2), data parallelism across",
                *lines,
            )
        )
    elif farthest == "SYS" and not topology.nvlink_ring:
        found.append(
            warning(
                "topology",
                f"some of the {size} GPUs are joined {explain_path('SYS')} only, the slowest way there is",
                "for fewer ranks, name GPUs of one socket in CUDA_VISIBLE_DEVICES; else see shardwise bench comm",
                *lines,
            )
        )
    found += _missing_nvlinks(topology, gpu, lines)
    link = link_of(topology, gpu)
    rate = (
        "" if link is None or link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.0f} GB/s each way by the table"
    )
    kind = "NVLink" if topology.nvlink_ring else "PCIe"
    return worst(found, ok("topology", f"{size} GPUs over {kind}{rate}", *lines))


def _missing_nvlinks(topology: Topology, gpu: GpuSpec | None, lines: list[str]) -> list[Check]:
    """Check for GPUs with fewer NVLinks than their neighbours, or none where the card has them."""
    size = len(topology.paths)
    counts = [sum(topology.nvlinks(i, j) for j in range(size) if j != i) for i in range(size)]
    if topology.nvlink_ring and min(counts) < max(counts):
        fewer = [i for i, count in enumerate(counts) if count < max(counts)]
        text = (
            f"GPU {', '.join(map(str, fewer))}: fewer NVLinks than the others ({min(counts)} of {max(counts)} counted)"
        )
        return [warning("topology", text, "nvidia-smi nvlink -s shows which are down; reset the GPUs", *lines)]
    if gpu is not None and gpu.nvlink is not None and max(counts) == 0:
        text = f"{gpu.name} has NVLink, and the matrix shows none"
        fix = "start nvidia-fabricmanager on machines with NVSwitches; a virtual machine may have been given none"
        return [error("topology", text, fix, *lines)]
    return []


def _cards(topology: Topology) -> list[Check]:
    """Check each GPU's path to its nearest network card."""
    if not topology.nics:
        return []
    far: dict[str, list[int]] = {}
    for i in range(len(topology.paths)):
        nic = nearest_nic(topology, i)
        if nic is not None and nic.paths[i] in FAR:
            far.setdefault(nic.paths[i], []).append(i)
    if not far:
        return [ok("network cards", f"{len(topology.nics)}: each GPU has one behind the same PCIe switches")]
    who = "; ".join(f"GPU {', '.join(map(str, gpus))}: {path} ({explain_path(path)})" for path, gpus in far.items())
    return [
        warning(
            "network cards",
            f"the nearest network card is far for {who}: between nodes, bytes go by host memory",
            "move the card to the GPUs' switch; or try NCCL_NET_GDR_LEVEL=PHB, and measure with shardwise bench comm",
        )
    ]


def _cores(facts: HostFacts, topology: Topology) -> list[Check]:
    """Check that this process may run on cores near each GPU."""
    if facts.core_numbers is None or not topology.cores:
        return []
    mine, away = set(facts.core_numbers), []
    for i, text in enumerate(topology.cores):
        near = parse_cores(text)
        if near is not None and not near & mine:
            away.append(i)
    if not away:
        return []
    return [
        warning(
            "core affinity",
            f"this process may run on no core near GPU {', '.join(map(str, away))}: host copies cross the sockets",
            "ask for cores of that NUMA node (numactl --cpunodebind, Slurm --gpu-bind=closest)",
        )
    ]


def _some(pairs: list[str]) -> str:
    shown = ", ".join(f"GPU {pair}" for pair in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
