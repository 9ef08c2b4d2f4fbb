"""`Architecture`: what a transformer's configuration says about its shape; the facts that catalogues and configs share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Architecture(BaseModel):
    """A decoder or encoder of equal blocks.

    ``positions`` says what position information costs: ``learned`` is a table of ``max_seq_len`` rows, ``rope`` rotates
    queries and keys, ``alibi`` and ``none`` have no weights. ``qk_norm`` is a norm of each head or of the whole
    projection. ``block_norms`` counts the norms of one block (2, 4 with norms after the sublayers, 1 where attention
    and MLP run in parallel from one norm). ``experts`` above 0 is a mixture of experts, which is not planned.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq_len: int | None = None
    gated: bool = True
    norm: Literal["rms", "layer", "layer_no_weight"] = "rms"
    norm_bias: bool = False
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    position_offset: int = 0  # extra rows of a learned table
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    block_norms: int = 2
    final_norm: bool = True
    parallel_block: bool = False
    fused_qkv: bool = False  # one matrix for queries, keys and values; names only, not bytes
    tied: bool = False
    causal: bool = True
    sliding_window: int | None = None
    experts: int = 0
    source: str = ""
