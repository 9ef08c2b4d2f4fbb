"""Collective times: published points, order of magnitudes that must hold, and links that are not known."""

from __future__ import annotations

import itertools
import math

import pytest

from shardwise.cost.time.collective_time import (
    Calibration,
    CollectiveKind,
    Group,
    LinkFit,
    collective_s,
    known,
    wire_share,
)
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import Link, LinkKind, find_gpu

GIB = 1024**3
MIB = 1024**2
KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def cluster(
    name: str, nodes: int = 1, *, link: Link | None = None, network: float | None = 50e9, devices: int = 8
) -> ClusterSpec:
    gpu = find_gpu(name)
    assert gpu is not None, name
    return ClusterSpec(
        device="cuda",
        device_name=gpu.name,
        nodes=nodes,
        devices_per_node=devices,
        gpu=gpu,
        link=link or gpu.nvlink,
        network=Link(kind="network", bytes_per_s=network),
    )


def bus(kind: CollectiveKind, size: float, group: Group, where: ClusterSpec, sharing: int = 1) -> float:
    """Bus bandwidth in GB/s, as nccl-tests prints it."""
    return size * wire_share(kind, group.ranks) / collective_s(kind, size, group, where, sharing=sharing) / 1e9


@pytest.mark.parametrize(
    ("name", "nodes", "per_node", "kind", "size", "published"),
    [  # ml-engineering network/README.md; V100 and the pairs from vTrain's sweeps
        ("A100-SXM-80GB", 1, 8, "all_reduce", 16 * GIB, 234.9),
        ("A100-SXM-80GB", 1, 8, "all_reduce", GIB, 229.2),
        ("A100-SXM-80GB", 1, 2, "all_reduce", GIB, 197.3),
        ("A100-SXM-80GB", 1, 4, "all_reduce", 64 * MIB, 185.1),
        ("H200-SXM-141GB", 1, 8, "all_reduce", 16 * GIB, 482.3),  # in the switch
        ("H200-SXM-141GB", 1, 8, "all_reduce", 64 * MIB, 346.5),
        ("H200-SXM-141GB", 1, 4, "all_reduce", 8 * GIB, 363.3),  # too few for the switch: ring
        ("H200-SXM-141GB", 1, 8, "all_gather", 16 * GIB, 361.4),
        ("H200-SXM-141GB", 1, 8, "reduce_scatter", 16 * GIB, 362.9),
        ("B200-SXM-180GB", 1, 8, "all_reduce", 16 * GIB, 845.7),
        ("B200-SXM-180GB", 4, 8, "all_reduce", 16 * GIB, 381.8),
        ("V100-SXM-32GB", 1, 2, "all_reduce", GIB, 22.6),
        ("V100-SXM-32GB", 1, 4, "all_reduce", GIB, 85.4),
        ("V100-SXM-32GB", 1, 8, "all_reduce", GIB, 134.5),
    ],
)
def test_as_published(name: str, nodes: int, per_node: int, kind: CollectiveKind, size: int, published: float) -> None:
    group = Group(nodes * per_node, per_node)
    assert bus(kind, size, group, cluster(name, nodes)) == pytest.approx(published, rel=0.06 if size >= GIB else 0.15)


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB", "V100-SXM-32GB", "MI300X"])
def test_longer_messages_take_longer_and_no_link_is_beaten(name: str) -> None:
    where = cluster(name, 4)
    assert where.link is not None and where.link.bytes_per_s is not None
    for kind, group in itertools.product(KINDS, (Group(2, 2), Group(8, 8), Group(4, 1), Group(16, 4), Group(32, 8))):
        sizes = [1.0, 1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10]
        times = [collective_s(kind, size, group, where) for size in sizes]
        assert times == sorted(times) and times[0] > 1e-6, (kind, group)
        if kind != "all_reduce" and group.ranks == group.per_node:  # in the switch all_reduce does better than a ring
            assert bus(kind, 1e10, group, where) * 1e9 < where.link.bytes_per_s
        if group.per_node < group.ranks and kind not in ("send", "all_to_all"):
            assert bus(kind, 1e10, group, where) * 1e9 < 50e9 * group.per_node


def test_the_switch_helps_all_reduce_only_and_from_hopper_on() -> None:
    group = Group(8, 8)
    for name, helps in (("A100-SXM-80GB", False), ("H200-SXM-141GB", True)):
        ratio = bus("all_reduce", 4 * GIB, group, cluster(name)) / bus("all_gather", 4 * GIB, group, cluster(name))
        assert (ratio > 1.2) == helps


