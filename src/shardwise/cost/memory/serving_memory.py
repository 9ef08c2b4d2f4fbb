"""Bytes of a model that serves: weights on a tensor-parallel rank, what a decode step reads of them, workspace.

Weights are 16-bit, or quantized as serving engines do: the matrices of blocks, while embeddings, output projection,
norms and routers stay 16-bit. Not counted: rotary tables, per-channel scales of int8 and fp8 (below 0.1 %), CUDA
graphs; they are in the part of the memory that `ENGINE_SHARE` leaves free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.model.profile import ModelProfile, Unit, Weight

Quantization = Literal["int8", "int4", "fp8"]

WIDE = 2.0  # bytes of an element that is not quantized
# 4-bit in groups of 128 with a 16-bit scale and a 4-bit zero (AWQ, GPTQ): Llama-2-7B-AWQ is published with 3.89 GB.
QUANTIZED_BYTES: dict[Quantization, float] = {"int8": 1.0, "fp8": 1.0, "int4": (4 + 20 / 128) / 8}
ENGINE_SHARE = 0.9  # of a device's memory: vLLM's documented default; contexts and graphs need the rest
CHUNK_TOKENS = 8192  # of prompts that are read at once; a usual max_num_batched_tokens of vLLM, an assumption
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Weights of one rank: bytes at rest, those that every step reads, and those of experts, with the used share."""

    held_bytes: float
    always_read_bytes: float
    expert_bytes: float
    expert_share: float  # of the experts of a layer that one token takes
    active_elements: float  # that a token is multiplied with, in blocks and in the output projection
    head_elements: float  # of these, those of the output projection

    def read_bytes(self, tokens: int) -> float:
        """Return what a step over ``tokens`` tokens reads: of experts those that any of them takes, on average."""
        return self.always_read_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)


def served_weights(profile: ModelProfile, quant: Quantization | None, tp: int) -> ServedWeights:
    """Count the weights of one of ``tp`` ranks."""
    divides = any(weight.tp_dim is not None for unit in profile.units for weight in unit.weights)
    held = always = experts = active = head = 0.0
    share = 1.0
    for unit in profile.units:
        for weight in unit.weights:
            part = unit.count * weight.num_elements * _part(weight, profile, tp, divides)
            size = part * element_bytes(unit, weight, quant)
            held += size
            if unit.kind == "embedding":
                continue
            if len(weight.shape) > 1:
                active += part * weight.active
                head += part * weight.active if unit.kind == "head" else 0.0
            if weight.experts:
                experts, share = experts + size, weight.active
            else:
                always += size
    if profile.tied and profile.vocab_size and profile.hidden_size:
        table = profile.vocab_size * profile.hidden_size / tp
        always, active, head = always + WIDE * table, active + table, head + table
    return ServedWeights(held, always, experts, share, active, head)


def element_bytes(unit: Unit, weight: Weight, quant: Quantization | None) -> float:
    """Return the bytes of an element as it is stored for serving."""
    is_router = weight.name.endswith(("mlp.gate.weight", "shared_expert_gate.weight", "router.weight"))
    if quant is None or unit.kind != "block" or len(weight.shape) < 2 or is_router:
        return WIDE
    return QUANTIZED_BYTES[quant]


def _part(weight: Weight, profile: ModelProfile, tp: int, divides: bool) -> float:
    """Return the part of a weight that a rank holds; key and value heads are repeated where there are too few."""
    if tp == 1 or (weight.tp_dim is None if divides else len(weight.shape) < 2):
        return 1.0
    heads, kv_heads = profile.heads or tp, profile.kv_heads or tp
    kv_part = 1 / min(tp, kv_heads)
    if ".k_proj." in weight.name or ".v_proj." in weight.name:
        return kv_part
    if ".qkv_proj." in weight.name:
        return (heads / tp + 2 * kv_heads * kv_part) / (heads + 2 * kv_heads)
    return 1 / tp


def workspace_bytes(profile: ModelProfile, context: int, concurrency: int, tp: int) -> int:
    """Return what a step needs beside weights and cache, roughly.

    Of the prompt's chunk: the residual stream twice, and the widest operation's input and output; the logits in fp32.
    """
    rows, hidden = min(context, CHUNK_TOKENS), profile.hidden_size or 0
    widest = max(
        (op.k + op.n) * op.m / max(1, profile.seq_len or 1) / (tp if op.tp_sharding in ("column", "row") else 1)
        for unit in profile.units
        if unit.kind == "block"
        for op in unit.ops
        if op.kind == "matmul"
    )
    return int(rows * (2 * hidden + 2 * widest) * WIDE + LOGIT_BYTES * concurrency * (profile.vocab_size or 0))
