"""``bench comm`` on real ranks: every collective on every axis, groups as the mesh has them, within its time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.bench.comm.time_collectives import AxisGroup, axes_of, bench_comm, call_of
from shardwise.distributed.process_group import join
from shardwise.measure.comm_facts import COLLECTIVES, Axis, Collective, CommSamples, ladder
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from tests.worlds import run_world


def plan_of(strategy: str, world: int) -> Plan:
    return Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), world))


def found_axes(strategy: str) -> list[dict[str, Any]]:
    ranks = join("cpu")
    return [one.axis.model_dump() for one in axes_of(plan_of(strategy, ranks.world_size), ranks)]


PAIRS, APART = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        ("ddp", {"dp": ((0, 1, 2, 3),)}),
        ("fsdp", {"dp_shard": ((0, 1, 2, 3),)}),
        ("hsdp", {"dp_replicate": APART, "dp_shard": PAIRS}),
        ("fsdp+tp2", {"dp_shard": APART, "tp": PAIRS}),
        ("ddp+tp2", {"dp_replicate": APART, "tp": PAIRS}),
        ("ddp+pp2", {"dp_replicate": PAIRS, "pp": APART}),
        ("ddp+cp2+tp2", {"dp_replicate": APART, "cp": APART, "tp": PAIRS}),
    ],
)
def test_axes_are_those_of_the_mesh(strategy: str, groups: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """On every rank the same, with all groups, also those that the rank is not in."""
    for found in run_world(found_axes, 4, strategy):
        assert {axis["name"]: axis["groups"] for axis in found} == groups
        assert all(axis["where"] == "node" and axis["per_node"] == len(axis["groups"][0]) for axis in found)


def two_nodes(strategy: str) -> list[tuple[str, str, int]]:
    """Axes of four ranks that are told to be on two nodes."""
    import dataclasses

    ranks = join("cpu")
    ranks = dataclasses.replace(ranks, local_rank=ranks.rank % 2, local_world_size=2)
    plan = plan_of(strategy, 4)
    return [(one.axis.name, one.axis.where, one.axis.per_node) for one in axes_of(plan, ranks)]


def test_axes_across_nodes_are_told_apart() -> None:
    assert run_world(two_nodes, 4, "fsdp+tp2")[0] == [("dp_shard", "network", 1), ("tp", "node", 2)]
    assert run_world(two_nodes, 4, "ddp")[0] == [("dp", "network", 2)]


def benched(strategy: str, sizes: tuple[int, ...], seconds: float) -> tuple[list[dict[str, Any]], float]:
    ranks = join("cpu")
    started = time.monotonic()
    found = bench_comm(plan_of(strategy, ranks.world_size), ranks, sizes, seconds)
    return [one.model_dump(mode="json") for one in found], time.monotonic() - started


def test_every_collective_is_measured_on_every_axis() -> None:
    told = run_world(benched, 4, "hsdp", ladder(1024, 65536), 0.2)
    assert all(rows == told[0][0] for rows, _ in told), "every rank knows all of it"
    found = [CommSamples.model_validate(row) for row in told[0][0]]
    assert [(one.axis, one.collective) for one in found] == [
        (axis, collective) for axis in ("dp_replicate", "dp_shard") for collective in COLLECTIVES
    ]
    for one in found:
        assert one.ranks == 2 and len(one.groups) == 2 and len(one.group_s) == 2
        assert len(one.samples_s) == len(one.sizes_bytes) >= 3
        assert min(min(row) for row in one.samples_s) > 0
        assert set(one.sizes_bytes).isdisjoint(one.left_out_bytes)


def test_what_would_take_too_long_is_left_out_and_told() -> None:
    """Half a second for a ladder up to 512 MiB, of which the largest alone takes as long."""
    rows, took = run_world(benched, 2, "ddp", ladder(1024, 512 * 1024**2), 0.3)[0]
    for row in rows:
        one = CommSamples.model_validate(row)
        assert one.left_out_bytes[-1] == 512 * 1024**2
        assert one.sizes_bytes[-1] < one.left_out_bytes[0]
    assert took < 60, "and not minutes"


def moved(collective: Collective) -> list[float]:
    """What is in the buffers of a call that is made by hand with this rank's number."""
    ranks = join("cpu")
    place = AxisGroup(Axis(name="dp", groups=((0, 1),), per_node=2, where="node"), None, (0, 1))
    seen: list[torch.Tensor] = []
    full = torch.zeros

    def numbered(*shape: Any, **more: Any) -> torch.Tensor:
        seen.append(full(*shape, **more).fill_(ranks.rank + 1.0))
        return seen[-1]

    torch.zeros = numbered  # type: ignore[assignment]
    try:
        call = call_of(collective, place, 32, torch.device("cpu"))
    finally:
        torch.zeros = full
    call(1)
    dist.barrier()
    return [float(value) for tensor in seen for value in tensor]


@pytest.mark.parametrize(
    ("collective", "first"),
    [
        ("all_reduce", [3.0] * 8),
        ("all_gather", [1.0] * 4 + [2.0] * 4),
        ("reduce_scatter", [1.0] * 8 + [3.0] * 4),
        ("send", [1.0] * 8),
    ],
)
def test_the_calls_are_the_collectives_that_they_are_named_after(collective: Collective, first: list[float]) -> None:
    """32 bytes, as nccl-tests counts them, over two ranks that hold 1 and 2."""
    found = run_world(moved, 2, collective)
    assert found[0][: len(first)] == first
    if collective == "send":
        assert found[1] == [1.0] * 8, "there and back: both end with what the first had"
