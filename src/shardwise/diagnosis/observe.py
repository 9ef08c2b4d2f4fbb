"""Collect the inputs of diagnosis: `HostRecorder` during a run, `observe` at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardwise.cost.time.collective_time import Group, catalogue_bus_bytes_per_s
from shardwise.cost.time.step_time import StepTime
from shardwise.diagnosis.observed import DeviceState, HostUse, LinkUse, LossSpike, LostGradient, Observed, SaveStall
from shardwise.distributed.process_group import Ranks, gather_ints, gather_text
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import Link
from shardwise.measure.gpu.nvml import HARMFUL, DeviceTrack, GpuTrack
from shardwise.measure.step_time.timing import Timing
from shardwise.plan.plan import Plan
from shardwise.search.alternatives import Alternative
from shardwise.train.session import Session
from shardwise.train.step import Step

CORES_A_NUMBER = 48  # cores of a mask packed into one integer
POWER_CAP = "power cap"


class HostRecorder:
    """Session observer of a node's cores and network; reads the kernel's counters twice.

    The first reading is after the model is built, as weights are broadcast before; the second by `finish`.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart counting."""
        self._steps = 0
        self._began = time.monotonic()
        self._own = _own_cpu_s()
        self._busy = _busy_cpu_s()
        self._sent = _sent_bytes()

    def on_prepared(self, session: Session) -> None:
        """Restart counting."""
        self.restart()

    def on_step_start(self, session: Session, step: Step) -> None:
        """Nothing to do."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Nothing to do."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Count one step."""
        self._steps += 1

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Nothing to do."""

    def finish(self, ranks: Ranks) -> HostUse | None:
        """Return the usage since the start, on rank 0, for its node. Collective."""
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        words = -(-(max(cores) + 1) // CORES_A_NUMBER)
        words = max(row[0] for row in gather_ints([words], ranks))
        masks = [sum(1 << (c % CORES_A_NUMBER) for c in cores if c // CORES_A_NUMBER == w) for w in range(words)]
        seconds = max(time.monotonic() - self._began, 1e-9)
        busy, own = _busy_cpu_s() - self._busy, _own_cpu_s() - self._own
        rows = gather_ints([int(own * 1e6), torch.get_num_threads(), *masks], ranks)[: ranks.local_world_size]
        if not ranks.is_main:
            return None
        together = [0] * words
        for row in rows:
            together = [have | more for have, more in zip(together, row[2:], strict=True)]
        nic, sent = self._busiest()
        speed = psutil.net_if_stats()[nic].speed if nic in psutil.net_if_stats() else 0
        return HostUse(
            cores=sum(mask.bit_count() for mask in together),
            machine_cores=os.cpu_count() or len(cores),
            local_ranks=ranks.local_world_size,
            threads=max(row[1] for row in rows),
            busy=busy / seconds,
            own=sum(row[0] for row in rows) / 1e6 / seconds,
            seconds=seconds,
            steps=self._steps,
            nic=nic,
            nic_bytes=sent,
            nic_speed=speed * 1e6 / 8 if speed > 0 else None,
        )

    def _busiest(self) -> tuple[str | None, float | None]:
        """Return the interface (not loopback) that sent most since the start, and its bytes."""
        found = {name: size - self._sent.get(name, 0) for name, size in _sent_bytes().items() if name != "lo"}
        name = max(found, key=lambda n: found[n], default=None)
        return name, None if name is None else float(found[name])


def _own_cpu_s() -> float:
    """CPU seconds of this process, all its threads, and its data workers."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system
    return total


def _busy_cpu_s() -> float:
    """CPU seconds that the machine has been busy, for any process."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def _sent_bytes() -> dict[str, int]:
    return {name: counters.bytes_sent for name, counters in psutil.net_io_counters(pernic=True).items()}


def gpu_states(track: GpuTrack | None, ranks: Ranks) -> tuple[DeviceState, ...]:
    """Return each rank's known device state over the run, in rank order. Collective.

    ``track`` are a sampler's records of this rank's own device (the first, if there are several).
    """
    mine = ""
    if track is not None and track.devices:
        mine = device_state(ranks.rank, track.devices[0]).model_dump_json()
    return tuple(DeviceState.model_validate_json(text) for text in gather_text(mine, ranks) if text)


def device_state(rank: int, track: DeviceTrack) -> DeviceState:
    """Summarize a device of ``rank``: only throttle reasons that cost speed, and the power cap."""
    kept = {r: share for r, share in (track.reasons or {}).items() if r in HARMFUL or r == POWER_CAP}
    return DeviceState(
        rank=rank,
        name=track.name,
        clock=track.mean_sm_clock_hz,
        max_clock=track.max_sm_clock_hz,
        temperature=track.highest_temperature_c,
        power=track.mean_power_w,
        power_limit=track.power_limit_w,
        throttled=kept,
    )


def observe(
    session: Session,
    timing: Timing,
    *,
    host: HostUse | None = None,
    loader_workers: int | None = None,
    saves: Sequence[SaveStall] = (),
    save_every: int | None = None,
    traffic: dict[str, float] | None = None,
    cluster: ClusterSpec | None = None,
    measured: dict[str, tuple[float, str]] | None = None,
    peak_bytes: int | None = None,
    predicted: StepTime | None = None,
    alternatives: Sequence[Alternative] = (),
    gpus: Sequence[DeviceState] = (),
    price: float | None = None,
    price_from: str = "",
    mfu: float | None = None,
    losses: Sequence[tuple[int, float]] = (),
    spikes: Sequence[LossSpike] = (),
    lost_gradients: Sequence[LostGradient] = (),
    vocab_size: int | None = None,
    own_loop: bool = False,
) -> Observed:
    """Collect everything known of a run, on rank 0; missing inputs stay unknown.

    Args:
        traffic: bytes that one device sends in a step, by axis (`shardwise.plan.traffic.sent_bytes`).
        cluster: what the data sheets say of the links and the price.
        measured: bytes a second that `shardwise bench comm` got out of an axis, and when or where that was.
        peak_bytes: allocated on the fullest rank, as the fit receipt has it.
    """
    ranks, plan = session.ranks, session.plan
    nodes = max(1, ranks.world_size // max(1, ranks.local_world_size))
    if price is None and cluster is not None:
        price, price_from = price_of(cluster)
    return Observed(
        timing=timing,
        plan=plan,
        device="cuda" if ranks.device.type == "cuda" else "cpu",
        nodes=nodes,
        backend=_backend(ranks),
        host=host,
        loader_workers=loader_workers,
        saves=tuple(saves),
        save_every=save_every,
        links=tuple(links_of(session, timing, nodes, host, traffic or {}, cluster, measured or {})),
        peak_bytes=peak_bytes,
        device_bytes=_device_bytes(ranks),
        predicted=predicted,
        alternatives=tuple(alternatives),
        gpus=tuple(gpus),
        price=price,
        price_from=price_from,
        mfu=mfu,
        losses=tuple(losses),
        spikes=tuple(spikes),
        lost_gradients=tuple(lost_gradients),
        vocab_size=vocab_size,
        own_loop=own_loop,
    )


def price_of(cluster: ClusterSpec) -> tuple[float | None, str]:
    """Return US dollars per device hour and their source.

    The cluster's own price, else the hardware table's.
    """
    own, listed = cluster.price_per_device_hour, None if cluster.gpu is None else cluster.gpu.price_per_hour
    if own is not None and own != listed:
        return own, "the price of this cluster"
    return listed, "" if listed is None else "the hardware table's price, which may not be yours"


def _backend(ranks: Ranks) -> str | None:
    if ranks.world_size == 1 or not dist.is_initialized():
        return None
    return "nccl" if ranks.device.type == "cuda" else "gloo"


def _device_bytes(ranks: Ranks) -> int | None:
    """Memory of this rank's device; for a CPU its share of the host's."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.device)[1])
    return int(psutil.virtual_memory().total // max(1, ranks.local_world_size))


def links_of(
    session: Session,
    timing: Timing,
    nodes: int,
    host: HostUse | None,
    traffic: dict[str, float],
    cluster: ClusterSpec | None,
    measured: dict[str, tuple[float, str]],
) -> list[LinkUse]:
    """Return the known link facts of each axis with exposed communication.

    For TCP between nodes, the interface's own byte counter (with protocol and other traffic) and its driver's speed
    take precedence over formulas and data sheets. They are per node, for all its ranks.
    """
    dims, found = session.plan.dims, []
    inside = max(1, dims.world_size // nodes)
    reach = {"tp": dims.tp, "cp": dims.tp * dims.cp, "dp": dims.tp * dims.cp * dims.dp}
    for axis in ("dp", "tp", "cp"):
        if timing.parts.get(f"exposed_{axis}") is None:
            continue
        crosses = nodes > 1 and reach[axis] > inside
        had, source = measured.get(axis, (None, ""))
        only = [a for a in ("dp", "tp", "cp") if reach[a] > inside and getattr(dims, a) > 1] == [axis]
        if crosses and only and host is not None and host.nic is not None and _mostly(host, traffic.get(axis)):
            name, sent = f"the interface {host.nic}", (host.nic_bytes or 0.0) / host.steps
            expected, by = host.nic_speed, "by its driver"
        else:
            link = None if cluster is None else cluster.network if crosses else cluster.link
            name = (
                "the network between nodes" if crosses else f"the {link.kind} link" if link else "the node's own link"
            )
            sent = traffic.get(axis)  # type: ignore[assignment]
            expected, by = _catalogue(cluster, link, axis, session.plan, inside)
        found.append(
            LinkUse(
                axis=axis,
                name=name,
                bytes_per_step=sent,
                expected=expected,
                expected_from=by if expected is not None else "",
                measured=had,
                measured_from=source,
            )
        )
    return found


def _catalogue(
    cluster: ClusterSpec | None, link: Link | None, axis: str, plan: Plan, inside: int
) -> tuple[float | None, str]:
    """Return the expected bytes/s of an axis' collectives, and the source of the number.

    For GPUs, the rate that the catalogue expects of NCCL's rings, which on PCIe without peer-to-peer, on a mesh or
    between two devices is far below the data sheet; for CPUs, the network's speed.
    """
    if cluster is None or link is None:
        return None, ""
    if cluster.device == "cpu":
        return link.bytes_per_s, link.source
    dims = plan.dims
    ranks = {"tp": dims.tp, "cp": dims.cp, "dp": dims.dp}[axis]
    closer = {"tp": 1, "cp": dims.tp, "dp": dims.tp * dims.cp}[axis]
    group = Group(ranks, max(1, min(ranks, inside // closer)))
    sharing = max(1, inside // group.per_node) if group.per_node < ranks else 1
    found = catalogue_bus_bytes_per_s("all_gather", group, cluster, sharing=sharing)
    return found, "" if found is None else f"what NCCL gets of it: {link.source}"


def _mostly(host: HostUse, planned: float | None) -> bool:
    """Return whether the interface carried the steps: RDMA bypasses these counters."""
    if not host.nic_bytes or not host.steps:
        return False
    return planned is None or host.nic_bytes / host.steps >= planned / 2


def loader_workers_of(loader: Any) -> int | None:
    """Return the worker processes of a loader that exposes them, such as torch's ``DataLoader``."""
    workers = getattr(loader, "num_workers", None)
    return workers if isinstance(workers, int) else None
