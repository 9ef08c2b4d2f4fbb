"""Calibration file of ``bench comm`` for ``plan``: link measurements, and where they apply.

Two machines are distinguished by what the planner uses: the device type and name, the interconnect of a node's devices,
and for CPUs, whose cores do the sending, the processor and its number of cores. Host names are not compared: they
change with every container. Not distinguished: driver and NCCL versions, and a cable that was replaced since the
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.cost.compute_calibration import LONGEST_S, MeasuredCompute
from shardwise.cost.time.collective_time import Calibration, CollectiveKind, LinkFit, Measured
from shardwise.document import read_toml
from shardwise.errors import ConfigError, PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import LinkKind, find_gpu
from shardwise.units import counted

Where = Literal["node", "network"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
FIX = "measure this one with: shardwise bench comm"


class MeasuredLink(BaseModel):
    """Measured collective on one axis: median seconds of each message size, and their fit.

    ``latency_s`` and ``bus_bytes_per_s`` are None where the sizes did not determine them. Intervals are 95 % of a
    bootstrap.
    """

    model_config = ConfigDict(frozen=True)

    collective: CollectiveKind
    axis: str
    where: Where
    ranks: int = Field(ge=2)
    per_node: int = Field(ge=1)
    groups: int = Field(default=1, ge=1)
    latency_s: float | None = Field(default=None, ge=0)
    latency_interval_s: tuple[float, float] | None = None
    bus_bytes_per_s: float | None = Field(default=None, ge=1)
    bus_interval_bytes_per_s: tuple[float, float] | None = None
    sizes_bytes: tuple[int, ...] = Field(min_length=1)
    median_s: tuple[float, ...] = Field(min_length=1)


class CalibrationFile(BaseModel):
    """Calibration with its device, software and date. ``link`` is the interconnect of a node.

    ``compute`` is of a CPU's ranks, whose speed no table has.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = Field(alias="schema", serialization_alias="schema")
    kind: Literal["links"]
    date: str
    device: Literal["cpu", "cuda"]
    device_name: str
    processor: str | None = None
    cores_per_node: int | None = None
    link: LinkKind | None = None
    nodes: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)
    ranks: int = Field(ge=2)
    backend: str
    versions: dict[str, str] = {}
    strategy: str
    measured: tuple[MeasuredLink, ...]
    compute: MeasuredCompute | None = None

    def to_toml(self) -> str:
        """Format as TOML."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def calibration(self) -> Calibration:
        """Convert to the cost model's `Calibration`.

        Of two axes with groups of the same shape the slower one is used, with the other's fit if it has none: costs do
        not distinguish axes.
        """
        found: dict[tuple[str, int, int], Measured] = {}
        for link in self.measured:
            one = _entry(link, self.devices_per_node)
            key = (one.kind, one.ranks, one.per_node)
            last, other = one.curve[-1][0], found.get(key, one)
            slower, faster = (one, other) if one.seconds(last) > other.seconds(last) else (other, one)
            found[key] = slower if slower.fit is not None else replace(slower, fit=faster.fit)
        return Calibration(measured=tuple(found.values()))

    def rates(self) -> dict[str, tuple[float, str]]:
        """Best bus bytes/s of a collective by axis (``dp``, ``tp``, ``cp``, ``pp``), and its source."""
        found: dict[str, tuple[float, str]] = {}
        for link in self.measured:
            axis = "dp" if link.axis.startswith("dp") else link.axis
            rate = link.bus_bytes_per_s
            if rate is not None and rate > found.get(axis, (0.0, ""))[0]:
                found[axis] = rate, f"bench comm, {link.collective}, {self.date}"
        return found

    def says(self) -> str:
        """Source of the link costs: ``links measured 2026-11-21 with gloo (2 ranks)``."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"links measured {self.date} with {self.backend} ({counted(self.ranks, 'rank')}{nodes})"


