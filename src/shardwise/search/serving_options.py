"""Ways to serve a model on a cluster: tensor-parallel degrees in a node, replicas on the rest, and the best of them.

A replica stays inside a node; pipelines over nodes, experts spread over ranks and separate prefill are not planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.cost.memory.serving_memory import (
    ENGINE_SHARE,
    QUANTIZED_BYTES,
    Quantization,
    served_weights,
    workspace_bytes,
)
from shardwise.cost.time.machine import machine_of
from shardwise.cost.time.serving_time import DecodeTime, Server
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.kv_cache import KvCache
from shardwise.model.profile import ModelProfile
from shardwise.plan.optimizers import either
from shardwise.units import bytes_text, counted

KvType = Literal["16-bit", "fp8"]
KV_BYTES: dict[KvType, float] = {"16-bit": 2.0, "fp8": 1.0}
TIE = 0.05  # of the best rate: less than the model's error, so fewer ranks for each replica are preferred
MOST_ADVICE = 3
STEP = 256  # tokens by which a shorter context is proposed


@dataclass(frozen=True)
class ServingRequest:
    """What is to be served; ``concurrency`` sequences of ``context`` tokens, prompt and answer together."""

    profile: ModelProfile
    cache: KvCache
    cluster: ClusterSpec
    context: int
    concurrency: int
    quant: Quantization | None = None
    kv_type: KvType = "16-bit"
    tp: int | None = None

    @property
    def kv_itemsize(self) -> float:
        """Bytes of an element of a key or value."""
        return KV_BYTES[self.kv_type]


@dataclass(frozen=True)
class ServingOption:
    """One way to serve; bytes are of one device, sequences and rates of all replicas together.

    ``most`` sequences of the full context fit; ``decode`` is a step with every context full. Unknown is ``None``.
    """

    tp: int
    replicas: int
    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int
    usable_bytes: int | None
    most: int | None
    fits: bool | None
    prefill_s: float | None
    decode: DecodeTime | None
    tokens_per_s: float | None
    each_per_s: float | None
    dollars_per_million: float | None
    note: str = ""

    @property
    def device_bytes(self) -> int:
        """Bytes that a device needs."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """What takes most of a decode step, and its part of it."""
        if self.decode is None:
            return None
        name, seconds = max(self.decode.parts.items(), key=lambda part: part[1])
        return name, seconds / self.decode.step_s


@dataclass(frozen=True)
class ServingResult:
    """Options by degree, the recommended one's index (``None`` where none fits), and what would fit."""

    options: tuple[ServingOption, ...]
    recommended: int | None
    advice: tuple[str, ...] = ()


def find_serving(request: ServingRequest) -> ServingResult:
    """Evaluate every degree, or the pinned one, and choose.

    Raises:
        PlanError: the pinned degree divides neither the node nor the model's heads.
    """
    problems = _problems(request)
    if problems:
        raise PlanError(*problems)
    degrees = [request.tp] if request.tp is not None else _degrees(request)
    options = tuple(_option(request, tp) for tp in degrees)
    fitting = [n for n, option in enumerate(options) if option.fits is not False]
    if not fitting:
        return ServingResult(options, None, tuple(_advice(request)))
    best = max(options[n].tokens_per_s or 0.0 for n in fitting)
    good = [n for n in fitting if (options[n].tokens_per_s or 0.0) >= best * (1 - TIE)]
    return ServingResult(options, good[0])


def _problems(request: ServingRequest) -> list[str]:
    if request.tp is None or not (why := _degree_problem(request, request.tp)):
        return []
    return [f"--tp {request.tp}: {why}; use {either([str(tp) for tp in _degrees(request)])}"]


def _degrees(request: ServingRequest) -> list[int]:
    devices = request.cluster.devices_per_node
    return [tp for tp in range(1, devices + 1) if not _degree_problem(request, tp)]


def _degree_problem(request: ServingRequest, tp: int) -> str:
    """Say why a degree cannot be; empty where it can."""
    devices, heads, kv_heads = request.cluster.devices_per_node, request.profile.heads, request.cache.heads
    if devices % tp:
        return f"the ranks of a replica share a node, and a node of {devices} cannot be divided into groups of {tp}"
    if heads is not None and heads % tp:
        return f"it does not divide the {heads} attention heads of '{request.profile.name}'"
    if not request.cache.shared and kv_heads and kv_heads % tp and tp % kv_heads:
        return (
            f"the {kv_heads} key-value heads of '{request.profile.name}' can be neither divided nor repeated evenly "
            "(vLLM refuses that)"
        )
    return ""


