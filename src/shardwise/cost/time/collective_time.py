"""Seconds of one collective: the fastest of NCCL's algorithms, by latency and bandwidth.

Message sizes are those of nccl-tests: the full tensor for all_reduce, the gathered total for all_gather, the unreduced
total for reduce_scatter, one rank's full buffer for all_to_all, the message itself for send. *Bus bandwidth* is what
each link of a ring carries: ``2 (n − 1) / n`` of an all_reduce's message, ``(n − 1) / n`` of the others'.

Inside a node a ring has two protocols (a fast start at low bandwidth, a slow start at full bandwidth), and from Hopper
on the switch itself can reduce (NVLS, all_reduce only). Across nodes there are rings, trees and NVLS trees; their
bandwidth is that of the network cards the group reaches, their latency grows with the nodes.
``benchmarks/accuracy/fit_collectives.py`` compares all of it with published NCCL sweeps.

A `Calibration` contains what ``bench comm`` measured and replaces the catalogue for the collectives that it covers: the
measured samples for groups of a measured shape, scaled to others by `_scaled`.

Not modelled: computation that runs beside a collective (`OVERLAP_SLOWDOWN` is its estimated cost), networks of more
than one layer and their congestion, rails that a group's ranks do not share.
"""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwise.cost.same import Same
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import LinkKind, generation_of, generations

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

# NVLink with a switch: bus bandwidth of a large ring, part of the link. Two ranks lose FEW_RANKS of it, n ranks a
# (n − 1)-th of that (vTrain's A100 sweeps, 2 to 8 ranks; NCCL's model of H100 has 0.17).
RING_OTHERS = 0.78  # for generations without a `ring` value
FEW_RANKS = 0.125
# V100 nodes are a cube mesh of single and double links: part of the six links that rings over n ranks find (vTrain).
CUBE_MESH = {2: 0.15, 3: 0.301, 4: 0.57, 5: 0.247, 6: 0.305, 7: 0.58, 8: 0.897}
# PCIe, with and without peer-to-peer, up to four cards (one switch or root) and beyond (two sockets). SimuMax's fit on
# A100 PCIe: 0.69 and 0.42; GeForce is assumed to go
# through host memory: 35 and 28 GB/s of 63 on RTX 5090 (nccl issue 1639, which does not say how).
PCIE = {True: (0.69, 0.42), False: (0.50, 0.40)}
# MI300X: a full mesh of seven links, 64 GB/s each, of which n ranks use n − 1; large rings reach 0.69 (an estimate).
XGMI = 0.69
GLOO_BYTES_PER_S = 0.975e9  # all_reduce bus bandwidth of two CPU ranks on two cores, measured; a core a rank is needed
GLOO_LATENCY_S = 2e-4  # for each doubling of the ranks; an estimate

# Seconds inside a node: (base, each further rank) of the fast-start and of the full-bandwidth protocol, and the part of
# the ring's bandwidth that the fast start has. Fitted on the sweeps named above.
FAST_START = (34e-6, 1.5e-6)
FULL_START = (32e-6, 7e-6)
FAST_PART = 0.15
XGMI_START = (40e-6, 8e-6)
PCIE_START = (20e-6, 5e-6)

