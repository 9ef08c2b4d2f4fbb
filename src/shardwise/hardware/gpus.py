"""Facts about GPUs and links. One table, each number with its source; ``None`` without one.

The table is ``gpus.toml`` beside this file, which documents its keys; it is read when it is first needed.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

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
    """Link of two devices: bytes per second in one direction per device, from the data sheet."""

    model_config = ConfigDict(frozen=True)

    kind: LinkKind
    bytes_per_s: float | None
    source: str = ""


class GpuSpec(BaseModel):
    """GPU model.

    Peaks are dense FLOP/s by precision (``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8``): of the matrix units with fp32
    accumulation, and of the ordinary units for ``fp32``. A precision that the GPU has no units for, or without a
    source, is missing.

    ``memory_bytes`` is the total that PyTorch reports (``torch.cuda.mem_get_info``), which is less than the name
    suggests: 79.15 GiB on an "80 GB" A100. It varies by a few tenths of a GiB with driver and ECC; the lowest observed
    value is used. ``memory_source`` names its source, or states that the data sheet's GB are used instead.
    ``measured_flops`` is the best matmul rate of a published sweep, ``sustained_flops`` the 16-bit one of a long run
    where it is not the generation's. ``nvlink`` joins all the devices of a node (NVLink,
    or AMD's xGMI); ``bridge`` joins pairs of cards and is sold separately. ``pcie`` is the link to the host's memory,
    16 lanes. ``network`` is that of ``network.source``'s typical node, for each device. ``devices_per_node`` is the
    maximum per node. Prices are US dollars: for an hour of one GPU, or for buying one at its launch.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    arch: str
    memory_bytes: int
    memory_bytes_per_s: float | None = None
    peak_flops: dict[str, float] = {}
    measured_flops: dict[str, float] = {}
    sustained_flops: float | None = None
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
    """Bytes/s of a PCIe slot in one direction, including packet headers.

    Raises:
        KeyError: the generation is not in `PCIE_TRANSFERS_PER_S`.
    """
    return PCIE_TRANSFERS_PER_S[generation] * lanes * 128 / 130 / 8


def find_gpu(name: str) -> GpuSpec | None:
    """Find a GPU by name (``A100-80GB``, ``NVIDIA H100 80GB HBM3``, ``h100-sxm``), or ``None``.

    A name that fits several (``A100``) is the one most used for training; the result's ``name`` shows the choice. Case,
    spaces, dashes, vendor words and text in brackets do not matter. A form (``PCIe``) or memory size that the table
    does not have for the model makes it unknown: no other card is used instead.
    """
    return _find(name)


def gpu_names() -> tuple[str, ...]:
    """Names of the table, for messages and completion."""
    return tuple(gpu.name for _, _, _, gpu in _table())


def unknown_gpu_message(name: str) -> str:
    """Message for a GPU that the table does not have: the nearest names, and the fix."""
    names = gpu_names()
    same_model = [known for known in names if (model := _split(name)) and model[0] in _keys_of(known)]
    hint = f" (known are {', '.join(same_model)})" if same_model else _nearest(name, names)
    return (
        f"GPU '{name}' is not in the hardware table{hint}; shardwise plan --list gpus prints its {len(names)} names, "
        "and a cluster file can describe another GPU with its memory_bytes"
    )


def _nearest(name: str, names: tuple[str, ...]) -> str:
    """Nearest name by ``did_you_mean`` over names and aliases, ignoring case and dashes."""
    spelled: dict[str, str] = {}
    for known in names:
        for key in (*_keys_of(known), known):
            spelled.setdefault(_plain(key), known)
    hint = did_you_mean(_plain(name), spelled)
    return next((hint.replace(f"'{key}'", f"'{known}'") for key, known in spelled.items() if f"'{key}'" in hint), hint)


_NOISE = re.compile(r"\(.*?\)|\b(nvidia|amd|tesla|geforce|instinct|dgx|hgx|gpu|gcd|generation|ac)\b|[^a-z0-9]")
# possible suffixes of a model: form, memory, memory type, power limit; a form's digit leaves the memory size intact
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
def _keys() -> tuple[str, ...]:
    """All model keys, the longest first."""
    return tuple(sorted({key for row in _table() for key in row[0]}, key=len, reverse=True))


def _split(name: str) -> tuple[str, str, str] | None:
    """Split ``name`` into model key, form and memory in GB, the latter two possibly empty."""
    text = _words(name)
    letters = text.replace(" ", "")
    for key in _keys():
        if not letters.startswith(key):
            continue
        model = re.match(r"\s*".join(key), text)  # with optional spaces anywhere
        if model and _REST.fullmatch(rest := text[model.end() :]):
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
def _document() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _table() -> tuple[tuple[tuple[str, ...], str, tuple[str, ...], GpuSpec], ...]:
    """Load model keys, form, memory sizes in GB and facts of each GPU; defaults come first."""
    return tuple(
        (tuple(row["keys"]), row.get("form", ""), tuple(map(str, row["sizes"])), _gpu(name, row))
        for name, row in _document()["gpus"].items()
    )


