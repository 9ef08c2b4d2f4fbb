"""Utilisation of devices and links: FLOPs, their share of the peak (MFU, HFU), link use.

Two counts, not to be confused. *Model FLOPs* are what the model needs, by the PaLM paper's convention (arXiv
2204.02311, appendix B): 6 for each parameter and token, plus three times the full attention square, recompute not
counted; MFU is based on them. *Executed FLOPs* are the matrix products, convolutions and attentions that a live step
really ran, counted by torch's own formulas at each operator, with recomputation; HFU is based on them. Excluded
from both: norms, activations and other elementwise work. The convention counts embeddings that are only looked
up, which inflates MFU where they are large; a frozen weight counts 4.

An unavailable figure is ``None``, with its reason in ``unknown``: MFU without a known peak (every CPU), executed
FLOPs under ``torch.compile``, whose products no dispatcher sees.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from shardwise.cost.flops import PEAK_OF
from shardwise.cost.time.collective_time import wire_share
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.gpus import GpuSpec, Link
from shardwise.measure.profiler.trace_text import rate_text
from shardwise.plan.dims import AXES, ParallelDims
from shardwise.units import bytes_text, counted, seconds_text

Traffic = Mapping[str, Mapping[str, int]]
"""Message bytes of a step on one rank: axis → collective → bytes, sizes as nccl-tests counts them."""


class StepWork(BaseModel):
    """Work of one step, over all ranks: tokens, samples, FLOPs, and one rank's message bytes.

    ``model_flops`` and ``executed_flops`` are totals of all ranks; ``unknown`` says why one is ``None``. Traffic is
    rank 0's, which represents all if the plan is even; ``None`` if it was not recorded.
    """

    model_config = ConfigDict(frozen=True)

    parameters: int
    tokens: int | None
    model_flops: float | None
    executed_flops: float | None
    traffic: dict[str, dict[str, int]] | None = None
    unknown: dict[str, str] = {}

    @property
    def model_flops_per_token(self) -> float | None:
        """Model FLOPs per token; ``None`` if samples are not token sequences or FLOPs are unknown."""
        return self.model_flops / self.tokens if self.model_flops is not None and self.tokens else None


class AxisUse(BaseModel):
    """Bytes that a rank sends over one axis in a step, and their share of the link's capacity.

    A ring's share of each message (``wire_share``). ``use`` is far below 1 if communication is a part of the step
    only: it does not measure how fast the link is, but how much of it the run needs.
    """

    model_config = ConfigDict(frozen=True)

    axis: str
    ranks: int
    wire_bytes: float
    bytes_per_s: float
    link: str
    link_bytes_per_s: float | None
    use: float | None


class Utilisation(BaseModel):
    """Utilisation per device, over ``devices`` devices. ``None`` is unknown; see ``unknown``."""

    model_config = ConfigDict(frozen=True)

    devices: int
    step_s: float
    precision: str
    model_flops_per_token: float | None
    model_flops_per_s: float | None
    executed_flops_per_s: float | None
    peak_flops: float | None
    peak_source: str
    mfu: float | None
    hfu: float | None
    axes: tuple[AxisUse, ...] = ()
    unknown: dict[str, str] = {}


def utilisation(
    work: StepWork,
    step_s: float,
    dims: ParallelDims,
    precision: str,
    cluster: ClusterSpec | None = None,
    *,
    tf32: bool = False,
) -> Utilisation:
    """Compute the figures of a run whose steps take ``step_s`` seconds on average.

    Args:
        cluster: the run's cluster; ``None`` leaves the peak and the links unknown.
        tf32: fp32 products run on the tensor cores (``torch.get_float32_matmul_precision()`` is not ``highest``).
    """
    devices = dims.world_size
    unknown = dict(work.unknown)
    peak, source = peak_of(cluster.gpu if cluster is not None else None, precision, tf32=tf32)
    if peak is None:
        on_cpu = cluster is not None and cluster.device == "cpu"
        unknown["peak"] = (
            "no peak is known for a CPU" if on_cpu else f"the {precision} peak of this device is not known"
        )

    def rate(flops: float | None) -> float | None:
        return flops / step_s / devices if flops is not None and step_s > 0 else None

    model, executed = rate(work.model_flops), rate(work.executed_flops)
    return Utilisation(
        devices=devices,
        step_s=step_s,
        precision=precision,
        model_flops_per_token=work.model_flops_per_token,
        model_flops_per_s=model,
        executed_flops_per_s=executed,
        peak_flops=peak,
        peak_source=source,
        mfu=model / peak if model is not None and peak else None,
        hfu=executed / peak if executed is not None and peak else None,
        axes=() if work.traffic is None else axis_uses(work.traffic, step_s, dims, cluster),
        unknown=unknown,
    )


def peak_of(gpu: GpuSpec | None, precision: str, *, tf32: bool = False) -> tuple[float | None, str]:
    """Return a device's dense peak FLOP/s in ``precision`` and its source.

    ``None`` and "" if unknown.
    """
    if gpu is None:
        return None, ""
    name = "tf32" if tf32 and precision == "fp32" else PEAK_OF.get(precision, precision)
    peak = gpu.peak_flops.get(name)
    return (None, "") if not peak else (peak, f"{name} of {gpu.name}, {gpu.source}")


def axis_uses(
    traffic: Traffic, step_s: float, dims: ParallelDims, cluster: ClusterSpec | None = None
) -> tuple[AxisUse, ...]:
    """Compute each axis's use of its link; an axis with unknown ranks is left out."""
    found = []
    for axis, messages in traffic.items():
        group = group_of(axis, dims)
        if group is None or len(group) < 2 or step_s <= 0:
            continue
        ranks = len(group)
        wire = sum(size * _wire(name, ranks) for name, size in messages.items())
        name, link = _link(group, cluster)
        speed = link.bytes_per_s if link is not None else None
        found.append(
            AxisUse(
                axis=axis,
                ranks=ranks,
                wire_bytes=wire,
                bytes_per_s=wire / step_s,
                link=name,
                link_bytes_per_s=speed,
                use=wire / step_s / speed if speed else None,
            )
        )
    return tuple(found)


