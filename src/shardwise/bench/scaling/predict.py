"""Predicted scaling beyond the measured sizes: a measured step, and modelled dp traffic.

The computation of a device is measured on the smallest size, part by part, and is not modelled. Modelled are the
additions of more data-parallel ranks:

- the collectives of `parallel.replicate` and `parallel.shard`: ddp's buckets (the first of 1 MiB, the others of 25 MiB,
  PyTorch's defaults, filled in the order in which gradients come), each unit's gathers and reductions under zero2, fsdp
  and hsdp; their seconds are those of `cost.collectives`, from the calibration of ``bench comm`` or the catalogue;
- the part that computation hides: ddp reduces beside the last backward; sharded units are gathered one ahead on a GPU
  (`cost.schedule`), while gloo on a CPU finishes each call before it returns, so that nothing is hidden;
- the small messages of a step (`CONTROL_CALLS`);
- waiting for the slowest: the mean of the largest of n draws from the measured steps of the smallest size, as if ranks
  were late by chance and independently.

Not modelled: networks of several layers and their congestion, products that become slower as strong scaling makes micro
batches smaller, and transfers between stages of a pipeline. Measured sizes include these: the curve goes through the
largest size whose ranks had separate cores or GPUs. Errors are listed in docs/scaling.md. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from shardwise.bench.scaling.scaling_plans import plan_at
from shardwise.cost.time.collective_time import (
    GLOO_BYTES_PER_S,
    Calibration,
    CollectiveKind,
    Group,
    collective_s,
    sharded_gather,
    sharded_reduction,
    wire_share,
)
from shardwise.cost.time.estimate_time import JITTER
from shardwise.cost.time.layer_time import COMPUTE_BYTES
from shardwise.cost.time.optimizer_time import MASTER_BYTES
from shardwise.cost.time.overlap import CONTENTION, UnitRun, elapsed_s
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.measure.scaling_facts import Mode, Sample, Scaling, UnitTraffic, Z
from shardwise.model.profile import ModelProfile, Unit, Weight
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import keeps_last_block

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP's ``dist._DEFAULT_FIRST_BUCKET_BYTES`` and ``bucket_cap_mb`` in PyTorch 2.13."""
CONTROL_CALLS = {True: 3, False: 2}
"""Small messages of a step: rank agreement, the loss, and over shards the gradient norm."""
CONTROL_BYTES = 512.0
HOST_COPY_BYTES_PER_S = 8e9
"""Rate of copies into and out of the flat buffers of sharded units on a CPU.

Measured were 4 to 11 GB/s for 0.3 to 28 MB that were not in its caches, on one EPYC core. A GPU's copies are not
modelled: they take a hundredth of that.
"""
SHARD_COPIES = 1.5
"""Bytes copied per byte of a unit: a shard into a buffer, unsharded out of one, or reversed."""
FIXED = ("clip", "optimizer")
"""Parts that do not shrink with a rank's samples, but with its shard of the weights."""
TALK = ("exposed_dp", "control", "slowest_rank")
"""Parts that more than one data-parallel rank has, and that are modelled."""
LINK_SPREAD = {"measured": (0.95, 1.05), "catalogue": (0.85, 1.5), "cpu": (0.5, 2.0)}
"""Ratio of measured to predicted collective seconds, in 8 of 10 cases.

The cases are a fit on the same link, the catalogue's GPU links (benchmarks/accuracy: 16 % at the 90th percentile inside
a node, worse across nodes), and two CPU ranks on another machine; the first and the last are estimates.
"""


class Point(BaseModel):
    """Size on the scaling curve.

    ``model_s`` is the formulas' result, the sum of a rank's local time (``own_s``) and its waits for links and for the
    slowest rank; ``step_s`` goes through the measurements, within ``low_s`` and ``high_s`` in 8 of 10 cases. ``reason``
    explains why they are ``None``, if they are.
    """

    model_config = ConfigDict(frozen=True)

    mode: Mode
    devices: int
    model_s: float | None = None
    own_s: float | None = None
    links_s: float | None = None
    slowest_s: float | None = None
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    tokens_per_s: float | None = None
    efficiency: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


class ScalingCurve(BaseModel):
    """Points of one mode, their assumptions, and measured over modelled at the anchored size."""

    model_config = ConfigDict(frozen=True)

    mode: Mode
    points: tuple[Point, ...]
    assumptions: tuple[str, ...] = ()
    measured_over_model: float | None = None
    anchor: int | None = None


