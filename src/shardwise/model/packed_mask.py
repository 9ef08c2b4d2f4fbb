"""What a mask for documents packed in one sample keeps in memory: a number for each pair of a sample's tokens.

transformers builds one boolean mask of [batch, 1, length, length] in each forward whose positions begin anew
(``masking_utils.create_causal_mask``), which lives until the backward; PyTorch's SDPA makes an additive one of it in
the type of the queries, in each layer anew, and saves that for the backward (``convert_boolean_attn_mask``). Eager
attention adds one additive mask, which it does not save. Flash attention takes lengths instead of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.model.profile import ModelProfile, Op

PACKED_MASK = "packed_mask"  # the name of the op


def with_packed_mask(profile: ModelProfile, implementation: str = "sdpa") -> ModelProfile:
    """Return the profile with the masks of packed samples as further saved tensors, whose time is not counted.

    ``implementation`` is the model's ``attn_implementation``.
    """
    if profile.seq_len is None or implementation not in ("sdpa", "eager"):
        return profile
    pairs = profile.seq_len**2
    additive = Op(PACKED_MASK, "pointwise", launches=0, saved=pairs)
    shared = replace(additive, saved=0, saved_bytes=pairs) if implementation == "sdpa" else additive

    def masked(ops: tuple[Op, ...]) -> Iterator[Op]:
        for op in ops:
            if op.kind == "attention" and implementation == "sdpa":
                yield additive
            yield op

    units = [
        replace(unit, ops=tuple(masked(unit.ops)), autocast_ops=tuple(masked(unit.autocast_ops)))
        for unit in profile.units
    ]
    first = units[0]
    seen = (*first.autocast_ops, shared) if first.autocast_ops else ()
    units[0] = replace(first, ops=(*first.ops, shared), autocast_ops=seen)
    return replace(profile, units=tuple(units))
