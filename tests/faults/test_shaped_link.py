"""A link of known speed and delay between two hosts on this machine: it is as it was told to be, and it goes away.

How near ``bench comm`` comes to such a link stands in ``benchmarks/links``: on a machine that does other things too,
the bounds here are wide, and still tell a gigabit from a tenth of it and a delay from none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.cost.link_calibration import read_calibration
from shardwise.cost.time.collective_time import Group, collective_s
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.cpu import cores_here
from tests import netns

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def hosts_can_be_made(request: pytest.FixtureRequest) -> None:
    needs_none = request.node.name == "test_rates_in_words"
    problem = None if needs_none else netns.no_delay() if "delay" in request.node.name else netns.why_not()
    if problem is not None:
        pytest.skip(problem)


def measure(hosts: netns.Hosts, folder: Path, largest: str) -> dict[str, Any]:
    """``bench comm`` over the link, a rank on each host."""
    words = ["-m", "shardwise", "bench", "comm", "--max-size", largest, "--seconds", "1", "--json"]
    ranks = hosts.torchrun([*words, "--output", str(folder)], timeout_s=120, cwd=ROOT)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert not ranks[1].stdout, "rank 0 is on the first host, and it alone answers"
    document: dict[str, Any] = json.loads(ranks[0].stdout.splitlines()[-1])
    return document


def of(document: dict[str, Any], collective: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in document["measured"] if item["collective"] == collective)
    return found


@pytest.mark.turns(6)
def test_bench_comm_finds_the_rate(tmp_path: Path) -> None:
    """1 Gbit/s, then a tenth of it on the same hosts; and plans for two nodes read what it found."""
    found: dict[str, float] = {}
    with netns.two_hosts(rate="1gbit") as hosts:
        for rate, largest in (("1gbit", "4MiB"), ("100mbit", "512KiB")):
            hosts.shape(rate)
            document = measure(hosts, tmp_path / rate, largest)
            assert (document["nodes"], document["devices_per_node"], document["backend"]) == (2, 1, "gloo")
            send, told = of(document, "send"), hosts.payload_bytes_per_s
            assert told is not None and send["where"] == "network"
            found[rate] = send["algorithm_bytes_per_s"][-1]
            assert 0.3 * told < found[rate] < 1.4 * told, "no more than the link lets through, and most of it"
            file = read_calibration(Path(document["calibration_file"]))
            cluster = ClusterSpec(device="cpu", device_name="CPU", nodes=2, cores_per_node=cores_here())
            took = collective_s("send", send["sizes_bytes"][-1], Group(2, 1), cluster, calibration=file.calibration())
            assert took == pytest.approx(send["median_s"][-1])
    assert 5 < found["1gbit"] / found["100mbit"] < 20


@pytest.mark.turns(6)
def test_bench_comm_finds_the_delay(tmp_path: Path) -> None:
    """One way, not there and back: what a busy machine adds is less than a second delay of this size."""
    delay_s = 0.05
    with netns.two_hosts(rate="1gbit", delay_s=delay_s) as hosts:
        assert 0.9 * delay_s < hosts.round_trip_s() / 2 < 1.9 * delay_s
        document = measure(hosts, tmp_path, "64KiB")
        assert 0.9 * delay_s < of(document, "send")["latency_s"] < 1.9 * delay_s
        assert of(document, "all_reduce")["latency_s"] > 1.9 * delay_s, "more steps than one"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_whatever_happens() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        netns.two_hosts(rate=None, delay_s=0.001 * (netns.no_delay() is None)) as hosts,
    ):
        left = subprocess.Popen(hosts.command(0, ["sleep", "60"]))
        names = hosts.names
        assert all(name in namespaces() for name in names)
        raise ZeroDivisionError
    assert not any(name in namespaces() for name in names)
    assert left.wait(5) == -9


@pytest.mark.turns(6)
def test_ranks_that_hang_are_ended() -> None:
    with netns.two_hosts() as hosts:
        started = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            hosts.torchrun(["--no-python", "sleep", "60"], timeout_s=5)
        assert time.monotonic() - started < 30
        listed = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in hosts.names]
        assert [one.stdout for one in listed] == ["", ""]


@pytest.mark.turns(6)
def test_what_a_rank_says_and_how_it_ends_comes_back() -> None:
    script = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.exit(int(os.environ['RANK']))"
    with netns.two_hosts() as hosts:
        ranks = hosts.torchrun(["--no-python", sys.executable, "-c", script], timeout_s=60)
        assert [rank.stdout.split() for rank in ranks] == [["0", "2"], ["1", "2"]]
        assert ranks[1].returncode != 0, "the first host's launcher waits for the second, and may have to be ended"


def test_rates_in_words() -> None:
    assert [netns.bits_per_s(text) for text in ("1gbit", "100mbit", "2.5gbit", "56kbit")] == [1e9, 1e8, 2.5e9, 56e3]
    with pytest.raises(ValueError, match="a rate is such as"):
        netns.bits_per_s("fast")