def units_of(profile: ModelProfile | None, plan: Plan) -> tuple[UnitTraffic, ...]:
    """Units of a model for data-parallel traffic, in order; empty without a profile."""
    if profile is None:
        return ()
    full = sum(unit.flops * unit.count for unit in profile.units) or 1.0
    return tuple(_unit(unit, unit.flops / full, plan) for unit in profile.units)


def _unit(unit: Unit, share: float, plan: Plan) -> UnitTraffic:
    width = COMPUTE_BYTES[plan.precision]

    def here(weight: Weight) -> float:
        return weight.num_elements / (plan.dims.tp if weight.tp_dim is not None else 1)

    return UnitTraffic(
        name=unit.name,
        count=unit.count,
        block=unit.kind == "block",
        share=share,
        gather_bytes=sum(here(w) * min(width, w.itemsize) for w in unit.weights),
        reduce_bytes=sum(here(w) * MASTER_BYTES for w in unit.weights if w.trainable),
    )


@dataclass(frozen=True)
class Answer:
    """Seconds of a step: a rank's local time, its waits for links, and for the slowest rank."""

    own_s: float
    links_s: float
    slowest_s: float

    @property
    def step_s(self) -> float:
        """Total seconds of the step."""
        return self.own_s + self.links_s + self.slowest_s


