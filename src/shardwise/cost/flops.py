"""Floating-point operations of a step, and MFU computed from them.

`palm_flops` is the numerator of MFU in the PaLM paper (arXiv 2204.02311, appendix B): 6 for each parameter and token,
plus 12 · layers · hidden · length for the full attention square, causal or not; recompute is not counted. A frozen
weight, which the paper does not have, counts 4, because its gradient is not computed. Of experts those count that a
token is routed to.
"""

from __future__ import annotations

from shardwise.hardware.gpus import GpuSpec
from shardwise.model.profile import ModelProfile, Op, Unit
from shardwise.plan.plan import Recompute

PEAK_OF = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}


def attention_square_flops(op: Op) -> float:
    """Forward FLOPs of an attention op on one sample: 4 · rows² · heads · head dim.

    The full square is counted, causal or not.
    """
    return 4.0 * op.m * op.m * op.heads * op.head_dim


def palm_flops(profile: ModelProfile, samples: float = 1.0) -> float:
    """FLOPs of one step over ``samples`` in the PaLM convention.

    The convention does not cover models whose samples are not sequences; for them three times the forward is returned.
    """
    if profile.seq_len is None:
        return 3.0 * profile.flops * samples
    square = sum(
        attention_square_flops(op) * unit.count for unit in profile.units for op in unit.ops if op.kind == "attention"
    )
    products = 4.0 * profile.num_active + 2.0 * profile.num_active_trainable
    return samples * (products * profile.seq_len + 3.0 * square)


def recomputed(unit: Unit, recompute: Recompute) -> tuple[bool, ...]:
    """Flag each op of ``unit`` that ``recompute`` executes a second time. Only blocks do.

    PyTorch's checkpoint stops as soon as everything that backward needs exists: a block's last product needs only its
    input, so neither it nor what follows it is executed (``set_checkpoint_early_stop``, on by default).
    """
    if unit.kind != "block" or recompute == "none":
        return (False,) * len(unit.ops)
    end = max(
        (i for i, op in enumerate(unit.ops) if op.kind in ("matmul", "conv") and op.weight), default=len(unit.ops)
    )
    return tuple(i < end and (recompute == "full" or not op.kept_by_selective) for i, op in enumerate(unit.ops))


def mfu(profile: ModelProfile, gpu: GpuSpec | None, precision: str, samples_per_s_per_device: float) -> float | None:
    """Model FLOPs utilization by `palm_flops`; ``None`` where the peak is unknown.

    fp8 is compared with the bf16 peak, as most publications do, so the value can exceed what bf16 reaches.
    """
    peak = gpu.peak_flops.get(PEAK_OF.get(precision, precision)) if gpu is not None else None
    return None if not peak else palm_flops(profile) * samples_per_s_per_device / peak
