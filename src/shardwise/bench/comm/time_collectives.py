"""Time collectives on the axes of a plan's mesh, on all groups of an axis at once.

That is how a training step uses them. A sample is the time of several calls in a row, over their number; the ranks meet
before the first. On GPUs CUDA events measure the time on the stream, on CPUs the host's clock. A round covers all sizes
before the next one begins, so that drift affects all sizes alike.

Not measured: other traffic at the same time (two axes, or computation, beside each other), and the types of real
gradients: the elements are fp32 zeros.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.distributed.mesh import build_mesh
from shardwise.distributed.process_group import Ranks, gather_ints, gather_text
from shardwise.errors import MachineError
from shardwise.measure.comm_facts import COLLECTIVES, Axis, Collective, CommSamples, fitting_sizes
from shardwise.plan.plan import Plan

ROUNDS = (5, 15)  # samples of each size: at least, at most
LATE_ROUNDS = 3  # at least, where calls take longer than they first did
FIRST_CALLS = 2  # of each size, before the rounds: one to warm up, one to estimate the time of a call
FEWEST = 3  # sizes that are always measured
MOST_CALLS = 200  # in a row
MAIN_SHARE = 0.7  # of the time, for the rounds
FLAT = 1.15  # a size within this factor of the smallest one's time adds no information
DEAR = 0.3  # of the time: if all sizes would take more than that for latency alone, every other flat one is skipped

Call = Callable[[int], None]


@dataclass(frozen=True)
class AxisGroup:
    """Axis, and this rank's group on it."""

    axis: Axis
    group: dist.ProcessGroup | None
    mine: tuple[int, ...]


def axes_of(plan: Plan, ranks: Ranks) -> list[AxisGroup]:
    """Axes of the plan's mesh with two ranks or more. Collective.

    Raises:
        PlanError: the plan is for another number of ranks.
    """
    alone = ranks.local_world_size == ranks.world_size  # an adopted group may not know of local ranks
    nodes = [first for (first,) in gather_ints([0 if alone else ranks.rank - ranks.local_rank], ranks)]
    meshes = build_mesh(plan, ranks.world_size)
    if meshes is None:
        return [_axis("dp", None, ranks, nodes)]
    found = []
    for name in meshes.data.mesh_dim_names or ():
        if meshes.data[name].size() > 1:
            found.append(_axis(name, meshes.data[name].get_group(), ranks, nodes))
    for name, mesh in (("cp", meshes.cp), ("tp", meshes.tp), ("pp", meshes.pp)):
        if mesh is not None and mesh.size() > 1:
            found.append(_axis(name, mesh.get_group(), ranks, nodes))
    return found


def backend_of(ranks: Ranks) -> tuple[str, dict[str, str]]:
    """Return the backend of the ranks, ``gloo`` or ``nccl``, and its relevant versions."""
    versions = {"torch": str(torch.__version__)}
    if ranks.device.type != "cuda":
        return str(dist.get_backend()), versions
    versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    versions["cuda"] = str(torch.version.cuda)
    return "nccl", versions


def _axis(name: str, group: dist.ProcessGroup | None, ranks: Ranks, nodes: Sequence[int]) -> AxisGroup:
    mine = tuple(range(ranks.world_size)) if group is None else tuple(dist.get_process_group_ranks(group))
    groups = tuple(sorted({tuple(row) for row in gather_ints(list(mine), ranks)}))
    per_node = max(_most(group, nodes) for group in groups)
    where = "node" if per_node == len(mine) else "network"
    return AxisGroup(Axis(name=name, groups=groups, per_node=per_node, where=where), group, mine)


def _most(group: Sequence[int], nodes: Sequence[int]) -> int:
    places = [nodes[rank] for rank in group]
    return max(places.count(place) for place in places)


def bench_comm(
    plan: Plan,
    ranks: Ranks,
    sizes: tuple[int, ...],
    seconds: float,
    collectives: Sequence[Collective] = COLLECTIVES,
    log: Callable[[str], None] = lambda text: None,
) -> list[CommSamples]:
    """Measure each of ``collectives`` on every axis of ``plan``, at most about ``seconds`` each.

    Collective. ``sizes`` (bytes) rise; those that would take too long are left out, and reported. Every rank returns
    the samples.
    """
    found = []
    for place in axes_of(plan, ranks):
        for collective in collectives:
            log(f"{collective} on {place.axis.name} ({place.axis.ranks} ranks)")
            found.append(_bench_one(collective, place, ranks, fitting_sizes(sizes, place.axis.ranks), seconds))
    return found


