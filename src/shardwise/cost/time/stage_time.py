"""Seconds of a micro batch on a pipeline stage: units one after the other, collectives beside them, and the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.cost.time.layer_time import UnitTime
from shardwise.cost.time.overlap import UnitRun, elapsed_s
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Strategy

# How sharply the maximum of device and host time dominates (see `_hosted`); with `unit_time`'s SKEW_S and launches,
# chosen among values that vTrain's rows, their errors and their regret do not distinguish.
HOST_POWER = 6.0


@dataclass(frozen=True, slots=True)
class WireTime:
    """Seconds of one unit's data-parallel collectives and of their copies on the compute stream.

    ``bucket_bytes`` of gradients are reduced with those of other units.
    """

    gather_s: float = 0.0
    reduce_s: float = 0.0
    bucket_bytes: float = 0.0
    copy_forward_s: float = 0.0
    copy_backward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a micro batch on a stage. ``sync_s`` is the last backward's extra time."""

    forward_s: float
    backward_s: float
    sync_s: float
    compute_s: float
    recompute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    host_forward_s: float
    host_backward_s: float
    ahead_s: tuple[float, float, float, float]  # of the forward alone: computing; tensor, context, expert parallel

    def with_reference(self, other: StageTime) -> StageTime:
        """Return the stage with the forward of a frozen reference in front: no backward, and nothing is recomputed."""
        compute, tp, cp, ep = other.ahead_s
        return replace(
            self,
            forward_s=self.forward_s + other.forward_s,
            compute_s=self.compute_s + compute,
            tp_s=self.tp_s + tp,
            cp_s=self.cp_s + cp,
            ep_s=self.ep_s + ep,
            host_forward_s=self.host_forward_s + other.host_forward_s,
        )


@dataclass(frozen=True, slots=True)
class StageParts:
    """Components of stages: for each unit whether it is a block, its seconds and its traffic.

    ``gathers_ahead``: a forward gathers the next unit while one computes. ``keeps_last``: the last block is gathered
    once for both directions. ``buckets`` has the seconds of a bucket of so many bytes, and the sizes of the first and
    of the others; None where each unit is reduced alone.
    """

    strategy: Strategy
    sharded: bool  # units are gathered for use
    pipelined: bool
    every: bool  # gradients are reduced after every micro batch
    blocks: tuple[bool, ...]
    times: tuple[UnitTime, ...]
    traffic: tuple[WireTime, ...]
    contention: float
    tp_share: float
    gathers_ahead: bool = True
    buckets: tuple[Callable[[float], float], float, float] | None = None
    keeps_last: bool = False


def stage_time(pieces: StageParts, units: Sequence[tuple[int, int]]) -> StageTime:
    """Compute one micro batch on the stage with ``units``, as (count, index)."""
    sharded, contention = pieces.sharded, pieces.contention
    ahead: list[UnitRun] = []
    back: list[UnitRun] = []
    last: list[UnitRun] = []
    compute = recompute = tp = cp = ep = host_forward = host_backward = 0.0
    compute_ahead = tp_ahead = cp_ahead = ep_ahead = root_gather = root_reduce = 0.0
    units, kept = _last_alone(units, pieces)
    for place, (count, index) in enumerate(units):
        time, wire, block = pieces.times[index], pieces.traffic[index], pieces.blocks[index]
        forward = time.forward_s + wire.copy_forward_s
        backward = time.backward_s + wire.copy_backward_s - (wire.copy_forward_s if place == kept else 0.0)
        compute += count * (forward + backward)
        recompute += count * time.recompute_s
        tp_forward = pieces.tp_share * time.tp_forward_s
        tp_backward = pieces.tp_share * (time.tp_backward_s + time.tp_recompute_s)
        cp_backward = time.cp_backward_s + time.cp_recompute_s
        tp += count * (tp_forward + tp_backward)
        cp += count * (time.cp_forward_s + cp_backward)
        compute_ahead, tp_ahead = compute_ahead + count * forward, tp_ahead + count * tp_forward
        ep_backward = time.ep_backward_s + time.ep_recompute_s
        ep += count * (time.ep_forward_s + ep_backward)
        cp_ahead, ep_ahead = cp_ahead + count * time.cp_forward_s, ep_ahead + count * time.ep_forward_s
        host_forward += count * time.host_forward_s
        host_backward += count * time.host_backward_s
        gather = wire.gather_s if sharded and block else 0.0
        reduce = wire.reduce_s if block or not sharded else 0.0
        if sharded and not block:
            root_gather, root_reduce = root_gather + count * wire.gather_s, root_reduce + count * wire.reduce_s
        ahead.append(UnitRun(count, forward + tp_forward + time.cp_forward_s + time.ep_forward_s, gather))
        seconds = backward + time.recompute_s + tp_backward + cp_backward + ep_backward
        regather = gather if pieces.strategy.reshards_after_forward and place != kept else 0.0
        back.append(UnitRun(count, seconds, regather, reduce if pieces.every else 0.0))
        last.append(UnitRun(count, seconds, regather, reduce))
    if root_gather or root_reduce:  # the root's units travel together, before the first and after the last
        ahead.insert(0, UnitRun(1, 0.0, root_gather))
        last.insert(0, UnitRun(1, 0.0, 0.0, root_reduce))
        if pieces.every:
            back.insert(0, last[0])
    sync_gather = 0.0
    if pieces.strategy.base == "zero2" and sharded and pieces.pipelined:  # gathered once: micro batches interleave
        sync_gather = elapsed_s(ahead, contention=contention)
        ahead = [UnitRun(run.count, run.compute_s) for run in ahead]
        sync_gather -= elapsed_s(ahead)
    last = _bucketed(last, [pieces.traffic[index].bucket_bytes for _, index in units], pieces.buckets)
    forward_s = elapsed_s(ahead, contention=contention, ahead=pieces.gathers_ahead)
    backward_s = elapsed_s(reversed(back), contention=contention)
    return StageTime(
        forward_s=forward_s,
        backward_s=backward_s,
        sync_s=elapsed_s(reversed(last), contention=contention) - backward_s + sync_gather,
        compute_s=compute,
        recompute_s=recompute,
        tp_s=tp,
        cp_s=cp,
        ep_s=ep,
        host_forward_s=host_forward,
        host_backward_s=host_backward,
        ahead_s=(compute_ahead, tp_ahead, cp_ahead, ep_ahead),
    )


