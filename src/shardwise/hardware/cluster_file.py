"""Cluster described in a TOML or JSON file: custom GPUs, links and prices.

::

    gpu = "H100-SXM"               # a name of the hardware table
    nodes = 2
    devices_per_node = 8
    link = "nvlink"                # as after @ on the command line, or a table {kind, bytes_per_s}
    network = "ib400"              # as after /, or a table {kind, bytes_per_s}
    host_memory_bytes = 2e12       # of each node
    nvme_bytes_per_s = 6e9         # of each node's drives, all of them together
    price_per_device_hour = 2.2    # US dollars

A GPU that the table does not have is a separate table: ``[gpu]`` with ``name`` and ``memory_bytes``, and any other
field of `GpuSpec` that is known; ``like = "A100-80GB"`` supplies the fields that are not given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shardwise.document import read_json, read_toml
from shardwise.errors import PlanError, did_you_mean
from shardwise.hardware.cluster import MOST_DEVICES, ClusterSpec, default_link, parse_link, parse_network
from shardwise.hardware.gpus import GpuSpec, Link, find_gpu, unknown_gpu_message

FIELDS = (
    "gpu",
    "nodes",
    "devices_per_node",
    "device_memory_bytes",
    "host_memory_bytes",
    "cores_per_node",
    "link",
    "network",
    "nvme_bytes_per_s",
    "price_per_device_hour",
)
Facts = TypeVar("Facts", bound=BaseModel)


def read_cluster(path: Path) -> ClusterSpec:
    """Read the cluster that a file describes.

    Raises:
        PlanError: the file is missing or unreadable, or every error in it, at once.
    """
    try:
        data = read_json(path) if path.suffix.lower() == ".json" else read_toml(path)
    except OSError as error:
        raise PlanError(f"cluster file '{path}': {error.strerror or error}; give the path of a file") from None
    except ValueError as error:
        raise PlanError(f"cluster file '{path}' is not readable: {error}") from None
    if not isinstance(data, dict):
        raise PlanError(f"cluster file '{path}': a table with {', '.join(FIELDS)} is expected")
    problems = [
        f"cluster file '{path}': no field '{key}'{did_you_mean(key, FIELDS)}" for key in data if key not in FIELDS
    ]
    gpu = _gpu(path, data.get("gpu"), problems)
    nodes = _count(path, data, "nodes", problems)
    devices = _count(path, data, "devices_per_node", problems)
    link = data.get("link")
    if link is None:
        found = default_link(gpu, devices)
    elif isinstance(link, str):
        found = parse_link(str(path), link, gpu, devices, problems)
    else:
        found = _link(path, "link", link, problems)
    network = data.get("network")
    if network is None:
        between = gpu.network if gpu and nodes > 1 else None
    elif isinstance(network, str):
        between = parse_network(str(path), network, devices, problems)
    else:
        between = _link(
            path, "network", {"kind": "network"} | network if isinstance(network, dict) else network, problems
        )
    given = {key: _number(path, key, data[key], problems) for key in FIELDS[3:6] if key in data}
    if "nvme_bytes_per_s" in data:
        given["nvme_bytes_per_s"] = _number(path, "nvme_bytes_per_s", data["nvme_bytes_per_s"], problems)
    given["price_per_device_hour"] = gpu.price_per_hour if gpu else None
    if "price_per_device_hour" in data:
        given["price_per_device_hour"] = _number(path, "price_per_device_hour", data["price_per_device_hour"], problems)
    if problems or gpu is None:
        raise PlanError(*problems)
    facts = {"device": "cuda", "device_name": gpu.name, "nodes": nodes, "devices_per_node": devices, "gpu": gpu}
    memory = {"device_memory_bytes": gpu.memory_bytes}
    return ClusterSpec.model_validate(facts | {"link": found, "network": between} | memory | given)


def _gpu(path: Path, value: object, problems: list[str]) -> GpuSpec | None:
    """Read the GPU of the file: a name, or a table over the row that ``like`` names."""
    where = f"cluster file '{path}'"
    if isinstance(value, str):
        gpu = find_gpu(value)
        problems += [] if gpu else [f"{where}: {unknown_gpu_message(value)}"]
        return gpu
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        problems.append(f"{where}: gpu must be a name of the hardware table, or a table with name and memory_bytes")
        return None
    fields = {key: field for key, field in value.items() if key != "like"}
    base = find_gpu(str(value.get("like", value["name"])))
    if base is None and "like" in value:
        problems.append(f"{where}: gpu.like: {unknown_gpu_message(str(value['like']))}")
    if base is None and "memory_bytes" not in fields:
        problems.append(f"{where}: gpu '{value['name']}' is not in the hardware table, so it needs memory_bytes")
    unknown = [key for key in fields if key not in GpuSpec.model_fields]
    problems += [f"{where}: gpu has no field '{key}'{did_you_mean(key, GpuSpec.model_fields)}" for key in unknown]
    start = base.model_dump() if base else {"arch": "unknown", "memory_bytes": 0}
    facts = start | {"source": str(path)} | {key: field for key, field in fields.items() if key not in unknown}
    for key in ("memory_bytes", "devices_per_node"):  # 48e9 is a float in TOML
        facts[key] = _full(facts.get(key))
    return _validated(GpuSpec, f"{where}: gpu", facts, problems)


def _link(path: Path, key: str, value: object, problems: list[str]) -> Link | None:
    if not isinstance(value, dict):
        problems.append(
            f"cluster file '{path}': {key} must be a word such as nvlink or a table with kind and bytes_per_s"
        )
        return None
    link = _validated(
        Link, f"cluster file '{path}': {key}", {"bytes_per_s": None, "source": str(path)} | value, problems
    )
    if link is not None and link.bytes_per_s is not None and not link.bytes_per_s > 0:
        problems.append(f"cluster file '{path}': {key}.bytes_per_s is {link.bytes_per_s:g}, it must be above 0")
    return link


def _validated(kind: type[Facts], where: str, facts: Mapping[str, object], problems: list[str]) -> Facts | None:
    try:
        return kind.model_validate(facts)
    except ValidationError as error:
        problems += [f"{where}.{_dotted(e['loc'])}: {e['msg'][0].lower()}{e['msg'][1:]}" for e in error.errors()]
        return None


def _dotted(parts: Iterable[object]) -> str:
    return ".".join(str(part) for part in parts)


def _full(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _count(path: Path, data: Mapping[str, object], key: str, problems: list[str]) -> int:
    value = data.get(key, 1)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_DEVICES:
        return value
    problems.append(
        f"cluster file '{path}': {key} is {value!r:.40}, it must be a whole number from 1 to {MOST_DEVICES}"
    )
    return 1


def _number(path: Path, key: str, value: object, problems: list[str]) -> float | int | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:
        return value if key == "price_per_device_hour" else int(value)
    problems.append(f"cluster file '{path}': {key} is {value!r}, it must be a number above 0")
    return None