# Across nodes. Bandwidths are fractions of the group's network cards: 382 of 400 GB/s on 4 nodes of B200, and
# nccl_h100_tuning.json (the model of NCCL 2.27) for the other algorithms. Latencies are that model's, in seconds, times
# NETWORK_START, a guess between that model and EFA, which starts EFA_START times slower than it: the sweep of 4 nodes
# of B200 on AWS (ml-engineering network/README.md), 128 KiB to 128 MiB.
NETWORK_RING = 0.955
NETWORK_RING_FAST = 0.73
NETWORK_TREE = {2: 0.70, 4: 0.375}  # message bytes/s by nodes, full protocol; the fast one has 0.85 of it
NETWORK_NVLS_TREE = {2: 0.667, 4: 0.48}
NETWORK_START = 2.5
EFA_START = 5.5
RING_STEP_S = {"fast": (8.5e-6, 0.0), "full": (14e-6, 3.4e-6)}  # for each node, and for each further rank in it
TREE_START_S = {"fast": (14e-6, 17e-6, 2.5e-6), "full": (8e-6, 28e-6, 8e-6)}  # base, each doubling of nodes, each rank
NVLS_TREE_START_S = (25e-6, 28e-6)
SEND_PART = {"nvlink": 0.80, "xgmi": 0.12, "pcie": 0.80, "network": 0.90, "loopback": 0.5}
SEND_START_S = {"nvlink": 10e-6, "xgmi": 15e-6, "pcie": 15e-6, "network": 25e-6, "loopback": 2e-4}
ALL_TO_ALL = 0.9  # of the ring's bandwidth (nccl_h100_tuning.json: 0.96; SimuMax's B200: 0.89)
OWN_CARD_BYTES_PER_S = 6.25e9  # below 50 Gbit/s for each device, a node's devices share its network card
RISEN = 1.2  # seconds of the largest measured message over the smallest's, from which on its bytes are seen
OVERLAP_SLOWDOWN = 1.1  # a collective beside computation, for the scheduler to apply; an estimate


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of one collective. ``per_node`` of them are in one node."""

    ranks: int
    per_node: int


@dataclass(frozen=True, slots=True)
class LinkFit:
    """Fit of one algorithm: latency in seconds, and bus bytes per second."""

    latency_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one collective in a group of ``ranks``, ``per_node`` of them in a node.

    ``sharing`` such groups sent through a node's network cards at the same time. ``curve`` has (message bytes,
    seconds), rising; ``fit`` is None where no fit could be made.
    """

    kind: str
    ranks: int
    per_node: int
    curve: tuple[tuple[float, float], ...]
    fit: LinkFit | None = None
    sharing: int = 1

    @property
    def group(self) -> Group:
        """Shape of the group."""
        return Group(self.ranks, self.per_node)

    def seconds(self, message_bytes: float) -> float:
        """Interpolate the curve linearly between the measured sizes.

        Below the smallest size its seconds are returned; beyond the largest the fit's rate per byte applies. Without a
        fit it is the rate between the two largest sizes, where these take longer than the smallest, else that of the
        largest: an upper bound, many times too long where all is latency.
        """
        index = bisect.bisect_left(self.curve, (message_bytes, -math.inf))
        if index == 0:
            return self.curve[0][1]
        small, small_s = self.curve[index - 1]
        if index == len(self.curve):
            if self.fit is None:
                before, before_s = self.curve[-2] if len(self.curve) > 1 else (0.0, 0.0)
                if before_s == small_s or small_s < RISEN * self.curve[0][1]:
                    before, before_s = 0.0, 0.0
                return small_s + (message_bytes - small) * (small_s - before_s) / (small - before)
            return small_s + (message_bytes - small) * _share(self.kind, self.ranks) / self.fit.bus_bytes_per_s
        large, large_s = self.curve[index]
        return small_s + (large_s - small_s) * (message_bytes - small) / (large - small)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Measured links, in place of the catalogue. Compared by identity, to be a cheap cache key.

    ``fits`` are for groups of any size, each by (kind, ``node`` or ``network``); ``measured`` takes precedence over
    them.
    """

    fits: tuple[tuple[tuple[str, str], LinkFit], ...] = ()
    measured: tuple[Measured, ...] = ()

    def find(self, kind: str, where: str) -> LinkFit | None:
        """Fit of ``kind`` in a node (``node``) or across nodes (``network``); None if not measured."""
        return next((fit for key, fit in self.fits if key == (kind, where)), None)

    def nearest(self, kind: str, group: Group) -> Measured | None:
        """Measurement of ``kind`` in ``group``, else one with a fit in the group most like it, in or across nodes."""

        def apart(one: Measured) -> float:
            ranks, per_node = one.ranks / group.ranks, one.per_node / group.per_node
            return abs(math.log(ranks)) + abs(math.log(per_node))

        across = group.per_node < group.ranks
        found = [one for one in self.measured if one.kind == kind and (one.per_node < one.ranks) == across]
        found = [one for one in found if one.fit is not None or one.group == group]
        return min(found, key=apart, default=None)


def known(group: Group, cluster: ClusterSpec, calibration: Calibration | None = None) -> bool:
    """Return whether the links that ``group`` uses have a known bandwidth."""
    return not math.isnan(collective_s("all_reduce", 1.0, group, cluster, calibration=calibration))


def collective_s(
    kind: CollectiveKind,
    message_bytes: float,
    group: Group,
    cluster: ClusterSpec,
    *,
    sharing: int = 1,
    calibration: Calibration | None = None,
) -> float:
    """Seconds of one collective of ``message_bytes``; nan where a link's bandwidth is unknown.

    ``sharing`` groups of this shape run at the same time through the same node's network cards.
    """
    if group.ranks <= 1 or message_bytes <= 0:
        return 0.0
    if calibration is not None:
        measured = _measured_s(kind, message_bytes, group, cluster, sharing, calibration)
        if measured is not None:
            return measured
    fits = _fits(kind, group, sharing, _links(Same(cluster)))
    if not fits:
        return math.nan
    wire = message_bytes * wire_share(kind, group.ranks)
    if cluster.device == "cpu" and kind == "reduce_scatter":
        wire *= 2  # gloo's sends as much as an all_reduce
    return min([fit.latency_s + wire / fit.bus_bytes_per_s for fit in fits])


def sharded_reduction(cluster: ClusterSpec, calibration: Calibration | None) -> CollectiveKind:
    """Collective that sharded gradients are reduced with: over gloo an exchange (`parallel.data_parallel`).

    A calibration without exchanges leaves the reduce_scatter, up to twice as long.
    """
    exchanges = calibration is not None and any(one.kind == "all_to_all" for one in calibration.measured)
    return "all_to_all" if cluster.device == "cpu" and exchanges else "reduce_scatter"


def sharded_gather(cluster: ClusterSpec, calibration: Calibration | None, ranks: int) -> CollectiveKind:
    """Collective by which ``ranks`` gather sharded weights: two over gloo exchange them (`parallel.data_parallel`).

    A calibration without exchanges leaves the all_gather, up to 1.6 times as long.
    """
    return "all_to_all" if ranks == 2 and sharded_reduction(cluster, calibration) == "all_to_all" else "all_gather"


def wire_share(kind: CollectiveKind, ranks: int) -> float:
    """Fraction of the message that crosses each link of a ring: bus over algorithm bandwidth."""
    return _share(kind, ranks)


def catalogue_bus_bytes_per_s(
    kind: CollectiveKind, group: Group, cluster: ClusterSpec, *, sharing: int = 1
) -> float | None:
    """Catalogue bus bytes/s of the largest messages; None for an unknown link, as gloo's."""
    if cluster.device == "cpu":
        return None
    return max((fit.bus_bytes_per_s for fit in _fits(kind, group, sharing, _links(Same(cluster)))), default=None)