@dataclass(frozen=True)
class Links:
    """Collectives between the data-parallel ranks of ``plan`` on ``cluster``."""

    cluster: ClusterSpec
    plan: Plan
    calibration: Calibration | None = None

    def seconds(self, kind: CollectiveKind, message_bytes: float, *, replicas: bool = False) -> float:
        """Seconds of one collective over the ranks that share gradients; nan if unknown.

        With ``replicas`` (hsdp) over the replicas.
        """
        dims, per_node = self.plan.dims, self.cluster.devices_per_node
        sharded = self.plan.parsed.shards_parameters
        ranks = (dims.dp_shard if sharded else dims.dp) * dims.cp
        inner = max(1, per_node // dims.tp)
        if replicas:
            ranks, inner = dims.dp_replicate, max(1, per_node // (dims.tp * ranks))
        group = Group(ranks, min(ranks, inner))
        sharing = max(1, per_node // group.per_node) if group.per_node < ranks else 1
        return collective_s(kind, message_bytes, group, self.cluster, sharing=sharing, calibration=self.calibration)

    def gather_unit(self, message_bytes: float) -> float:
        """Seconds to gather a sharded unit's weights in its group."""
        ranks = self.plan.dims.dp_shard * self.plan.dims.cp
        return self.seconds(sharded_gather(self.cluster, self.calibration, ranks), message_bytes)

    def reduce_unit(self, message_bytes: float) -> float:
        """Seconds to reduce a sharded unit's gradients: scattered in its group, then over replicas."""
        seconds = self.seconds(sharded_reduction(self.cluster, self.calibration), message_bytes)
        if self.plan.dims.dp_replicate > 1:
            share = self.plan.dims.dp_shard * self.plan.dims.cp
            seconds += self.seconds("all_reduce", message_bytes / share, replicas=True)
        return seconds


def predict(base: Sample, units: Sequence[UnitTraffic], plan: Plan, links: Links, *, busy: bool = False) -> Answer:
    """Predict one step of ``plan`` from the measured step ``base`` of a smaller size.

    Both have the same reference plan. ``busy``: the ranks of a node keep all its cores computing, so that a CPU's
    hidden communication slows the computation.

    Raises:
        PlanError: the base has no timing, or the bandwidth between the ranks is unknown.
    """
    if base.timing is None or not units:
        raise PlanError("where the smallest size's time goes is not known" if units else "the model cannot be traced")
    work = plan_share(plan) / base.share
    local = {
        part: spread.mean_s * _factor(part, base, plan, work) for part, spread in base.timing.parts.items() if spread
    }
    scale = base.step_s / base.timing.step_s if base.timing.step_s else 1.0
    local = {part: seconds * scale for part, seconds in local.items()}
    local_s = sum(local.values())
    backward = (local.get("backward", 0.0) + local.get("recompute", 0.0)) / plan.grad_accum
    forward = local.get("forward", 0.0) / plan.grad_accum
    exposed = 0.0
    if plan.dims.dp * plan.dims.cp > 1:
        exposed = _exposed_s(units, plan, links, forward, backward, busy=busy)
        calls = CONTROL_CALLS[plan.parsed.shards_parameters]
        exposed += calls * links.seconds("all_reduce", CONTROL_BYTES)
    if not math.isfinite(exposed):
        raise PlanError("the bandwidth between the ranks is not known: give --calibration, measured by bench comm")
    nodes = max(1, links.cluster.nodes)
    exposed += JITTER * math.log2(nodes) * local_s
    late = slowest_of(base.steps_s, plan.dims.world_size // base.devices) * local_s
    return Answer(own_s=local_s, links_s=exposed, slowest_s=late)


def plan_share(plan: Plan) -> int:
    """Samples of a step on one data-parallel rank of ``plan``."""
    return (plan.micro_batch or 1) * plan.grad_accum


def _factor(part: str, base: Sample, plan: Plan, work: float) -> float:
    """Factor of a part of the base's step on ``plan``; 0 for modelled parts."""
    alone = base.plan.dims.dp * base.plan.dims.cp == 1
    if part in TALK:
        return 1.0 if alone and part == "control" else 0.0
    if part == "pipeline":  # p − 1 micro batches at the ends of a step, for any number of them
        return (plan.micro_batch or 1) / (base.plan.micro_batch or 1)
    if part not in FIXED:
        return work
    parsed = plan.parsed
    if parsed.shards_parameters:
        return base.plan.dims.dp_shard / plan.dims.dp_shard
    return base.plan.dims.dp / plan.dims.dp if parsed.base == "zero1" and part == "optimizer" else 1.0


def slowest_of(steps_s: Sequence[float], ranks: int) -> float:
    """Mean of the largest of ``ranks`` draws from ``steps_s`` above their mean, relative to it.

    Of the values in order, the k-th of m is the largest of n draws with probability (k/m)^n - ((k-1)/m)^n. It is never
    more than the largest observed value.
    """
    ordered, number = sorted(steps_s), len(steps_s)
    if ranks < 2 or number < 2:
        return 0.0
    mean = sum(ordered) / number
    largest = sum(x * ((k / number) ** ranks - ((k - 1) / number) ** ranks) for k, x in enumerate(ordered, 1))
    return max(0.0, largest / mean - 1.0)


def _exposed_s(
    units: Sequence[UnitTraffic], plan: Plan, links: Links, forward_s: float, backward_s: float, *, busy: bool
) -> float:
    """Exposed seconds of a step's data-parallel traffic.

    ``forward_s`` and ``backward_s`` are those of a micro batch.
    """
    on_cpu = plan.device == "cpu"
    if plan.parsed.shards_parameters or plan.dims.tp * plan.dims.pp > 1:
        return _by_units(units, plan, links, forward_s, backward_s, on_cpu=on_cpu)
    buckets = ddp_buckets(units, backward_s)
    wire = traffic = 0.0
    for ready, message in buckets:
        seconds = links.seconds("all_reduce", message)
        wire, traffic = max(wire, ready) + seconds, traffic + seconds
    exposed = max(0.0, wire - backward_s)
    taken = _host_share(buckets, links, traffic) if on_cpu and busy else 0.0 if on_cpu else CONTENTION
    exposed += taken * max(0.0, traffic - exposed)
    if plan.parsed.base == "zero1":  # every rank receives the weights that others have updated
        exposed += links.seconds("all_gather", sum(u.count * u.reduce_bytes for u in units))
    return exposed


def ddp_buckets(units: Sequence[UnitTraffic], backward_s: float) -> list[tuple[float, float]]:
    """Bytes of each DDP bucket, after the seconds from the start of backward until it is full.

    Gradients come from the last unit to the first, within a unit evenly. The gradient that fills a bucket closes it.
    """
    found: list[tuple[float, float]] = []
    now = filled = 0.0
    limit: float = FIRST_BUCKET_BYTES
    for unit in reversed(units):
        for _ in range(unit.count):
            seconds, rest = unit.share * backward_s, unit.reduce_bytes
            begin = now
            while rest and filled + rest >= limit:
                rest -= limit - filled
                now = begin + seconds * (1.0 - rest / unit.reduce_bytes)
                found.append((now, limit))
                filled, limit = 0.0, BUCKET_BYTES
            filled += rest
            now = begin + seconds
    if filled:
        found.append((backward_s, filled))
    return found


def _host_share(buckets: Sequence[tuple[float, float]], links: Links, traffic_s: float) -> float:
    """Fraction of gloo's seconds that use a core: 1 over loopback, little over a slow link."""
    message = sum(size for _, size in buckets)
    ranks = max(2, links.plan.dims.dp)
    return min(1.0, message * wire_share("all_reduce", ranks) / GLOO_BYTES_PER_S / traffic_s) if traffic_s else 0.0


def _by_units(
    units: Sequence[UnitTraffic], plan: Plan, links: Links, forward_s: float, backward_s: float, *, on_cpu: bool
) -> float:
    """Exposed seconds of units that communicate separately.

    These are sharding's gathers and reductions, or each unit's reduction beside model parallel.
    """
    sharded, stages = plan.parsed.shards_parameters, plan.dims.pp
    regathers = plan.parsed.reshards_after_forward
    copied = SHARD_COPIES / HOST_COPY_BYTES_PER_S if on_cpu and plan.dims.dp_shard * plan.dims.cp > 1 else 0.0
    ahead, back, last = [], [], []
    root = UnitTraffic(
        name="root",
        count=1,
        block=False,
        share=0.0,
        gather_bytes=sum(u.count * u.gather_bytes for u in units if not u.block),
        reduce_bytes=sum(u.count * u.reduce_bytes for u in units if not u.block),
    )
    moving = [root, *(u for u in units if u.block)]
    for unit in moving:
        count = max(1, unit.count // stages) if unit.block else 1
        gather, reduce = 0.0, 0.0
        if sharded:
            gather = links.gather_unit(unit.gather_bytes) + copied * unit.gather_bytes
            reduce = links.reduce_unit(unit.reduce_bytes) + copied * unit.reduce_bytes
        else:
            reduce = links.seconds("all_reduce", unit.reduce_bytes)
        regather = gather if regathers and unit.block else 0.0
        ahead.append(UnitRun(count, unit.share * forward_s, gather))
        back.append(UnitRun(count, unit.share * backward_s, regather, reduce if plan.syncs_every_micro_batch else 0.0))
        last.append(UnitRun(count, unit.share * backward_s, regather, reduce))
    passes = [(plan.grad_accum, ahead), (plan.grad_accum - 1, back[::-1]), (1, last[::-1])]
    added = 0.0
    for times, runs in passes:
        work = sum(run.count * run.compute_s for run in runs)
        if on_cpu:  # FSDP2 and gloo: one call after the other
            added += times * sum(run.count * (run.gather_s + run.reduce_s) for run in runs)
        else:
            added += times * (elapsed_s(runs, contention=CONTENTION) - work)
    if keeps_last_block(plan) and moving[-1].block:
        added -= plan.grad_accum * ahead[-1].gather_s
    return added


def cluster_at(scaling: Scaling, devices: int, calibration: Calibration | None) -> tuple[ClusterSpec, str]:
    """Scale the cluster to another size; also a sentence with its assumptions.

    The number of nodes grows and each stays unchanged. Where no network is known, CPU ranks are assumed to be joined as
    the measured ones are; GPUs get the network of the catalogue's typical node, and none where there is none.
    """
    here = scaling.cluster
    each = here.devices_per_node
    if devices <= each:
        return here.model_copy(update={"nodes": 1, "devices_per_node": devices}), ""
    nodes = math.ceil(devices / each)
    measured = calibration is not None and any(one.per_node < one.ranks for one in calibration.measured)
    if measured or here.network is not None:
        return here.model_copy(update={"nodes": nodes}), ""
    if here.device == "cpu":
        cores = None if here.cores_per_node is None else math.ceil(here.cores_per_node / each * devices)
        update = {"nodes": 1, "devices_per_node": devices, "cores_per_node": cores}
        text = f"beyond {each} rank{'s' if each > 1 else ''}: each with cores of its own, joined as on this machine"
        return here.model_copy(update=update), text
    network = here.gpu.network if here.gpu is not None else None
    if network is None:
        return here.model_copy(update={"nodes": nodes}), ""
    text = f"beyond {each} devices: nodes joined by the catalogue's typical network ({network.source})"
    return here.model_copy(update={"nodes": nodes, "network": network}), text


def curve_of(
    scaling: Scaling, mode: Mode, beyond: int, calibration: Calibration | None = None, *, sizes: Sequence[int] = ()
) -> ScalingCurve:
    """Build the curve of one mode: ``sizes``, the measured ones, and doublings up to ``beyond``."""
    samples = scaling.of(mode)
    if not samples:
        return ScalingCurve(mode=mode, points=())
    base = samples[0]
    wanted = {one.devices for one in samples} | set(sizes)
    wanted |= {base.devices << k for k in range(64) if base.devices << k <= beyond}
    found: dict[int, tuple[Answer, Plan]] = {}
    reasons: dict[int, str] = {}
    assumptions: dict[str, None] = {}
    for devices in sorted(wanted):
        try:
            _check_share(scaling.reference, devices, mode)
            plan = plan_at(scaling.reference, devices, mode)
            cluster, assumed = cluster_at(scaling, devices, calibration)
            links = Links(cluster=cluster, plan=plan, calibration=calibration)
            found[devices] = predict(base, scaling.units, plan, links, busy=_busy(base, cluster)), plan
            if assumed:
                assumptions[assumed] = None
        except PlanError as error:
            reasons[devices] = "; ".join(error.problems)
    fair = [one for one in samples[1:] if not one.crowded and one.devices in found]
    anchor = fair[-1] if fair else None
    ratio = None if anchor is None else anchor.step_s / found[anchor.devices][0].step_s
    spread = LINK_SPREAD["measured" if calibration is not None else "cpu" if base.cores is not None else "catalogue"]
    points = [_point(base, mode, size, *found[size], ratio, spread) for size in sorted(found)]
    if anchor is not None:
        points = [_no_better(point, base, anchor) if point.devices > anchor.devices else point for point in points]
    points += [Point(mode=mode, devices=size, reason=why) for size, why in reasons.items()]
    notes = [*assumptions, _link_text(calibration, base)]
    return ScalingCurve(
        mode=mode,
        points=tuple(sorted(points, key=lambda one: one.devices)),
        assumptions=tuple(notes),
        measured_over_model=ratio,
        anchor=None if anchor is None else anchor.devices,
    )


def _check_share(reference: Plan, devices: int, mode: Mode) -> None:
    """Check once for all sizes of the curve that strong scaling cannot reach.

    Raises:
        PlanError: not every data-parallel rank gets a sample of the global batch.
    """
    batch = reference.global_batch or reference.dims.dp
    dims = reference.dims
    if mode == "strong" and devices // (dims.tp * dims.pp * dims.cp) > batch:
        raise PlanError(f"a global batch of {batch} has no sample for each data-parallel rank")


def _no_better(point: Point, base: Sample, anchor: Sample) -> Point:
    """Limit the efficiency of more devices to the upper bound of the largest measured size's."""
    if point.step_s is None or point.low_s is None or point.efficiency is None or point.high is None:
        return point
    each = anchor.tokens_per_s / anchor.devices / (base.tokens_per_s / base.devices)
    error = math.hypot(base.deviation, anchor.deviation) * Z
    best = each * (1 + error)
    if point.high <= best:
        return point
    limited: dict[str, float] = {"high": best, "low_s": point.low_s * point.high / best}
    if point.efficiency > best and point.low is not None and point.tokens_per_s is not None:
        ideal, low = point.efficiency * point.step_s, min(point.low, each * (1 - error))
        tokens = point.tokens_per_s * best / point.efficiency
        limited = {"high": best, "efficiency": best, "low": low, "tokens_per_s": tokens}
        limited |= {"low_s": ideal / best, "step_s": ideal / best, "high_s": ideal / low}
    return point.model_copy(update=limited)


def _busy(base: Sample, cluster: ClusterSpec) -> bool:
    """Return whether all cores of a node compute, so that gloo takes time from them."""
    return base.cores is not None and cluster.devices_per_node * base.threads >= (cluster.cores_per_node or base.cores)


def _link_text(calibration: Calibration | None, base: Sample) -> str:
    if calibration is not None:
        return "links as measured by bench comm"
    if base.cores is not None:
        return "links as those of two CPU ranks elsewhere, good to a factor of 2: measure them with bench comm"
    return "links from the catalogue: measure them with bench comm"


def _point(
    base: Sample,
    mode: Mode,
    devices: int,
    answer: Answer,
    plan: Plan,
    ratio: float | None,
    spread: tuple[float, float],
) -> Point:
    """Scale the answer to the measurement, with the interval of its parts."""
    moved = 1.0 if ratio is None or devices == base.devices else ratio
    error = base.deviation * Z
    low = answer.own_s * (1 - error) + answer.links_s * spread[0]
    high = answer.own_s * (1 + error) + answer.links_s * spread[1] + 2 * answer.slowest_s
    low, high = min(low, low * moved), max(high, high * moved)
    step = answer.step_s * moved
    work = plan_share(plan) / base.share
    tokens = base.tokens_per_device * devices * work
    ideal = base.step_s * work
    return Point(
        mode=mode,
        devices=devices,
        model_s=answer.step_s,
        own_s=answer.own_s,
        links_s=answer.links_s,
        slowest_s=answer.slowest_s,
        step_s=step,
        low_s=low,
        high_s=high,
        tokens_per_s=tokens / step,
        efficiency=ideal / step,
        low=ideal / high,
        high=ideal / low,
    )
