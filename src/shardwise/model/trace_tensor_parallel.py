"""Derive the tensor-parallel sharding of a traced block from its operations, not from names.

The stream between blocks is replicated. A linear layer with a replicated input is sharded by columns, and its result is
sharded; one with a sharded input is sharded by rows, and its result is replicated. Attention and elementwise operations
keep the sharding. Where a sharded and a replicated tensor meet, or a block would return a sharded tensor, the rule
fails, and the model gets no sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shardwise.model.profile import TpSharding
from shardwise.model.trace_operations import Recorded, Segment

State = Literal["whole", "cut"]


def mark_tp_shardings(segments: Sequence[Segment]) -> bool:
    """Mark how operations of ``segments`` are sharded; ``False``, and no marks, on failure.

    Outside the blocks the first embedding and linear layers are sharded by the vocabulary, all else by the rows.
    """
    first = next((op for segment in segments for op in segment.ops if op.kind == "embedding"), None)
    found: list[list[TpSharding]] = []
    for segment, after in zip(segments, [*segments[1:], None], strict=True):
        shardings = (
            None if segment.block is None else _block_shardings(segment, after.inputs if after is not None else set())
        )
        if shardings is None and segment.block is not None:
            return False
        found.append(shardings if shardings is not None else [_outside(op, first) for op in segment.ops])
    for segment, shardings in zip(segments, found, strict=True):
        for op, tp_sharding in zip(segment.ops, shardings, strict=True):
            op.tp_sharding = tp_sharding
    return any(segment.block is not None for segment in segments)


def weight_dims(segments: Sequence[Segment]) -> dict[int, int]:
    """Map the storage of each sharded parameter to its sharded dim."""
    dims: dict[int, int] = {}
    for segment in segments:
        for op in segment.ops:
            owner = op.facts.get("owner")
            if owner is None or op.tp_sharding not in ("column", "row", "vocab"):
                continue
            outputs_first = bool(op.facts.get("outputs_first", True))
            dims[owner] = (0 if outputs_first else 1) if op.tp_sharding != "row" else (1 if outputs_first else 0)
            if op.tp_sharding != "row":
                dims |= dict.fromkeys(op.biases, 0)
    return dims


def _outside(op: Recorded, first: Recorded | None) -> TpSharding:
    if op is first or (op.kind == "matmul" and "owner" in op.facts):
        return "vocab"
    return "sequence" if op.kind in ("norm", "pointwise", "embedding") else "none"


def _block_shardings(segment: Segment, leaves: set[int]) -> list[TpSharding] | None:
    state: dict[int, State] = dict.fromkeys(segment.inputs, "whole")
    shardings: list[TpSharding] = []
    for op in segment.ops:
        read = {state[key] for key in op.reads if key in state}
        if len(read) > 1:
            return None
        before = next(iter(read), None)
        if before is None:  # computed from constants
            if "owner" in op.facts:
                return None
            shardings.append("none")
            continue
        result: State = before
        if op.kind in ("matmul", "conv") and "owner" in op.facts:
            shardings.append("column" if before == "whole" else "row")
            result = "cut" if before == "whole" else "whole"
        elif op.kind in ("matmul", "attention"):
            if before == "whole":
                return None
            shardings.append("heads")
        else:
            shardings.append("sequence" if before == "whole" else "column")
        state |= dict.fromkeys(op.writes, result)
    return None if any(state.get(key) == "cut" for key in leaves) else shardings
