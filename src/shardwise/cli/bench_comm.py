"""Verb ``shardwise bench comm``: start ranks, or be one; print links; save samples and plot.

It is a rank under torchrun. It also writes the calibration file.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console

from shardwise.cli.arguments import Json
from shardwise.environment import rendezvous, visible_devices
from shardwise.errors import PlanError, UserError
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.hardware.cpu import cores_here, processor_name
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.launch.on_ranks import as_rank, on_ranks
from shardwise.plan.dims import ParallelDims, dims_for
from shardwise.plan.plan import DeviceType, Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.units import counted

if TYPE_CHECKING:
    from shardwise.distributed.process_group import Ranks

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
LEAST = 8  # bytes: two elements of fp32
WIDTH = 150


class CommRequest(BaseModel):
    """Request of the measurement, as sent to the ranks."""

    model_config = ConfigDict(frozen=True)

    plan: Plan
    cluster: ClusterSpec
    sizes_bytes: tuple[int, int]
    seconds: float
    output: Path
    as_json: bool


def run_bench_comm(
    strategy: Annotated[str, typer.Option(help="Strategy whose mesh axes are measured, such as hsdp+tp2.")] = "ddp",
    nproc: Annotated[int | None, typer.Option(help="Ranks here; default: one per GPU, or 2 on CPU.", min=2)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (gloo) or cuda (NCCL).")] = "auto",
    smallest: Annotated[str, typer.Option("--min-size", help="Smallest message size.")] = "128B",
    largest: Annotated[str, typer.Option("--max-size", help="Largest message size.")] = "64MiB",
    seconds: Annotated[float, typer.Option(help="Maximum seconds per collective and axis.", min=0.1)] = 8.0,
    cluster: Annotated[
        str | None, typer.Option(help="Expected links, such as 2x8xH100/ib400; default: detected.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for raw samples, calibration and plot.")] = Path("benchmarks"),
    as_json: Json = False,
) -> None:
    """Run ``shardwise bench comm``. Under torchrun this process is a rank; else it starts ranks.

    Raises:
        UserError: every invalid argument.
    """
    place = rendezvous()
    if place is not None and nproc is not None:
        started = counted(place.world_size, "rank")
        raise UserError(f"--nproc {nproc} under torchrun: it has started {started}; leave --nproc out")
    local = place.local_world_size if place is not None else nproc
    nodes = 1 if place is None else max(1, place.world_size // place.local_world_size)
    request = read_request(
        strategy=strategy,
        local_ranks=local,
        nodes=nodes,
        device=device,
        sizes=(smallest, largest),
        seconds=seconds,
        output=output,
        as_json=as_json,
        described=cluster,
    )
    if place is not None:
        as_rank(measure_links, request, request.plan.device)

    world = request.plan.dims.world_size
    on_ranks(f"{__name__}:measure_links", request, world, device=request.plan.device)


def read_request(
    *,
    strategy: str,
    local_ranks: int | None,
    nodes: int,
    device: str,
    sizes: tuple[str, str],
    seconds: float,
    output: Path,
    as_json: bool,
    described: str | None,
) -> CommRequest:
    """Check all arguments.

    Raises:
        UserError: every invalid argument, at once.
    """
    problems: list[str] = []
    cluster, dims = None, None
    try:
        cluster = _cluster(device, local_ranks, nodes, described)
        dims = dims_for(parse_strategy(strategy), cluster.world_size, devices_per_node=cluster.devices_per_node)
    except UserError as error:
        problems += error.problems
    bytes_of: list[int] = []
    for option, text in zip(("--min-size", "--max-size"), sizes, strict=True):
        try:
            bytes_of.append(read_size(option, text))
        except UserError as error:
            problems += error.problems
    if len(bytes_of) == 2 and bytes_of[0] > bytes_of[1]:
        problems.append(f"--min-size {sizes[0]} is above --max-size {sizes[1]}; swap them")
    if not math.isfinite(seconds):
        problems.append(f"--seconds {seconds} has no end; give seconds for each collective on each axis, such as 8")
    problems += _unwritable(output)
    if problems or cluster is None or dims is None:
        raise UserError(*problems)
    plan = Plan(strategy=strategy, dims=dims, device=cluster.device)
    return CommRequest(
        plan=plan,
        cluster=cluster,
        sizes_bytes=(bytes_of[0], bytes_of[1]),
        seconds=seconds,
        output=output,
        as_json=as_json,
    )


def _cluster(device: str, local_ranks: int | None, nodes: int, described: str | None) -> ClusterSpec:
    """Cluster of this machine with ``local_ranks`` ranks, or the described one.

    Raises:
        UserError: fewer than two ranks, an unknown device, or a description that differs from the running ranks.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device '{device}' must be one of auto, cpu, cuda")
    found = detect(device, local_ranks, visible=visible_devices())
    if found.device == "cpu" and local_ranks is None:
        found = detect("cpu", 2)
    found = found.model_copy(update={"nodes": nodes})
    if found.world_size < 2:
        raise UserError(f"1 × {found.device_name} has no links to measure; it takes 2 ranks or more (--device cpu)")
    if described is None:
        return found
    spec = parse_cluster(described)
    if (spec.device, spec.nodes, spec.devices_per_node) != (found.device, nodes, found.devices_per_node):
        raise PlanError(
            f"--cluster '{described}' is {spec.nodes} × {spec.devices_per_node} × {spec.device_name}, and what runs is "
            f"{nodes} × {found.devices_per_node} × {found.device_name}; say what runs, or leave it out"
        )
    return spec