def _share(kind: str, ranks: int) -> float:
    if kind == "send":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _measured_s(
    kind: CollectiveKind,
    message_bytes: float,
    group: Group,
    cluster: ClusterSpec,
    sharing: int,
    calibration: Calibration,
) -> float | None:
    """Seconds from the samples of this group, or scaled from the most similar one; else None."""
    per_node = max(1, min(group.per_node, group.ranks))
    group = group if group.per_node == per_node else Group(group.ranks, per_node)
    one = calibration.nearest(kind, group)
    if one is not None and one.group == group:
        return one.seconds(message_bytes)
    if one is not None and one.fit is not None:
        fit = _scaled(kind, one, one.fit, group, sharing, _links(Same(cluster)), on_cpu=cluster.device == "cpu")
    else:
        found = calibration.find(kind, "network" if per_node < group.ranks else "node")
        if found is None:
            return None
        fit = found
    return fit.latency_s + message_bytes * wire_share(kind, group.ranks) / fit.bus_bytes_per_s


def _scaled(
    kind: CollectiveKind, one: Measured, fit: LinkFit, group: Group, sharing: int, links: _Links, *, on_cpu: bool
) -> LinkFit:
    """Scale the fit of one group's shape to another's.

    Where the catalogue knows the link, latency and bus bandwidth change as the catalogue's do between the two shapes.
    Else, and for the latency of gloo, the latency grows with the steps of a ring and the bus bandwidth stays. A ring
    has more steps than a tree: the latency of many nodes is then too long, never too short.
    """
    here, there = _fits(kind, one.group, one.sharing, links), _fits(kind, group, sharing, links)
    steps = 1.0 if kind == "send" else (group.ranks - 1) / (one.ranks - 1)
    if not here or not there:
        return LinkFit(fit.latency_s * steps, fit.bus_bytes_per_s)
    slower = min(f.latency_s for f in there) / min(f.latency_s for f in here)
    faster = max(f.bus_bytes_per_s for f in there) / max(f.bus_bytes_per_s for f in here)
    return LinkFit(fit.latency_s * (steps if on_cpu else slower), fit.bus_bytes_per_s * faster)