def test_more_nodes_take_longer_and_a_tree_grows_slower() -> None:
    small = {n: collective_s("all_reduce", 1e5, Group(8 * n, 8), cluster("H100-SXM-80GB", n)) for n in (2, 4, 16, 64)}
    assert list(small.values()) == sorted(small.values())
    assert small[64] < 4 * small[4]
    gather = {n: collective_s("all_gather", 1e8, Group(8 * n, 8), cluster("H100-SXM-80GB", n)) for n in (2, 16, 64)}
    assert gather[64] > 2 * gather[2]


def test_groups_share_the_network_cards() -> None:
    """Eight groups of one rank a node have a card each; at 10 Gbit/s for each device they share the node's card."""
    group, size = Group(4, 1), 4e9
    rail = cluster("A100-SXM-80GB", 4, network=25e9)
    assert bus("all_gather", size, group, rail) == pytest.approx(bus("all_gather", size, group, rail, sharing=8))
    assert bus("all_gather", size, group, rail) < 25
    shared = cluster("A100-SXM-80GB", 4, network=1.25e9)
    alone, together = (bus("all_gather", size, group, shared, sharing=n) for n in (1, 8))
    assert alone == pytest.approx(8 * together, rel=0.02)


def test_geforce_goes_through_host_memory() -> None:
    pcie = Link(kind="pcie", bytes_per_s=31.5e9)
    geforce, a6000 = (cluster(name, link=pcie) for name in ("RTX-4090", "RTX-A6000"))
    for ranks in (2, 4, 8):
        assert bus("all_reduce", GIB, Group(ranks, ranks), geforce) < bus("all_reduce", GIB, Group(ranks, ranks), a6000)
    for ranks, fastest in ((4, 35), (8, 28)):  # nccl issue 1639, RTX 5090 on PCIe 5
        where = cluster("RTX-5090", link=Link(kind="pcie", bytes_per_s=63e9))
        assert bus("all_reduce", 4 * GIB, Group(ranks, ranks), where) == pytest.approx(fastest, rel=0.15)


@pytest.mark.parametrize("kind", ["nvlink", "pcie", "xgmi"])
def test_unknown_links_are_said_to_be_unknown(kind: LinkKind) -> None:
    where = cluster("A100-SXM-80GB", 2, link=Link(kind=kind, bytes_per_s=None))
    assert math.isnan(collective_s("all_reduce", 1e6, Group(8, 8), where)) and not known(Group(8, 8), where)
    assert known(Group(2, 1), where)  # crosses the network only
    lost = cluster("A100-SXM-80GB", 2, network=None)
    assert known(Group(8, 8), lost) and not known(Group(16, 8), lost)


def test_nothing_to_do_takes_no_time() -> None:
    where = cluster("A100-SXM-80GB")
    assert collective_s("all_reduce", 1e9, Group(1, 1), where) == 0.0
    assert collective_s("all_gather", 0, Group(8, 8), where) == 0.0


def test_a_measured_calibration_takes_the_catalogues_place() -> None:
    where = cluster("A100-SXM-80GB", 2)
    fit = Calibration(((("all_reduce", "node"), LinkFit(1e-3, 1e9)),))
    assert collective_s("all_reduce", 8e8, Group(8, 8), where, calibration=fit) == pytest.approx(1e-3 + 1.4)
    others: tuple[tuple[CollectiveKind, Group], ...] = (("all_reduce", Group(16, 8)), ("all_gather", Group(8, 8)))
    for kind, group in others:
        assert collective_s(kind, 8e8, group, where, calibration=fit) == collective_s(kind, 8e8, group, where)


def test_gloo_on_a_cpu() -> None:
    where = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=4, cores_per_node=4)
    reduce, gather, scatter = (
        collective_s(kind, 1e9, Group(2, 2), where) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    )
    assert reduce == pytest.approx(1e9 / 0.975e9, rel=0.01) and scatter == pytest.approx(reduce, rel=0.01)
    assert gather == pytest.approx(reduce / 2, rel=0.01)
    crowded = where.model_copy(update={"cores_per_node": 2})
    assert collective_s("all_reduce", 1e9, Group(4, 4), crowded) > 1.9 * collective_s(
        "all_reduce", 1e9, Group(4, 4), where
    )