def read_size(option: str, text: str) -> int:
    """Parse ``64MiB``, ``1e6`` or ``512kB`` to bytes.

    Raises:
        UserError: it is not a size.
    """
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    try:
        size = round(float(found[1]) * UNITS[found[2]]) if found is not None else 0
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < LEAST:
        raise UserError(f"{option} '{text}' is no size of {LEAST} bytes or more; write it as 4KiB, 64MiB or 1GB")
    return size


def _unwritable(folder: Path) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return []
    except OSError as error:
        return [f"--output '{folder}' cannot be written to: {error.strerror}; choose another folder"]


def measure_links(request: CommRequest, ranks: Ranks) -> None:
    """Time the collectives; rank 0 prints and saves the results. Collective."""
    from shardwise.bench.comm.time_collectives import bench_comm
    from shardwise.measure.comm_facts import ladder

    console = Console(stderr=request.as_json, highlight=False, soft_wrap=True, width=None if _tty(request) else WIDTH)

    def log(text: str) -> None:
        if ranks.is_main:
            console.print(f"measuring {text}", markup=False)

    found = bench_comm(request.plan, ranks, ladder(*request.sizes_bytes), request.seconds, log=log)
    compute = {}
    if ranks.device.type == "cpu":  # no table has these, and without them no time can be predicted
        from shardwise.bench.comm.time_compute import time_compute

        compute = {"compute": time_compute(ranks, log).model_dump(mode="json")}
    if ranks.is_main:
        from shardwise.bench.comm.comm_report import conclude

        document = conclude(request.cluster, facts(request, ranks) | compute, found, request.output, console)
        if request.as_json:
            print(json.dumps(document))


def _tty(request: CommRequest) -> bool:
    return (sys.stderr if request.as_json else sys.stdout).isatty()


def facts(request: CommRequest, ranks: Ranks) -> dict[str, Any]:
    """Facts of the measurement: all of `CalibrationFile` except the measured values."""
    import datetime

    import torch

    from shardwise.bench.comm.time_collectives import backend_of

    on_gpu = ranks.device.type == "cuda"
    backend, versions = backend_of(ranks)
    cluster: ClusterSpec = request.cluster
    device: DeviceType = "cuda" if on_gpu else "cpu"
    dims: ParallelDims = request.plan.dims
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if on_gpu else "CPU",
        "processor": processor_name(),
        "cores_per_node": cluster.cores_per_node or cores_here(),
        "link": None if cluster.link is None else cluster.link.kind,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "ranks": dims.world_size,
        "backend": backend,
        "versions": versions,
        "strategy": request.plan.strategy,
    }