def _wire(name: str, ranks: int) -> float:
    """Return the part of a message that a rank sends; a broadcast is sent once."""
    if name in ("broadcast", "send"):
        return 1.0
    if name == "all_reduce":
        return wire_share("all_reduce", ranks)
    return 0.0 if name == "recv" else wire_share("all_gather", ranks)


_MEMBERS = {"dp": ("dp_replicate", "dp_shard"), "pp": ("pp",), "tp": ("tp",), "cp": ("cp",)}


def group_of(axis: str, dims: ParallelDims) -> tuple[int, ...] | None:
    """Return the ranks of rank 0's group of ``axis``: mesh axis, ``dp``, or ``dp × cp``.

    ``None`` for a name that is none of these.
    """
    names = {inner for part in axis.split(" × ") for inner in _MEMBERS.get(part, (part,))}
    if not names <= set(AXES):
        return None
    ranks, stride = [0], 1
    for name in reversed(AXES):  # the last one is the fastest
        degree = getattr(dims, name)
        if name in names:
            ranks = [rank + step * stride for step in range(degree) for rank in ranks]
        stride *= degree
    return tuple(sorted(ranks))


def _link(group: tuple[int, ...], cluster: ClusterSpec | None) -> tuple[str, Link | None]:
    """Return the link of the ranks of ``group``: the network if they span several nodes."""
    if cluster is None:
        return "unknown", None
    apart = len({rank // cluster.devices_per_node for rank in group}) > 1
    link = cluster.network if apart else cluster.link
    where = "network" if apart else "node"
    return (f"{where}, {link.kind}" if link is not None else where), link


_FEWER = (
    "; fewer than the model FLOPs: by convention those count 6 for each weight and token, also of norms, biases and "
    "embeddings that are only looked up, which are in no product, and of frozen weights"
)


def utilisation_lines(found: Utilisation) -> list[str]:
    """Describe the figures in sentences, for the end of a run."""
    lines = []
    if found.model_flops_per_s is not None:
        share = f", {found.mfu:.1%} of the peak (MFU; {found.peak_source})" if found.mfu is not None else ""
        lines.append(f"model FLOPs: {rate_text(found.model_flops_per_s)} a device{share}")
    if found.executed_flops_per_s is not None:
        share = f", {found.hfu:.1%} of the peak (HFU)" if found.hfu is not None else ""
        lines.append(
            f"hardware FLOPs, including recomputation: {rate_text(found.executed_flops_per_s)} a device{share}"
            + (_FEWER if found.executed_flops_per_s < (found.model_flops_per_s or 0.0) else "")
        )
    lines += [_axis_line(axis, found.step_s) for axis in found.axes]
    lines += [f"{what} unknown: {why}" for what, why in found.unknown.items()]
    return lines


def _axis_line(axis: AxisUse, step_s: float) -> str:
    use = "unknown" if axis.use is None else f"{axis.use:.1%}"
    return (
        f"{axis.axis} ({counted(axis.ranks, 'rank')}): a rank sends {bytes_text(axis.wire_bytes)} in a step of "
        f"{seconds_text(step_s)}; part of its link ({axis.link}) in use: {use}"
    )