def _last_alone(units: Sequence[tuple[int, int]], pieces: StageParts) -> tuple[Sequence[tuple[int, int]], int]:
    """Split the last block, where it stays gathered, off the others that are equal; return its place, or -1."""
    if not pieces.keeps_last:
        return units, -1
    last = max((place for place, (_, index) in enumerate(units) if pieces.blocks[index]), default=-1)
    if last < 0 or units[last][0] == 1:
        return units, last
    count, index = units[last]
    return [*units[:last], (count - 1, index), (1, index), *units[last + 1 :]], last + 1


def _bucketed(
    runs: list[UnitRun], sent: Sequence[float], buckets: tuple[Callable[[float], float], float, float] | None
) -> list[UnitRun]:
    """Reduce the gradients of units, last unit first, in buckets: one is sent when it is full, or at the end."""
    if buckets is None:
        return runs
    seconds, limit, others = buckets
    found: list[UnitRun] = []
    pending = 0.0
    for run, size in zip(reversed(runs), reversed(sent), strict=True):
        for _ in range(run.count):
            reduce_s, pending = 0.0, pending + size
            while pending >= limit:
                reduce_s, pending, limit = reduce_s + seconds(limit), pending - limit, others
            found.append(UnitRun(1, run.compute_s, run.gather_s, reduce_s))
    if pending and found:
        end = found[-1]
        found[-1] = UnitRun(1, end.compute_s, end.gather_s, end.reduce_s + seconds(pending))
    return found[::-1]


def take(blocks: Sequence[tuple[int, int]], start: int, count: int) -> list[tuple[int, int]]:
    """Slice ``count`` blocks from position ``start`` out of a list of (count, unit)."""
    taken, position = [], 0
    for number, unit in blocks:
        mine = min(start + count, position + number) - max(start, position)
        if mine > 0:
            taken.append((mine, unit))
        position += number
    return taken


def _hosted(device_s: float, host_s: float) -> float:
    """Seconds of work that device and host both take part in, one running ahead of the other.

    The result lies between the larger of the two and their sum: the more often they wait for each other, the closer to
    the sum.
    """
    if not host_s:
        return device_s
    return float((device_s**HOST_POWER + host_s**HOST_POWER) ** (1.0 / HOST_POWER))


def alone(stage: StageTime) -> tuple[float, float]:
    """Forward and backward seconds of a micro batch on the device alone."""
    return stage.forward_s, stage.backward_s


def with_host(stage: StageTime, plan: Plan, own_s: float) -> tuple[float, float]:
    """Forward and backward seconds of a micro batch including the host.

    ``own_s`` of the host's seconds are outside of units. Without a pipeline the host may run ahead over a full micro
    batch; with one it synchronizes with its neighbours after each. A CPU is its own host and starts one operation after
    the other.
    """
    if plan.device == "cpu":
        return stage.forward_s + stage.host_forward_s, stage.backward_s + stage.host_backward_s
    if plan.dims.pp > 1:
        ahead, back = stage.host_forward_s + own_s / 2, stage.host_backward_s + own_s / 2
        return _hosted(stage.forward_s, ahead), _hosted(stage.backward_s, back)
    device = stage.forward_s + stage.backward_s
    full = _hosted(device, stage.host_forward_s + stage.host_backward_s + own_s)
    return stage.forward_s, stage.backward_s + full - device