def _bench_one(
    collective: Collective, place: AxisGroup, ranks: Ranks, sizes: tuple[int, ...], seconds: float
) -> CommSamples:
    """Measure one collective on one axis."""
    taken: list[float] = []
    calls: list[Call] = []
    kept: list[int] = []
    left_out: tuple[int, ...] = ()
    skipped = False
    for place_of, size in enumerate(sizes):
        flat = len(taken) > 1 and not skipped and taken[-1] <= FLAT * taken[0]
        skipped = flat and size != sizes[-1] and ROUNDS[0] * len(sizes) * taken[0] > DEAR * seconds
        if skipped:
            continue
        try:
            call = call_of(collective, place, size, ranks.device)
            once_s = [_slowest(_timed(call, 1, ranks), ranks) for _ in range(FIRST_CALLS)][-1]
        except RuntimeError as error:
            raise MachineError(f"{collective} of {size} bytes on axis '{place.axis.name}' failed: {error}") from error
        expected = sum(taken) + once_s * (1 + FIRST_CALLS / ROUNDS[0])
        if len(taken) >= min(FEWEST, len(sizes)) and ROUNDS[0] * expected > MAIN_SHARE * seconds:
            left_out = sizes[place_of:]
            break
        taken.append(once_s)
        calls.append(call)
        kept.append(size)
    rounds, each = _schedule(taken, seconds)
    rows: list[list[float]] = [[] for _ in calls]
    started = time.perf_counter()
    for turn in range(rounds):
        for row, call, number in zip(rows, calls, each, strict=True):
            row.append(_timed(call, number, ranks))
        if turn + 1 >= LATE_ROUNDS and _slowest(time.perf_counter() - started, ranks) > seconds:
            break
    return _gathered(collective, place, ranks, rows).model_copy(
        update={"sizes_bytes": tuple(kept), "left_out_bytes": left_out}
    )


def _schedule(taken: Sequence[float], seconds: float) -> tuple[int, list[int]]:
    """Choose rounds, and calls of each size in a row; equal on all ranks, as ``taken`` is."""
    share = MAIN_SHARE * seconds / (ROUNDS[0] * len(taken))
    each = [max(1, min(MOST_CALLS, int(share / max(once_s, 1e-7)))) for once_s in taken]
    full = sum(once_s * number for once_s, number in zip(taken, each, strict=True))
    return max(ROUNDS[0], min(ROUNDS[1], int(MAIN_SHARE * seconds / full))), each


def _timed(call: Call, number: int, ranks: Ranks) -> float:
    """Seconds per call of ``number`` calls in a row on this rank; ranks meet before.

    0 if the rank does not take part in them.
    """
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        gather_ints([0], ranks)  # a barrier would use the links that are measured
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(number)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / number
    dist.barrier(ranks.control)
    started = time.perf_counter()
    call(number)
    return (time.perf_counter() - started) / number


def _slowest(seconds: float, ranks: Ranks) -> float:
    return max(row[0] for row in gather_ints([int(seconds * 1e9)], ranks)) / 1e9


def _gathered(collective: Collective, place: AxisGroup, ranks: Ranks, rows: list[list[float]]) -> CommSamples:
    """Gather all ranks' samples, without sizes: each round of a size is its slowest rank's."""
    everyone = [json.loads(text) for text in gather_text(json.dumps(rows), ranks)]
    axis, active = place.axis, [_active(collective, group) for group in place.axis.groups]
    halves = 0.5 if collective == "send" else 1.0
    working = [rank for group in active for rank in group]
    samples = tuple(
        tuple(halves * max(everyone[rank][size][turn] for rank in working) for turn in range(len(rows[0])))
        for size in range(len(rows))
    )
    groups = tuple(halves * max(statistics.median(everyone[rank][len(rows) - 1]) for rank in group) for group in active)
    pairs_apart = collective == "send" and axis.where == "network"
    return CommSamples(
        collective=collective,
        axis=axis.name,
        where=axis.where,
        ranks=axis.ranks,
        per_node=1 if pairs_apart else axis.per_node,
        groups=axis.groups,
        sizes_bytes=(),
        samples_s=samples,
        group_s=groups,
    )


def _active(collective: Collective, group: Sequence[int]) -> list[int]:
    """Ranks whose clock counts: all of a group; of a send, the sender."""
    return [group[0]] if collective == "send" else list(group)


def call_of(collective: Collective, place: AxisGroup, size: int, device: torch.device) -> Call:
    """Build a function that runs ``collective`` of ``size`` bytes n times in a row on this rank."""
    group, ranks = place.group, len(place.mine)
    full = torch.zeros(size // 4, dtype=torch.float32, device=device)
    if collective == "send":
        return _ping_pong(full, place)
    part = torch.zeros(size // 4 // ranks, dtype=torch.float32, device=device)
    other = torch.zeros_like(full) if collective == "all_to_all" else full

    def once() -> None:
        if collective == "all_reduce":
            dist.all_reduce(full, group=group)
        elif collective == "all_gather":
            dist.all_gather_single(full, part, group=group)
        elif collective == "reduce_scatter":
            dist.reduce_scatter_single(part, full, group=group)
        else:
            dist.all_to_all_single(other, full, group=group)

    def call(number: int) -> None:
        for _ in range(number):
            once()

    return call


def _ping_pong(message: torch.Tensor, place: AxisGroup) -> Call:
    """Send back and forth between the first and the last rank of the group; others are idle."""
    first, last = place.mine[0], place.mine[-1]
    rank = dist.get_rank()

    def call(number: int) -> None:
        for _ in range(number):
            if rank == first:
                dist.send(message, last, group=place.group)
                dist.recv(message, last, group=place.group)
            elif rank == last:
                dist.recv(message, first, group=place.group)
                dist.send(message, first, group=place.group)

    return call