def _gpu(name: str, row: dict[str, Any]) -> GpuSpec:
    source = row["source"]
    if "pcie_generation" in row:
        generation, lanes = row["pcie_generation"], row.get("pcie_lanes", 16)
        pcie = Link(kind="pcie", bytes_per_s=pcie_bytes_per_s(generation, lanes), source=f"PCIe {generation} x{lanes}")
    else:
        pcie = Link(kind="pcie", bytes_per_s=row.get("host_bytes_per_s"), source="NVLink-C2C to the CPU")
    links = {
        "nvlink": Link(kind=row.get("link_kind", "nvlink"), bytes_per_s=row.get("link_bytes_per_s"), source=source),
        "bridge": Link(kind="nvlink", bytes_per_s=row.get("bridge_bytes_per_s"), source=source),
        "network": Link(
            kind="network", bytes_per_s=row.get("network_bytes_per_s"), source=row.get("network_source", "")
        ),
        "pcie": pcie,
    }
    return GpuSpec(
        name=name,
        peak_flops={p: row[f"{p}_flops"] for p in ("fp32", "tf32", "bf16", "fp16", "fp8") if f"{p}_flops" in row},
        measured_flops={p: row[key] for p in ("bf16", "fp8") if (key := f"measured_{p}_flops") in row},
        **{kind: link if link.bytes_per_s else None for kind, link in links.items()},
        **{key: value for key, value in row.items() if key in GpuSpec.model_fields},
    )


def multiprocessors(name: str) -> int | None:
    """Multiprocessors of a GPU that differs from its generation's number; else ``None``."""
    found: int | None = _document()["gpus"].get(name, {}).get("multiprocessors")
    return found


def nvlink_link_bytes_per_s(arch: str) -> float | None:
    """Bytes/s of one NVLink in one direction, on GPUs of an architecture."""
    found: float | None = _document()["nvlink_link_bytes_per_s"].get(arch)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Fitted constants of one generation of GPUs.

    Rates are fractions of a rate, ``ramp`` is in columns of the contraction. ``best``: of the peak, the rate of the
    best product where no sweep gave ``GpuSpec.measured_flops``. ``burst``: of that, a product without ramp and empty
    slots at full clocks. ``sustained_flops``: sustained 16-bit FLOP/s of a long run at ``watts``, None where power
    is not the limit; ``sustained_fp8`` times that in fp8. ``wave``: weight of wave quantization (0 none, 1 full).
    ``halving``: extra cost of a tile for each halving of its area. ``operand``: of the data sheet's bandwidth, the
    operands' rate.
    ``flash``, ``flash_backward``: of the peak, large causal attention with heads of 128. ``idle``: empty slots at the
    end of an attention, in longest blocks. ``stream``: of the data sheet's bandwidth, the rate of a streaming kernel.
    ``fixed_s``: start and end of a kernel on the device. ``launch_s``: the host's time for one kernel in eager PyTorch.
    ``cudnn``: as ``flash`` and ``flash_backward``, of cuDNN's attention where it is faster. ``gpus.toml`` documents the
    rest.
    """

    arch: str
    chips: tuple[str, ...] = ()
    best: float
    burst: float
    ramp: float
    wave: float
    halving: float
    operand: float
    flash: float
    flash_backward: float
    idle: float
    stream: float
    multiprocessors: int
    precisions: tuple[str, ...]
    sustained_flops: float | None = None
    sustained_fp8: float = 2.0
    watts: float = 1.0
    fixed_s: float = 1e-6
    launch_s: float = 6e-6
    spread_experts: float = 1.0
    cudnn: tuple[float, float] | None = None
    fitted: bool = False
    in_step: tuple[float, float, float, float] | None = None
    spread: tuple[float, float] | None = None
    programs: tuple[str, ...] = ()
    full_power_flops: float | None = None
    full_power_watts: float | None = None
    lasting_flops: float | None = None
    lasting_watts: float | None = None
    ring: float | None = None
    nvls: tuple[float, int, float] | None = None
    context_bytes: int | None = None


@lru_cache(maxsize=1)
def generations() -> dict[str, Generation]:
    """Generations of the table; the shared dict, so that a fit can replace constants in it."""
    rows: dict[str, dict[str, Any]] = _document()["generations"]
    for row in rows.values():
        row |= {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return {name: Generation(**row) for name, row in rows.items()}


def generation_of(gpu: GpuSpec) -> str | None:
    """Key of `generations` for ``gpu``; None where there is none (Pascal, other vendors)."""
    return generation_name(gpu.arch, gpu.chip or gpu.name)


def constants_of(gpu: GpuSpec) -> Generation | None:
    """Fitted constants of the generation of ``gpu``."""
    return generations().get(generation_of(gpu) or "")


@lru_cache(maxsize=64)
def generation_name(arch: str, chip: str) -> str | None:
    """Generation by the architecture's and the chip's name (``Ampere``, ``GA102``)."""
    words = f"{arch} {chip}".lower().split()
    fitting = {name: found for name, found in generations().items() if found.arch in words}
    of_chip = (name for name, found in fitting.items() if any(chip.lower() in words for chip in found.chips))
    return next(of_chip, None) or next((name for name, found in fitting.items() if not found.chips), None)