def _entry(link: MeasuredLink, devices_per_node: int) -> Measured:
    """Convert one link; seconds are made non-decreasing with message size, against noise."""
    across, sizes = link.where == "network", sorted(link.sizes_bytes)
    seconds = _rising([s for _, s in sorted(zip(link.sizes_bytes, link.median_s, strict=True))])
    curve = zip(map(float, sizes), seconds, strict=True)
    fit = None
    if link.latency_s is not None and link.bus_bytes_per_s is not None:
        fit = LinkFit(link.latency_s, link.bus_bytes_per_s)
    ranks, per_node = (2, 1 if across else 2) if link.collective == "send" else (link.ranks, link.per_node)
    sharing = max(1, devices_per_node // link.per_node) if across else 1
    return Measured(link.collective, ranks, per_node, tuple(curve), fit, sharing)


def _rising(values: Sequence[float]) -> list[float]:
    """Make values non-decreasing: neighbours that fall share their median, so that one outlier moves nothing else.

    Isotonic regression by pooling of adjacent violators, of absolute differences.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and median(pools[-2]) > median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [median(pool) for pool in pools for _ in pool]


def read_calibration(path: Path) -> CalibrationFile:
    """Read a file of ``bench comm``.

    Raises:
        ConfigError: the file cannot be read or is not a calibration file; every problem is listed.
    """
    hint = "; make it with: shardwise bench comm"
    try:
        data: dict[str, Any] = read_toml(path)
    except OSError as error:
        raise ConfigError(f"--calibration '{path}' cannot be read: {error.strerror}{hint}") from None
    except ValueError as error:
        raise ConfigError(f"--calibration '{path}' is no TOML: {error}{hint}") from None
    try:
        file = CalibrationFile.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'it'}: {item['msg']}" for item in error.errors()]
        raise ConfigError(*(f"--calibration '{path}': {line}{hint}" for line in lines)) from None
    problems = [
        f"--calibration '{path}': measured.{index}: {wrong}{hint}"
        for index, link in enumerate(file.measured)
        if (wrong := _wrong(link, file.devices_per_node))
    ]
    if file.compute is not None:
        problems += [f"--calibration '{path}': compute.{wrong}{hint}" for wrong in file.compute.problems()]
    if not file.measured:
        problems.append(f"--calibration '{path}': measured: there is nothing{hint}")
    if problems:
        raise ConfigError(*problems)
    return file


def _wrong(link: MeasuredLink, devices_per_node: int) -> str:
    if len(link.sizes_bytes) != len(link.median_s):
        return f"{len(link.sizes_bytes)} sizes and {len(link.median_s)} medians"
    if len(set(link.sizes_bytes)) != len(link.sizes_bytes):
        return "a size is there twice"
    if min(link.sizes_bytes) <= 0 or not all(0 < seconds < float("inf") for seconds in link.median_s):
        return "sizes and seconds must be above 0"
    if math.inf in (link.latency_s, link.bus_bytes_per_s):
        return "latency and bandwidth must be finite"
    if max(*link.median_s, link.latency_s or 0.0) > LONGEST_S:
        return f"no message takes longer than {LONGEST_S:,.0f} s"
    if link.per_node > link.ranks:
        return f"{link.per_node} of {counted(link.ranks, 'rank')} in a node"
    if link.per_node > devices_per_node:
        return f"{link.per_node} ranks in a node of {devices_per_node}"
    if (link.where == "node") != (link.per_node == link.ranks):
        return f"{link.per_node} of {counted(link.ranks, 'rank')} in a node, and where is '{link.where}'"
    return ""


def check_calibration(file: CalibrationFile, cluster: ClusterSpec, *, processor: str, name: str = "") -> list[str]:
    """List what the file does not cover of ``cluster``; the catalogue fills these gaps.

    ``processor`` is that of this machine, since a cluster of CPUs is always this machine. ``name`` is the file's, for
    messages.

    Raises:
        PlanError: the file was measured on another device or machine; every difference is listed.
    """
    subject = f"--calibration '{name}'" if name else "the calibration"
    problems = []
    if file.device != cluster.device:
        problems.append(
            f"{subject} was measured on {_called(file.device)}, and the plan is for {_called(cluster.device)}"
        )
    elif file.device == "cuda" and not _same_gpu(file.device_name, cluster.device_name):
        problems.append(f"{subject} was measured on {file.device_name}, and the plan is for {cluster.device_name}")
    elif file.device == "cpu" and file.processor != processor:
        problems.append(f"{subject} was measured on a machine with '{file.processor}', and this one has '{processor}'")
    elif file.device == "cpu" and file.cores_per_node != cluster.cores_per_node:
        problems.append(
            f"{subject} was measured on {file.cores_per_node} cores, and the ranks have {cluster.cores_per_node}"
        )
    kind = cluster.link.kind if cluster.link is not None else None
    if not problems and file.link is not None and kind is not None and file.link != kind:
        problems.append(f"{subject} was measured over {file.link}, and devices of the cluster are joined by {kind}")
    if problems:
        raise PlanError(*(f"{problem}; {FIX}" for problem in problems))
    return _not_covered(file, cluster, subject)


def _not_covered(file: CalibrationFile, cluster: ClusterSpec, label: str) -> list[str]:
    lines = []
    needed: list[tuple[Where, str, bool]] = [
        ("node", "inside a node", cluster.devices_per_node > 1),
        ("network", "between nodes", cluster.nodes > 1),
    ]
    for where, words, needs in needed:
        here = [link for link in file.measured if link.where == where]
        fitted = {link.collective for link in here if link.latency_s is not None and link.bus_bytes_per_s is not None}
        missing = [kind for kind in KINDS if kind not in fitted]
        if needs and missing:
            what = "nothing" if not here else f"no latency or bandwidth of {', '.join(missing)}"
            lines.append(
                f"{label} has {what} {words}; the catalogue stands in where it knows the link"
                + (", but in groups of the very shape that was measured" if here else "")
            )
    return lines


def covers(file: CalibrationFile, cluster: ClusterSpec) -> bool:
    """Return whether every collective was measured on every kind of link that the cluster has.

    If so, the catalogue is not used.
    """
    return not _not_covered(file, cluster, "")


def _same_gpu(one: str, other: str) -> bool:
    known, asked = find_gpu(one), find_gpu(other)
    return known.name == asked.name if known is not None and asked is not None else one == other


def _called(device: str) -> str:
    return "CPUs" if device == "cpu" else "GPUs"
