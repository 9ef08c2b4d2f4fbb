"""Instances to rent, from a CSV file in the schema of SkyPilot's catalogue; ``prices.csv`` beside this file ships.

Its rows are facts of one commit each of github.com/skypilot-org/skypilot-catalog (column ``Snapshot``), read on the day
of `READ_ON`; a commit's own date is not part of the file. It is a subset: five clouds, GPUs of the hardware table. A
file of one's own replaces it; ``Cloud`` and ``Snapshot`` may be left out there, as in SkyPilot's own files.

A price that a row does not state is unknown.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from shardwise.errors import UserError
from shardwise.hardware.gpus import GpuSpec, find_gpu

SHIPPED = Path(__file__).with_name("prices.csv")
READ_ON = "2026-11-24 to 2026-11-27"
SOURCE = f"SkyPilot's public catalogue, a subset as read on {READ_ON} (skypilot-org/skypilot-catalog)"
NEEDED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region")
SMALL_A100 = "A100-40GB"  # what SkyPilot calls A100; the larger one is A100-80GB there
MOST_PROBLEMS = 8


@dataclass(frozen=True)
class Instance:
    """Instance of a cloud with equal GPUs; dollars are for an hour of all of it, ``None`` where not stated."""

    cloud: str
    name: str
    region: str
    gpu: GpuSpec
    devices: int
    hour: float | None
    spot_hour: float | None
    snapshot: str


@dataclass(frozen=True)
class PriceCatalogue:
    """Instances of a file, each in its cheapest region; ``unknown`` are accelerators that the hardware table lacks."""

    instances: tuple[Instance, ...]
    unknown: tuple[str, ...]
    source: str


def read_catalogue(path: Path | None = None) -> PriceCatalogue:
    """Read a catalogue; without a path the one that ships.

    Raises:
        UserError: the file cannot be read, lacks a column, has no GPU that is known, or values that are not numbers.
    """
    if path is None:
        return _shipped()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or ()
    except OSError as error:
        raise UserError(f"--prices '{path}': {error.strerror}; give the path of a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--prices '{path}' is not CSV: {error}; its columns are {', '.join(NEEDED)}") from None
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise UserError(
            f"--prices '{path}' has no column {', '.join(missing)}; the columns are those of SkyPilot's vms.csv: "
            f"{', '.join(NEEDED)}, and SpotPrice if there is one"
        )
    catalogue = _catalogue(rows, f"--prices '{path}'", path.stem, str(path))
    if not catalogue.instances:
        why = f"the hardware table lacks {', '.join(catalogue.unknown)}" if catalogue.unknown else "no row has a GPU"
        raise UserError(
            f"--prices '{path}' has no instance to plan for: {why}; shardwise plan --list gpus prints the names of GPUs"
        )
    return catalogue


@lru_cache(maxsize=1)
def _shipped() -> PriceCatalogue:
    with SHIPPED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return _catalogue(rows, "prices.csv", "", SOURCE)


def _catalogue(rows: Iterable[Mapping[str, str]], where: str, cloud: str, source: str) -> PriceCatalogue:
    problems, unknown = list[str](), dict[str, None]()
    found: dict[tuple[str, str], Instance] = {}
    for line, row in enumerate(rows, start=2):
        accelerator = row["AcceleratorName"] or ""
        if not accelerator:
            continue
        numbers = {key: _number(row, key, line, where, problems) for key in ("AcceleratorCount", "Price", "SpotPrice")}
        gpu = find_gpu(SMALL_A100 if accelerator == "A100" else accelerator)
        if gpu is None:
            unknown[accelerator] = None
            continue
        instance = Instance(
            cloud=row.get("Cloud") or cloud,
            name=row["InstanceType"],
            region=row["Region"],
            gpu=gpu,
            devices=int(numbers["AcceleratorCount"] or 0),
            hour=numbers["Price"],
            spot_hour=numbers["SpotPrice"],
            snapshot=row.get("Snapshot") or "",
        )
        key = (instance.cloud, instance.name)
        if instance.devices and (key not in found or _cost(instance) < _cost(found[key])):
            found[key] = instance
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS])
    return PriceCatalogue(tuple(found.values()), tuple(unknown), source)


def _number(row: Mapping[str, str], key: str, line: int, where: str, problems: list[str]) -> float | None:
    text = (row.get(key) or "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = -1.0
    if value is not None and not 0 <= value < float("inf"):
        problems.append(f"{where}, line {line}: {key} is '{text}'; it must be a number, 0 or more, or empty")
        return None
    return value


def _cost(instance: Instance) -> tuple[float, float]:
    unknown = float("inf")
    hour, spot = instance.hour, instance.spot_hour
    return (unknown if hour is None else hour, unknown if spot is None else spot)
