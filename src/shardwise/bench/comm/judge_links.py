"""Verdicts on measured links: comparison with the catalogue, and slow groups of an axis."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from shardwise.cost.time.collective_time import Group, catalogue_bus_bytes_per_s
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import Link
from shardwise.measure.comm_facts import CommFit, CommSamples

SLOW = 0.7  # of the expected rate; the catalogue itself is within 15 % of published measurements
UNEVEN = 1.3  # the slowest group of an axis over the fastest
LOOK = {
    "nvlink": "look at nvidia-smi topo -m and nvidia-smi nvlink -s; is NCCL_P2P_DISABLE set?",
    "xgmi": "look at rocm-smi --showtopo",
    "pcie": "look at the generation and width that nvidia-smi -q shows under load, and whether traffic goes through "
    "the host (PHB, SYS in nvidia-smi topo -m; NCCL_P2P_DISABLE; ACS or an IOMMU)",
    "network": "look at which interface is used (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME), and that NCCL's "
    "log (NCCL_DEBUG=INFO) names NET/IB and not NET/Socket",
}


class LinkVerdict(BaseModel):
    """Comparison of one collective on one axis with the catalogue, in bus bytes/s.

    ``ratio`` is None where either is unknown.
    """

    model_config = ConfigDict(frozen=True)

    axis: str
    collective: str
    where: str
    link: str
    expected_bytes_per_s: float | None
    measured_bytes_per_s: float | None
    ratio: float | None
    slow: bool
    text: str


def judge(samples: CommSamples, fit: CommFit, cluster: ClusterSpec) -> LinkVerdict:
    """Compare expected and measured bus bandwidth of a collective; suggest checks if it is slow."""
    across = samples.where == "network"
    pair = samples.collective == "send"
    group = Group(2, 1 if across else 2) if pair else Group(samples.ranks, samples.per_node)
    sharing = max(1, cluster.devices_per_node // samples.per_node) if across and not pair else 1
    expected = catalogue_bus_bytes_per_s(samples.collective, group, cluster, sharing=sharing)
    link = cluster.network if across else cluster.link
    name, got = link_name(link, cluster, across=across), fit.bus_bytes_per_s
    ratio = None if expected is None or got is None else got / expected
    slow = ratio is not None and ratio < SLOW
    text = f"{name} ({samples.collective} on {samples.axis}): expected {rate_text(expected)}, got {rate_text(got)}"
    if ratio is not None:
        text += f": {ratio:.2f} of it"
    if slow:
        text += f"; {LOOK['network' if across or link is None else link.kind]}"
    return LinkVerdict(
        axis=samples.axis,
        collective=samples.collective,
        where=samples.where,
        link=name,
        expected_bytes_per_s=expected,
        measured_bytes_per_s=got,
        ratio=ratio,
        slow=slow,
        text=text,
    )


def uneven_groups(samples: Sequence[CommSamples]) -> list[str]:
    """Report each axis with one group slower than another: other links, or a bad one."""
    lines = []
    for one in samples:
        if len(one.group_s) < 2 or min(one.group_s) <= 0:
            continue
        worst, best = max(one.group_s), min(one.group_s)
        if worst > UNEVEN * best:
            slow, fast = (one.groups[one.group_s.index(value)] for value in (worst, best))
            lines.append(
                f"{one.collective} on {one.axis}: ranks {_listed(slow)} take {worst / best:.1f} times as long as ranks "
                f"{_listed(fast)}; look at what joins them (nvidia-smi topo -m)"
            )
    return lines


def link_name(link: Link | None, cluster: ClusterSpec, *, across: bool) -> str:
    """Name of a link: ``PCIe 4 x16``, ``NVLink`` or ``network``, or that it is unknown."""
    if across:
        return "network" if link is None else f"network {_gbit(link.bytes_per_s)}"
    if cluster.device == "cpu":
        return "host memory"
    if link is None:
        return "unknown link"
    named = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe"}.get(link.kind, link.kind)
    if link.source.startswith(named):  # PCIe 4 x16, NVLink 3: NVIDIA data sheets
        return link.source.partition(":")[0]
    if link.kind == "pcie" and cluster.gpu is not None and cluster.gpu.pcie is not None:
        path = link.source.partition("topo -m: ")[2]
        return cluster.gpu.pcie.source + (f", {path}" if path else "")
    return named


def rate_text(bytes_per_s: float | None) -> str:
    """Format ``25.2 GB/s`` or ``11.9 MB/s``, decimal as links are; ``unknown`` for None."""
    if bytes_per_s is None:
        return "unknown"
    for size, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {name}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def latency_text(seconds: float | None) -> str:
    """Format ``36.0 µs`` or ``5.21 ms``; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _gbit(bytes_per_s: float | None) -> str:
    return "of unknown speed" if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