@dataclass(frozen=True, slots=True)
class _Links:
    kind: LinkKind | None
    link: float | None
    network: float | None
    devices: int
    cores: int
    generation: str
    peer_to_peer: bool
    network_start: float


_EFA = re.compile(r"efa|AWS", re.IGNORECASE)
_GEFORCE = re.compile(r"\b(rtx|gtx|geforce)\W*\d{4}\b(?!\W*ada)", re.IGNORECASE)


@lru_cache(maxsize=64)
def _peer_to_peer(name: str) -> bool:
    return not _GEFORCE.search(name)


@lru_cache(maxsize=64)
def _links(same: Same[ClusterSpec]) -> _Links:
    cluster = same.value
    gpu, link, network = cluster.gpu, cluster.link, cluster.network
    on_cpu = cluster.device == "cpu"
    return _Links(
        kind="loopback" if on_cpu else link.kind if link else None,
        link=GLOO_BYTES_PER_S if on_cpu else link.bytes_per_s if link else None,
        network=network.bytes_per_s if network else None,
        devices=cluster.devices_per_node,
        cores=cluster.cores_per_node or 2,
        generation=(generation_of(gpu) or "") if gpu else "",
        peer_to_peer=gpu is None or _peer_to_peer(gpu.name),
        network_start=EFA_START if network is not None and _EFA.match(network.source) else NETWORK_START,
    )


@lru_cache(maxsize=4096)
def _fits(kind: CollectiveKind, group: Group, sharing: int, links: _Links) -> tuple[LinkFit, ...]:
    """Fits of the candidate algorithms; empty where a bandwidth is unknown."""
    per_node = max(1, min(group.per_node, group.ranks))
    across = per_node < group.ranks
    if (links.link is None and (per_node > 1 or not across)) or (across and links.network is None):
        return ()
    if not across:
        return _node_fits(kind, per_node, links)
    if kind == "send":
        card = _cards(1, sharing, links)
        return (LinkFit(SEND_START_S["network"], card * SEND_PART["network"]),)
    if kind == "all_to_all":
        return (_all_to_all_across(group.ranks, per_node, sharing, links),)
    return _network_fits(kind, math.ceil(group.ranks / per_node), per_node, sharing, links)


def _ring_bytes_per_s(ranks: int, links: _Links) -> float:
    """Bus bandwidth of a large ring over ``ranks`` devices of one node."""
    assert links.link is not None
    if links.kind == "nvlink" and links.generation == "volta":
        part = CUBE_MESH.get(ranks, CUBE_MESH[8])
    elif links.kind == "nvlink":
        found = generations().get(links.generation)
        ring = RING_OTHERS if found is None or found.ring is None else found.ring
        part = ring - FEW_RANKS / (ranks - 1)
    elif links.kind == "xgmi":
        part = XGMI * min(ranks - 1, 7) / 7
    elif links.kind == "pcie":
        part = PCIE[links.peer_to_peer][0 if ranks <= 4 else 1]
    else:
        part = min(1.0, links.cores / ranks)
    return links.link * part


