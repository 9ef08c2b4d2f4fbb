"""Latency and bandwidth out of ladders whose truth is known; and measured links against the catalogue, in words."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.bench.comm.fit_links import fit
from shardwise.bench.comm.judge_links import judge, latency_text, link_name, rate_text, uneven_groups
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import Link
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.measure.comm_facts import Collective, CommFit, CommSamples, bus_factor, fitting_sizes, ladder

KIB, MIB = 1024, 1024**2


def samples(
    seconds: list[list[float]], sizes: tuple[int, ...], collective: Collective = "send", ranks: int = 2, **more: object
) -> CommSamples:
    """What was measured, one row of rounds for each size."""
    facts: dict[str, object] = {
        "collective": collective,
        "axis": "dp",
        "where": "node",
        "ranks": ranks,
        "per_node": ranks,
        "groups": (tuple(range(ranks)),),
        "sizes_bytes": sizes,
        "samples_s": seconds,
    }
    return CommSamples.model_validate(facts | more)


def line(latency_s: float, bytes_per_s: float, sizes: tuple[int, ...], noise: float = 0.0) -> list[list[float]]:
    """Seven rounds of a link that is exactly so; ``noise`` is the spread of what comes on top, as a share."""
    random = np.random.default_rng(1)
    extra = 1 + noise * random.exponential(size=(len(sizes), 7))
    return [[(latency_s + size / bytes_per_s) * one for one in row] for size, row in zip(sizes, extra, strict=True)]


@pytest.mark.parametrize(("latency", "rate"), [(5e-6, 300e9), (3e-4, 119.55e6), (20e-3, 12.4e6), (1e-3, 1e9)])
def test_a_straight_line_is_found_exactly(latency: float, rate: float) -> None:
    sizes = ladder(KIB, 512 * MIB)
    found = fit(samples(line(latency, rate, sizes), sizes))
    assert found.latency_s == pytest.approx(latency, rel=1e-6)
    assert found.bus_bytes_per_s == pytest.approx(rate, rel=1e-6)
    assert found.misfit == pytest.approx(0.0, abs=1e-6)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """All_reduce of 8 ranks moves 2 · 7 / 8 of the message over each link, all_to_all 7 / 8, a send all of it."""
    assert [bus_factor(kind, 8) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")] == [
        1.75,
        0.875,
        0.875,
        0.875,
        1.0,
    ]
    sizes = ladder(KIB, 64 * MIB)
    found = samples(line(1e-4, 1e9, sizes), sizes, collective="all_reduce", ranks=8)
    assert fit(found).bus_bytes_per_s == pytest.approx(1.75e9, rel=1e-6)
    assert found.bus_bytes_per_s[-1] == pytest.approx(1.75 * found.algorithm_bytes_per_s[-1])


def test_a_bucket_that_lets_the_first_bytes_through_does_not_move_the_bandwidth() -> None:
    """A token bucket's burst is free: what is small never meets the limit, and large messages save its time."""
    sizes, rate, burst = ladder(KIB, 16 * MIB), 119.55e6, 125e3
    seconds = [[50e-6 + max(size / 4e9, (size - burst) / rate)] * 5 for size in sizes]
    found = fit(samples(seconds, sizes))
    assert found.bus_bytes_per_s == pytest.approx(rate, rel=0.01)
    assert found.latency_s == pytest.approx(50e-6, rel=0.2), "a fifth of a small size may be bytes"
    assert found.misfit is not None and found.misfit > 1, "in between the line is far off, and it is told"


def test_one_size_that_was_disturbed_does_not_move_the_bandwidth() -> None:
    sizes = ladder(KIB, 16 * MIB)
    seconds = line(1e-3, 1e9, sizes)
    seconds[-3] = [1.6 * value for value in seconds[-3]]
    assert fit(samples(seconds, sizes)).bus_bytes_per_s == pytest.approx(1e9, rel=1e-6)


def test_noise_widens_the_intervals() -> None:
    sizes = ladder(KIB, 16 * MIB)
    calm, rough = (fit(samples(line(1e-3, 1e9, sizes, noise=noise), sizes)) for noise in (0.01, 0.5))
    for found in (calm, rough):
        assert found.latency_interval_s is not None and found.bus_interval_bytes_per_s is not None
        assert found.latency_s is not None and found.bus_bytes_per_s is not None
        assert found.latency_interval_s[0] <= found.latency_s <= found.latency_interval_s[1]
        assert found.bus_interval_bytes_per_s[0] <= found.bus_bytes_per_s <= found.bus_interval_bytes_per_s[1]
    assert calm.latency_s == pytest.approx(1e-3, rel=0.05) and calm.bus_bytes_per_s == pytest.approx(1e9, rel=0.05)

    def width(ends: tuple[float, float] | None) -> float:
        assert ends is not None
        return ends[1] - ends[0]

    assert width(rough.latency_interval_s) > 5 * width(calm.latency_interval_s)
    assert width(rough.bus_interval_bytes_per_s) > 5 * width(calm.bus_interval_bytes_per_s)


