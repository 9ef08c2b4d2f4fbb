"""Facts about GPUs and links. One table, each number with its source; what no source says is ``None``.

The table is ``hardware.csv`` beside this file: SI units (bytes, bytes/s, FLOP/s, W), US dollars, an empty cell where
no source was found, and the conflicts between sources in ``caveat``.
"""

from __future__ import annotations

import csv
import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shardwise.errors import did_you_mean

LinkKind = Literal["nvlink", "xgmi", "pcie", "network", "loopback"]

# Transfers a second and lane in each direction; from generation 3 on, 128 of 130 bits are data (PCI-SIG base
# specification). Packet headers, another 5 to 15 %, are left out.
PCIE_TRANSFERS_PER_S = {3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
# Bytes/s in one direction for each device, all NVLinks together, of the SXM part that brought the generation
# (NVIDIA data sheets of P100, V100, A100, H100 and B200).
NVLINK_BYTES_PER_S = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}


class Link(BaseModel):
    """What joins two devices: bytes per second in one direction, for each device, as the data sheet has it."""

    model_config = ConfigDict(frozen=True)

    kind: LinkKind
    bytes_per_s: float | None
    source: str = ""


class GpuSpec(BaseModel):
    """One GPU model. Peaks are dense FLOP/s by precision (``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8``): of the
    matrix units with fp32 accumulation, and of the ordinary units for ``fp32``. A precision that the GPU has no units
    for, or that no source gives, is missing.

    ``memory_bytes`` is the total that PyTorch reports (``torch.cuda.mem_get_info``), which is less than the name says:
    79.15 GiB on an "80 GB" A100. It varies by a few tenths of a GiB with driver and ECC; the lower of what was seen is
    kept. ``memory_source`` says where it is from, or that the data sheet's GB stand in for it.
    ``measured_flops`` is the best matmul rate that a published sweep has reached. ``nvlink`` joins all the devices of a
    node (NVLink, or AMD's xGMI); ``bridge`` joins pairs of cards and is bought apart. ``pcie`` is the way to the host's
    memory, 16 lanes. ``network`` is that of ``network.source``'s typical node, for each device. ``devices_per_node``
    is how many a node holds at most. Prices are US dollars: for an hour of one GPU, or for buying one at its launch.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    arch: str
    memory_bytes: int
    memory_bytes_per_s: float | None = None
    peak_flops: dict[str, float] = {}
    measured_flops: dict[str, float] = {}
    nvlink: Link | None = None
    pcie: Link | None = None
    network: Link | None = None
    devices_per_node: int | None = None
    tdp_w: float | None = None
    price_per_hour: float | None = None
    spot_price_per_hour: float | None = None
    purchase_price: float | None = None
    source: str = ""
    caveat: str = ""
    chip: str = ""
    compute_capability: str = ""
    memory_source: str = ""
    bridge: Link | None = None
    price_source: str = ""


def pcie_bytes_per_s(generation: int, lanes: int = 16) -> float:
    """Bytes/s of a PCIe slot in one direction, packet headers not taken off.

    Raises:
        KeyError: a generation that is not in `PCIE_TRANSFERS_PER_S`.
    """
    return PCIE_TRANSFERS_PER_S[generation] * lanes * 128 / 130 / 8


def find_gpu(name: str) -> GpuSpec | None:
    """The GPU that ``name`` means (``A100-80GB``, ``NVIDIA H100 80GB HBM3``, ``h100-sxm``); ``None`` if it is unknown.

    A name that fits several (``A100``) is the one most used for training; what was taken is in the result's ``name``.
    Case, spaces, dashes, vendor words and what stands in brackets do not matter. A form (``PCIe``) or memory size that
    the table does not have for the model makes it unknown: no other card is taken instead.
    """
    return _find(name)


def gpu_names() -> tuple[str, ...]:
    """The names of the table, for messages and completion."""
    return tuple(gpu.name for _, _, _, gpu in _table())


def unknown_gpu_message(name: str) -> str:
    """What to tell a user whose GPU the table does not have: the nearest name, all names, and the way out."""
    names = gpu_names()
    same_model = [known for known in names if (model := _split(name)) and model[0] in _keys_of(known)]
    hint = f" (known are {', '.join(same_model)})" if same_model else _nearest(name, names)
    return (
        f"GPU '{name}' is not in the hardware table{hint}; use one of {', '.join(names)}, "
        "or describe it in a cluster file with its memory_bytes"
    )


def _nearest(name: str, names: tuple[str, ...]) -> str:
    """``did_you_mean`` over the names and what people type for them, blind to case and dashes."""
    spelled: dict[str, str] = {}
    for known in names:
        for key in (*_keys_of(known), known):
            spelled.setdefault(_plain(key), known)
    hint = did_you_mean(_plain(name), spelled)
    return next((hint.replace(f"'{key}'", f"'{known}'") for key, known in spelled.items() if f"'{key}'" in hint), hint)


_NOISE = re.compile(r"\(.*?\)|\b(nvidia|amd|tesla|geforce|instinct|dgx|hgx|gpu|gcd|generation|ac)\b|[^a-z0-9]")
# what may follow a model's name: form, memory, memory type, power limit; a form's digit leaves a whole memory size
_WORD = (
    r"(?:sxm[2-6]?|pcie[3-6]?)(?=\d{2,3}(?:g|$)|\D|$)|nvl(?:72|36|[24])?|oam|\d+g(?:i?b)?|\d+w|hbm\d?e?|gddr\dx?|\d+"
)
_REST = re.compile(rf"\s*(?:(?:{_WORD})\s*)*")
_FORM = re.compile(r"sxm|pcie|nvl|oam")


def _plain(text: str) -> str:
    return _words(text).replace(" ", "")


def _words(text: str) -> str:
    return " ".join(_NOISE.sub(" ", text.lower().replace("_", " ").replace("-", " ")).split())


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Each model key, the longest first, and what it looks like with spaces anywhere."""
    keys = sorted({key for row in _table() for key in row[0]}, key=len, reverse=True)
    return tuple((key, re.compile(r"\s*".join(key))) for key in keys)


