"""Shapes of stacked experts on one rank, and the ranks that share them.

``+ep`` gives a rank ``experts / ep`` whole experts, which `expert_shards` ranks of a replica share. FSDP shards them
along the experts where each of these ranks gets one; else along the first other dim that the ranks divide, as
torchtitan does (``apply_fsdp`` of its mixtures), because FSDP2 pads only dim 0 and whole ranks would be empty. Without
``+ep`` neither program does so: experts are sharded with their block, and ranks beyond their number have none.
"""

from __future__ import annotations

import math

from shardwise.model.profile import Weight
from shardwise.plan.dims import ParallelDims


def expert_shape(weight: Weight, ep: int) -> tuple[int, ...]:
    """Shape of stacked experts on one of ``ep`` ranks; whole ones, whatever tensor parallel does with the rest."""
    return (math.ceil(weight.shape[0] / ep), *weight.shape[1:])


def shard_dim(weight: Weight, shape: tuple[int, ...], ranks: int) -> int:
    """Return the dim of a local shape that FSDP shards over ``ranks``."""
    if not weight.experts or ranks <= shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


def rest_shape(weight: Weight, shape: tuple[int, ...], ranks: int, *, whole: bool = False) -> tuple[int, ...]:
    """Shape of a local weight at rest on the fullest of ``ranks`` ranks; ``whole``: no expert is sharded itself."""
    if ranks == 1 or not shape or not math.prod(shape):
        return shape
    dim = 0 if whole else shard_dim(weight, shape, ranks)
    return (*shape[:dim], math.ceil(shape[dim] / ranks), *shape[dim + 1 :])


def held_shape(shape: tuple[int, ...], dims: ParallelDims, place: int = 0) -> tuple[int, ...]:
    """Shape of stacked experts at rest on the rank at ``place`` among those with the same ones.

    The dim that FSDP shards is the first of the result.
    """
    shards, rows = dims.expert_shards, (shape[0] // dims.ep, *shape[1:])
    dim = 0
    if shards > rows[0]:
        dim = next((at for at in range(1, len(rows)) if rows[at] % shards == 0), 0)
    each = math.ceil(rows[dim] / shards)
    return (max(0, min(each, rows[dim] - place * each)), *rows[:dim], *rows[dim + 1 :])
