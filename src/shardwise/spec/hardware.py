"""Facts about GPUs and links. One table, each number with its source; what no source says is ``None``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

LinkKind = Literal["nvlink", "xgmi", "pcie", "network", "loopback"]


class Link(BaseModel):
    """What joins two devices: bytes per second in one direction, for each device, as the data sheet has it."""

    model_config = ConfigDict(frozen=True)

    kind: LinkKind
    bytes_per_s: float | None
    source: str = ""


class GpuSpec(BaseModel):
    """One GPU model. Peaks are dense FLOP/s of the matrix units by precision (``fp32``, ``bf16``, ``fp16``, ``fp8``).

    ``measured_flops`` is the best matmul rate that a published sweep has reached. Prices are US dollars for an hour of
    one GPU.
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


def find_gpu(name: str) -> GpuSpec | None:
    """The GPU that ``name`` means (``A100-80GB``, ``NVIDIA H100 80GB HBM3``, ``h100-sxm``); ``None`` if it is unknown.

    A name that fits several (``A100``) is the one most used for training; what was taken is in the result's ``name``.
    """
    raise NotImplementedError


def gpu_names() -> tuple[str, ...]:
    """The names of the table, for messages and completion."""
    raise NotImplementedError