@pytest.mark.turns(3)
@pytest.mark.parametrize("rounds", [3, 5, 15])
def test_intervals_hold_the_truth_in_most_cases(rounds: int) -> None:
    sizes, random = ladder(KIB, 64 * MIB), np.random.default_rng(rounds)
    held = []
    for _ in range(60):
        scatter = np.exp(0.03 * random.standard_normal((len(sizes), rounds)))
        rows = [[(2e-4 + size / 1e9) * float(one) for one in row] for size, row in zip(sizes, scatter, strict=True)]
        found = fit(samples(rows, sizes))
        assert found.latency_interval_s is not None and found.bus_interval_bytes_per_s is not None
        held.append(found.latency_interval_s[0] <= 2e-4 <= found.latency_interval_s[1])
        held.append(found.bus_interval_bytes_per_s[0] <= 1e9 <= found.bus_interval_bytes_per_s[1])
    assert np.mean(held) >= 0.92  # of 95 %; a plain bootstrap of 3 rounds has 86


def test_what_the_sizes_do_not_show_is_unknown() -> None:
    small = ladder(KIB, 16 * KIB)
    latency_only = fit(samples(line(10e-3, 1e9, small), small))
    assert latency_only.bus_bytes_per_s is None and latency_only.misfit is None
    assert latency_only.latency_s == pytest.approx(10e-3, rel=0.01)
    large = ladder(16 * MIB, 256 * MIB)
    bytes_only = fit(samples(line(1e-6, 1e8, large), large))
    assert bytes_only.latency_s is None and bytes_only.bus_bytes_per_s == pytest.approx(1e8, rel=1e-3)
    single = fit(samples([[1.0, 1.0, 1.0]], (KIB,)))
    assert single.latency_s is None and single.bus_bytes_per_s is None
    few = ladder(KIB, MIB)
    assert fit(samples([row[:2] for row in line(1e-5, 1e8, few)], few)).bus_interval_bytes_per_s is None, "two rounds"


def test_sizes() -> None:
    assert ladder(1024, 8192) == (1024, 2048, 4096, 8192)
    assert ladder(1000, 5000) == (1000, 2000, 4000, 5000)
    assert ladder(64, 64) == (64,)
    assert fitting_sizes((8, 16, 100, 1024), 3) == (12, 96, 1020), "whole fp32 elements for each of three ranks"
    assert fitting_sizes((1024,), 2) == (1024,)


def gpus(text: str, link: Link | None = None) -> ClusterSpec:
    found = parse_cluster(text)
    return found if link is None else found.model_copy(update={"link": link})


def test_a_slow_link_is_told_with_what_was_expected_and_where_to_look() -> None:
    sizes = (KIB, MIB)
    one = samples(line(1e-5, 6e9, sizes), sizes)
    verdict = judge(one, CommFit(latency_s=1e-5, bus_bytes_per_s=6e9), gpus("2xA100-PCIE-80GB"))
    assert verdict.slow and verdict.text.startswith(
        "PCIe 4 x16 (send on dp): expected 25.2 GB/s, got 6 GB/s: 0.24 of it; look at the generation and width"
    )
    fine = judge(one, CommFit(latency_s=1e-5, bus_bytes_per_s=24e9), gpus("2xA100-PCIE-80GB"))
    assert not fine.slow and fine.text.endswith("got 24 GB/s: 0.95 of it")
    across = samples(line(1e-5, 6e9, sizes), sizes, where="network", per_node=1)
    network = judge(across, CommFit(bus_bytes_per_s=5e9), gpus("2x1xA100-SXM-80GB/ib200"))
    assert network.slow and network.text.startswith("network 200 Gbit/s (send on dp): expected 22.5 GB/s, got 5 GB/s")
    assert "NCCL_SOCKET_IFNAME" in network.text


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    sizes = (KIB, MIB)
    one = samples(line(1e-5, 6e9, sizes), sizes)
    cpu = ClusterSpec(device="cpu", device_name="CPU", devices_per_node=2, cores_per_node=2)
    verdict = judge(one, CommFit(bus_bytes_per_s=6e9), cpu)
    assert verdict.text == "host memory (send on dp): expected unknown, got 6 GB/s"
    assert verdict.expected_bytes_per_s is None and verdict.ratio is None and not verdict.slow
    nothing = judge(one, CommFit(), gpus("2xA100-PCIE-80GB"))
    assert nothing.text == "PCIe 4 x16 (send on dp): expected 25.2 GB/s, got unknown" and not nothing.slow


def test_names_of_links() -> None:
    a100 = parse_cluster("2xA100-SXM-80GB")
    assert link_name(a100.link, a100, across=False) == "NVLink"
    path = Link(kind="pcie", bytes_per_s=31.5e9, source="nvidia-smi topo -m: SYS at the farthest")
    assert link_name(path, a100, across=False) == "PCIe 4 x16, SYS at the farthest"
    assert link_name(None, a100, across=False) == "unknown link"
    assert link_name(None, a100, across=True) == "network"
    assert [rate_text(rate) for rate in (25.2e9, 11.955e6, 4200.0, None)] == [
        "25.2 GB/s",
        "12 MB/s",
        "4.2 kB/s",
        "unknown",
    ]
    assert [latency_text(s) for s in (36e-6, 5.21e-3, None)] == ["36 µs", "5.21 ms", "unknown"]


def test_a_group_that_is_slower_than_its_neighbour_is_named() -> None:
    sizes = (KIB, MIB)
    both = ((0, 1), (2, 3))
    uneven = samples(line(1e-5, 1e9, sizes), sizes, groups=both, group_s=(0.010, 0.031))
    assert uneven_groups([uneven]) == [
        "send on dp: ranks 2, 3 take 3.1 times as long as ranks 0, 1; look at what joins them (nvidia-smi topo -m)"
    ]
    assert uneven_groups([samples(line(1e-5, 1e9, sizes), sizes, groups=both, group_s=(0.010, 0.011))]) == []
