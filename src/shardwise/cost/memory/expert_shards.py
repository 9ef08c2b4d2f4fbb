"""Shapes of stacked experts on one rank, and the ranks that share them.

``+ep`` gives a rank ``experts / ep`` whole experts, which `expert_shards` ranks of a replica share. FSDP shards them
along the experts where each of these ranks gets one; else along the first other dim that the ranks divide, as
torchtitan does (``apply_fsdp`` of its mixtures), because FSDP2 pads only dim 0 and whole ranks would be empty.
"""

from __future__ import annotations

import math

from shardwise.model.profile import Weight


def expert_shape(weight: Weight, ep: int) -> tuple[int, ...]:
    """Shape of stacked experts on one of ``ep`` ranks; whole ones, whatever tensor parallel does with the rest."""
    return (math.ceil(weight.shape[0] / ep), *weight.shape[1:])


def shard_dim(weight: Weight, shape: tuple[int, ...], ranks: int) -> int:
    """Return the dim of a local shape that FSDP shards over ``ranks``."""
    if not weight.experts or ranks <= shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


def rest_shape(weight: Weight, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of a local weight at rest on the fullest of ``ranks`` ranks."""
    if ranks == 1 or not shape or not math.prod(shape):
        return shape
    dim = shard_dim(weight, shape, ranks)
    return (*shape[:dim], math.ceil(shape[dim] / ranks), *shape[dim + 1 :])