def _split(name: str) -> tuple[str, str, str] | None:
    """Model key, form and memory in GB that ``name`` says, the latter two empty where it does not say."""
    text = _words(name)
    for key, pattern in _patterns():
        if (model := pattern.match(text)) and _REST.fullmatch(rest := text[model.end() :]):
            words = re.findall(_WORD, rest)
            form = next((found.group() for word in words if (found := _FORM.match(word))), "")
            size = next((word.rstrip("gib") for word in words if re.fullmatch(r"\d+(?:g(?:i?b)?)?", word)), "")
            return key, form, size
    return None


@lru_cache(maxsize=512)
def _find(name: str) -> GpuSpec | None:
    parts = _split(name)
    if parts is None:
        return None
    model, form, size = parts
    for keys, row_form, sizes, gpu in _table():
        if model in keys and form in ("", row_form) and (not size or size in sizes):
            return gpu
    return None


@lru_cache(maxsize=64)
def _keys_of(name: str) -> tuple[str, ...]:
    return next((keys for keys, _, _, gpu in _table() if gpu.name == name), ())


@lru_cache(maxsize=1)
def _table() -> tuple[tuple[tuple[str, ...], str, tuple[str, ...], GpuSpec], ...]:
    """Model keys, form, memory sizes in GB and facts of each row; of one model, the row to prefer comes first."""
    with Path(__file__).with_name("hardware.csv").open(newline="", encoding="utf-8") as file:
        return tuple(
            (tuple(row["keys"].split(";")), row["form"], tuple(row["sizes"].split(";")), _gpu(row))
            for row in csv.DictReader(file)
        )


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _gpu(row: dict[str, str]) -> GpuSpec:
    source = row["source"]
    peaks = {p: _number(row[f"{p}_flops"]) for p in ("fp32", "tf32", "bf16", "fp16", "fp8")}
    measured = {p: _number(row[f"measured_{p}_flops"]) for p in ("bf16", "fp8")}
    nvlink = Link.model_validate(
        {"kind": row["link_kind"] or "nvlink", "bytes_per_s": _number(row["link_bytes_per_s"]), "source": source}
    )
    bridge = Link(kind="nvlink", bytes_per_s=_number(row["bridge_bytes_per_s"]), source=source)
    network = Link(kind="network", bytes_per_s=_number(row["network_bytes_per_s"]), source=row["network_source"])
    if row["pcie_generation"]:
        generation = int(row["pcie_generation"])
        pcie = Link(kind="pcie", bytes_per_s=pcie_bytes_per_s(generation), source=f"PCIe {generation} x16")
    else:
        pcie = Link(kind="pcie", bytes_per_s=_number(row["host_bytes_per_s"]), source="NVLink-C2C to the CPU")
    per_node = _number(row["devices_per_node"])
    return GpuSpec(
        name=row["name"],
        arch=row["arch"],
        memory_bytes=int(row["memory_bytes"]),
        memory_bytes_per_s=_number(row["memory_bytes_per_s"]),
        peak_flops={p: peak for p, peak in peaks.items() if peak is not None},
        measured_flops={p: best for p, best in measured.items() if best is not None},
        nvlink=nvlink if nvlink.bytes_per_s else None,
        pcie=pcie if pcie.bytes_per_s else None,
        network=network if network.bytes_per_s else None,
        devices_per_node=None if per_node is None else int(per_node),
        tdp_w=_number(row["tdp_w"]),
        price_per_hour=_number(row["price_per_hour"]),
        spot_price_per_hour=_number(row["spot_price_per_hour"]),
        purchase_price=_number(row["purchase_price"]),
        source=source,
        caveat=row["caveat"],
        chip=row["chip"],
        compute_capability=row["compute_capability"],
        memory_source=row["memory_source"],
        bridge=bridge if bridge.bytes_per_s else None,
        price_source=row["price_source"],
    )