def _option(request: ServingRequest, tp: int) -> ServingOption:
    profile, cluster, cache = request.profile, request.cluster, request.cache
    replicas = cluster.world_size // tp
    each = -(-request.concurrency // replicas)
    weights = served_weights(profile, request.quant, tp)
    sequence = cache.sequence_bytes(request.context, request.kv_itemsize, tp)
    shared, with_one, workspace = (workspace_bytes(profile, request.context, n, tp) for n in (0, 1, each))
    memory = cluster.device_memory_bytes
    usable = None if memory is None else int(memory * ENGINE_SHARE)
    most = None
    if usable is not None:
        most = replicas * max(0, int((usable - weights.held_bytes - shared) // max(1, sequence + with_one - shared)))
    option = ServingOption(
        tp=tp,
        replicas=replicas,
        weight_bytes=int(weights.held_bytes),
        cache_bytes=each * sequence,
        workspace_bytes=workspace,
        usable_bytes=usable,
        most=most,
        fits=None if most is None else most >= each * replicas,
        prefill_s=None,
        decode=None,
        tokens_per_s=None,
        each_per_s=None,
        dollars_per_million=None,
        note=_repeated(request, tp),
    )
    return _timed(request, option, each)


def _timed(request: ServingRequest, option: ServingOption, each: int) -> ServingOption:
    """Add the times where the device's speed is known."""
    gpu = request.cluster.gpu
    if gpu is None or gpu.memory_bytes_per_s is None:
        return option
    try:
        machine = machine_of(request.cluster, "bf16" if "bf16" in gpu.peak_flops else "fp16")
    except PlanError:
        return option
    weights = served_weights(request.profile, request.quant, option.tp)
    server = Server(
        profile=request.profile,
        cache=request.cache,
        weights=weights,
        machine=machine,
        tp=option.tp,
        quant=request.quant,
        kv_itemsize=request.kv_itemsize,
    )
    decode = server.decode(each, request.context)
    rate = request.concurrency / decode.step_s
    hourly = request.cluster.price_per_device_hour
    dollars = None if hourly is None else hourly * request.cluster.world_size / 3600 / rate * 1e6
    return replace(
        option,
        prefill_s=server.prefill_s(request.context),
        decode=decode,
        tokens_per_s=rate,
        each_per_s=1 / decode.step_s,
        dollars_per_million=dollars,
    )


def _repeated(request: ServingRequest, tp: int) -> str:
    """Say what tensor parallel cannot divide."""
    heads = request.cache.heads
    if tp > 1 and request.cache.shared:
        return f"tp={tp}: the cache of latents has no heads to divide, so each of the {tp} ranks keeps all of it"
    if heads and tp > heads:
        times = tp // heads
        return (
            f"tp={tp}: there are only {counted(heads, 'key-value head')}, so each is kept on {times} devices (as vLLM "
            "and SGLang do); the cache of a device is that of "
            f"tp={heads}"
        )
    return ""


def _advice(request: ServingRequest) -> list[str]:
    """List what would fit: fewer sequences, a shorter context, fewer bits; both where neither alone does."""
    best = _roomiest(request)
    lines = [f"--concurrency {best.most} with tp={best.tp}"] if best.most else []
    shorter = _longest_context(request, best.tp)
    lines += [f"--context {shorter} with tp={best.tp}"] if shorter else []
    fewer = list(_fewer_bits(request))
    whole = ((text, find_fitting(tried)) for text, tried in fewer)
    lines += [f"{text} with tp={option.tp}" for text, option in whole if option is not None][:MOST_ADVICE]
    if lines:
        return lines
    for text, tried in fewer:
        option = _roomiest(tried)
        if option.most:
            lines.append(f"{text} --concurrency {option.most} with tp={option.tp}")
    return lines[:MOST_ADVICE] or [
        f"more devices in a node, or larger ones: with tp={best.tp} the weights alone are "
        f"{bytes_text(best.weight_bytes)} of {bytes_text(best.usable_bytes)} usable"
    ]


def _roomiest(request: ServingRequest) -> ServingOption:
    """Return the option that keeps most sequences; of equal ones that of the largest degree."""
    degrees = [request.tp] if request.tp is not None else _degrees(request)
    return max((_option(request, tp) for tp in degrees), key=lambda option: (option.most or 0, option.tp))


def _fewer_bits(request: ServingRequest) -> Iterator[tuple[str, ServingRequest]]:
    """Yield requests with fewer bits, the mildest first, each with its options."""
    kinds: list[Quantization | None] = [request.quant]
    if request.quant is None:
        kinds += [kind for kind in QUANTIZED_BYTES if kind != "fp8" or _has_fp8(request.cluster)]
    for quant in kinds:
        for kv_type in KV_BYTES:
            changed = [f"--quant {quant}"] if quant != request.quant else []
            changed += ["--kv-cache fp8"] if kv_type != request.kv_type and kv_type == "fp8" else []
            if changed and (kv_type == "fp8" or request.kv_type == "16-bit"):
                yield " ".join(changed), replace(request, quant=quant, kv_type=kv_type)


def find_fitting(request: ServingRequest) -> ServingOption | None:
    """Return the first degree that fits."""
    degrees = [request.tp] if request.tp is not None else _degrees(request)
    return next((option for option in (_option(request, tp) for tp in degrees) if option.fits), None)


def _longest_context(request: ServingRequest, tp: int) -> int | None:
    """Return the longest context, in whole `STEP` tokens, that fits with all sequences; ``None`` without one."""
    low, high = 0, request.context // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if _option(replace(request, context=middle * STEP), tp).fits:
            low = middle
        else:
            high = middle - 1
    return low * STEP or None


def _has_fp8(cluster: ClusterSpec) -> bool:
    return cluster.gpu is not None and "fp8" in cluster.gpu.peak_flops