def _nvls(links: _Links) -> tuple[float, int, float] | None:
    """All_reduce in the switch, for generations that support it: `Generation.nvls`."""
    found = generations().get(links.generation)
    return None if found is None else found.nvls


def _node_fits(kind: CollectiveKind, ranks: int, links: _Links) -> tuple[LinkFit, ...]:
    assert links.link is not None and links.kind is not None
    if kind == "send":
        alone = _ring_bytes_per_s(2, links) if links.generation == "volta" else links.link * SEND_PART[links.kind]
        return (LinkFit(SEND_START_S[links.kind], alone),)
    ring, further = _ring_bytes_per_s(ranks, links), ranks - 1
    if links.kind == "loopback":
        return (LinkFit(GLOO_LATENCY_S * math.ceil(math.log2(ranks)), ring),)
    if links.kind != "nvlink":
        base, step = PCIE_START if links.kind == "pcie" else XGMI_START
        return (LinkFit(base + step * further, ring * (ALL_TO_ALL if kind == "all_to_all" else 1.0)),)
    if kind == "all_to_all":
        return (LinkFit(FULL_START[0] + FULL_START[1] * further, ring * ALL_TO_ALL),)
    fits = [
        LinkFit(FAST_START[0] + FAST_START[1] * further, ring * FAST_PART),
        LinkFit(FULL_START[0] + FULL_START[1] * further, ring),
    ]
    part, least, start = _nvls(links) or (0.0, math.inf, 0.0)
    if kind == "all_reduce" and ranks >= least:
        fits.append(LinkFit(start, links.link * part * wire_share(kind, ranks)))
    return tuple(fits)


def _cards(per_node: int, sharing: int, links: _Links) -> float:
    """Bytes/s, one direction, that a group with ``per_node`` ranks in a node gets of its cards."""
    per_device = links.network or 0.0
    full = per_device * links.devices
    reached = per_device * per_node if per_device >= OWN_CARD_BYTES_PER_S else full
    return min(reached, full / sharing)


def _network_fits(kind: CollectiveKind, nodes: int, per_node: int, sharing: int, links: _Links) -> tuple[LinkFit, ...]:
    cards = _cards(per_node, sharing, links)
    inner = _ring_bytes_per_s(per_node, links) if per_node > 1 else math.inf
    turns = 2 if kind == "all_reduce" else 1
    fits = []
    for protocol, part in (("fast", NETWORK_RING_FAST), ("full", NETWORK_RING)):
        node, rank = RING_STEP_S[protocol]
        start = turns * nodes * (node + rank * (per_node - 1)) * links.network_start
        fits.append(LinkFit(start, min(inner, cards * part)))
    if kind != "all_reduce":
        return tuple(fits)
    doublings, share = math.log2(nodes), wire_share(kind, nodes * per_node)
    for protocol, part in (("fast", 0.85), ("full", 1.0)):
        base, doubling, rank = TREE_START_S[protocol]
        start = (base + doubling * doublings + rank * (per_node - 1)) * links.network_start
        rate = cards * part * NETWORK_TREE[2 if nodes == 2 else 4] * share
        fits.append(LinkFit(start, min(inner, rate)))
    if _nvls(links) is not None and per_node >= 4:
        start = (NVLS_TREE_START_S[0] + NVLS_TREE_START_S[1] * doublings) * links.network_start
        rate = cards * NETWORK_NVLS_TREE[2 if nodes == 2 else 4] * share
        fits.append(LinkFit(start, min(inner, rate)))
    return tuple(fits)


def _all_to_all_across(ranks: int, per_node: int, sharing: int, links: _Links) -> LinkFit:
    """Fit of an all_to_all across nodes.

    Each rank sends the part for other nodes over its share of the cards, at the same time as the part for its
    neighbours.
    """
    away = (ranks - per_node) / (ranks - 1)
    rate = _cards(per_node, sharing, links) / per_node * SEND_PART["network"] / away
    if per_node > 1:
        rate = min(rate, _ring_bytes_per_s(per_node, links) * ALL_TO_ALL / (1 - away))
    start = SEND_START_S["network"] + 2e-6 * (ranks - 1)
    return LinkFit(start * links.network_start, rate)
