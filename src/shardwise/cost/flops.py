"""Floating-point operations of a step, and the utilisation made from them.

`palm_flops` is the numerator of MFU in the PaLM paper (arXiv 2204.02311, appendix B): 6 for each parameter and token,
plus 12 · layers · hidden · length for the whole attention square, causal or not; recompute is not counted. A frozen
weight, which the paper does not have, counts 4: it has no gradient of its own.
"""

from __future__ import annotations

from shardwise.hardware.gpus import GpuSpec
from shardwise.model.profile import ModelProfile, Op, Unit
from shardwise.plan.plan import Recompute

PEAK_OF = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}


def attention_square_flops(op: Op) -> float:
    """Forward FLOPs of an attention op on one sample with the whole square counted: 4 · rows² · heads · head dim."""
    return 4.0 * op.m * op.m * op.heads * op.head_dim


def palm_flops(profile: ModelProfile, samples: float = 1.0) -> float:
    """FLOPs of one step over ``samples`` in the PaLM convention.

    A model whose samples are no sequences has no such convention; three times its forward is taken.
    """
    if profile.seq_len is None:
        return 3.0 * profile.flops * samples
    square = sum(
        attention_square_flops(op) * unit.count for unit in profile.units for op in unit.ops if op.kind == "attention"
    )
    products = 4.0 * profile.num_parameters + 2.0 * profile.num_trainable
    return samples * (products * profile.seq_len + 3.0 * square)


def recomputed(unit: Unit, recompute: Recompute) -> tuple[bool, ...]:
    """For each op of ``unit`` whether ``recompute`` executes it a second time. Only repeated blocks are recomputed.

    PyTorch's checkpoint stops once everything that backward needs is there again: a block's last product needs only
    its input, so neither it nor what follows it is executed (``set_checkpoint_early_stop``, on by default).
    """
    if unit.kind != "block" or recompute == "none":
        return (False,) * len(unit.ops)
    end = max(
        (i for i, op in enumerate(unit.ops) if op.kind in ("matmul", "conv") and op.weight), default=len(unit.ops)
    )
    return tuple(i < end and (recompute == "full" or not op.kept_by_selective) for i, op in enumerate(unit.ops))


def mfu(profile: ModelProfile, gpu: GpuSpec | None, precision: str, samples_per_s_per_device: float) -> float | None:
    """Model FLOPs utilisation by `palm_flops`; ``None`` where the peak is not known.

    fp8 is held against the bf16 peak, as its publishers mostly do: the figure can exceed what bf16 reaches.
    """
    peak = gpu.peak_flops.get(PEAK_OF.get(precision, precision)) if gpu is not None else None
    return None if not peak else palm_flops(profile) * samples_per_s_per_device / peak
