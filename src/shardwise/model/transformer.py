"""Profile of a transformer from its configuration alone; no torch, microseconds per model.

It counts native PyTorch's operations for such blocks: fused norms, rotary embedding in fp32,
flash attention with native grouped-query heads, linear layers, an activation, dropout 0. See
`shardwise.model.operations` for the counting rules. Checked against traces of hand-written modules of the same form.

Not counted: buffers (rotary tables, masks), position indices, attention sinks, the scale factors some families put on
embeddings and residuals.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from shardwise.errors import ModelError
from shardwise.model.architecture import Architecture
from shardwise.model.operations import attention, cross_entropy, mark_selective, matmul, pointwise
from shardwise.model.profile import ModelProfile, Op, TpSharding, Unit, Weight
from shardwise.model.sparse_block import latent_ops, latent_weights, routed_ops, routed_weights

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
IMAGE_FAMILIES = ("vit",)
PATCH = 16  # patch size in pixels, where only the table of positions is known


def profile_of(architecture: Architecture, seq_len: int | None, *, compiled: bool = False) -> ModelProfile:
    """Count ``architecture`` over samples of ``seq_len`` tokens.

    An image family has its own length (one image). ``compiled`` counts what is saved where each block runs under
    ``torch.compile``: its min-cut partitioner recomputes the activation of a gated MLP and sums of norms, and a fused
    rotary embedding makes no fp32 copies. Launches and moved elements stay those of the eager ops; ``fusible`` marks
    those that are fused.

    Raises:
        ModelError: a missing length, or one beyond a learned table of positions.
    """
    a = architecture
    image = a.family in IMAGE_FAMILIES
    problems = _problems(a, seq_len, image=image)
    if problems:
        raise ModelError(*problems)
    rows = (a.max_seq_len if image else seq_len) or 0
    first = _patches(a, rows) if image else _embedding(a, rows)
    return ModelProfile(
        name=a.name,
        units=(first, *_blocks(a, rows, compiled), _head(a, rows, image=image)),
        seq_len=None if image else rows,
        origin="catalogue",
        hidden_size=a.hidden,
        vocab_size=a.vocab,
        heads=a.heads,
        kv_heads=a.kv_heads,
        max_seq_len=a.max_seq_len,
        tied=((EMBEDDING, HEAD),) if a.tied else (),
        source=a.source,
        unknown=_notes(a, rows),
    )


def _problems(a: Architecture, seq_len: int | None, *, image: bool) -> list[str]:
    problems = list[str]()
    if image:
        return problems
    if seq_len is None or seq_len < 1:
        problems.append(f"model '{a.name}' reads tokens, and the length of a sample is not given; set --seq-len")
    elif a.positions == "learned" and a.max_seq_len is not None and seq_len > a.max_seq_len:
        problems.append(
            f"sequence length {seq_len} is longer than the {a.max_seq_len} positions that '{a.name}' has learned; "
            f"use {a.max_seq_len} or less"
        )
    return problems


def _notes(a: Architecture, rows: int) -> tuple[str, ...]:
    notes = []
    if a.positions != "learned" and a.max_seq_len is not None and rows > a.max_seq_len:
        notes.append(f"{rows} tokens are more than the {a.max_seq_len} that '{a.name}' was made for; costs are right")
    if a.sliding_window is not None and rows > a.sliding_window:
        notes.append(f"the sliding window of {a.sliding_window} is counted as full attention")
    notes += a.notes
    if a.positions == "alibi":
        notes.append("alibi is counted as part of a flash attention kernel, which PyTorch's own does not have")
    return tuple(notes)


def _blocks(a: Architecture, rows: int, compiled: bool) -> tuple[Unit, ...]:
    """Return the blocks in order, equal neighbours as one unit; those with experts are units of their own."""

    def block(name: str, sparse: bool) -> Unit:
        ops = mark_selective(_block_ops(a, rows, compiled, sparse))
        return Unit(name, "block", _block_weights(a, sparse), ops, rows * a.hidden)

    if a.mixture is None:
        return (replace(block("block", sparse=False), count=a.layers),)
    kinds = {sparse: block("block" if sparse else "dense block", sparse) for sparse in set(a.mixture.sparse)}
    runs = [(sparse, len(list(same))) for sparse, same in groupby(a.mixture.sparse)]
    made = {run: replace(kinds[run[0]], count=run[1]) for run in runs}  # equal runs are one object: costs are cached
    return tuple(made[run] for run in runs)


def _norm_weights(a: Architecture, name: str, width: int | None = None) -> tuple[Weight, ...]:
    if a.norm == "layer_no_weight":
        return ()
    shape = (width or a.hidden,)
    bias = (Weight(f"{name}.bias", shape),) if a.norm_bias else ()
    return (Weight(f"{name}.weight", shape), *bias)


def _linear_weights(name: str, n: int, k: int, *, bias: bool, tp_dim: int | None) -> tuple[Weight, ...]:
    added = (Weight(f"{name}.bias", (n,), tp_dim=0 if tp_dim == 0 else None),) if bias else ()
    return (Weight(f"{name}.weight", (n, k), tp_dim=tp_dim), *added)


def _block_weights(a: Architecture, sparse: bool = False) -> tuple[Weight, ...]:
    q, kv, h = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden
    names = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    weights = [w for name in names[: a.block_norms] for w in _norm_weights(a, name)]
    if a.latent is not None:
        weights += latent_weights(a, a.latent, _linear_weights)
        return (*weights, *_mlp_weights(a, sparse))
    parts = [("qkv_proj", q + 2 * kv)] if a.fused_qkv else [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
    for name, n in parts:
        weights += _linear_weights(f"self_attn.{name}", n, h, bias=a.qkv_bias, tp_dim=0)
    weights += _linear_weights("self_attn.o_proj", h, q, bias=a.output_bias, tp_dim=1)
    if a.qk_norm != "none":
        full = a.qk_norm == "projection"
        for name, width in (("q_norm", q), ("k_norm", kv)):
            for weight in _norm_weights(a, f"self_attn.{name}", width if full else a.head_dim):
                weights.append(replace(weight, tp_dim=0 if full else None))
    if a.sinks:
        weights.append(Weight("self_attn.sinks", (a.heads,), tp_dim=0))
    return (*weights, *_mlp_weights(a, sparse))


def _mlp_weights(a: Architecture, sparse: bool) -> tuple[Weight, ...]:
    if sparse and a.mixture is not None:
        return routed_weights(a, a.mixture, _linear_weights)
    h, weights = a.hidden, list[Weight]()
    for name in ("gate_proj", "up_proj") if a.gated else ("up_proj",):
        weights += _linear_weights(f"mlp.{name}", a.ffn, h, bias=a.mlp_bias, tp_dim=0)
    weights += _linear_weights("mlp.down_proj", h, a.ffn, bias=a.mlp_bias, tp_dim=1)
    return tuple(weights)


def _norm(a: Architecture, name: str, rows: int, width: int, *, saved: int | None = None) -> Op:
    """Norm: saves its input (``saved``: the elements not saved before) and rstd per row.

    A layer norm also saves the mean.
    """
    elements = rows * width
    return Op(
        name,
        "norm",
        moved=2 * elements,
        saved=elements if saved is None else saved,
        saved_fp32=rows * (1 if a.norm == "rms" else 2),
        tp_sharding="sequence",
        fusible=True,
    )


def _block_ops(a: Architecture, rows: int, compiled: bool, sparse: bool = False) -> list[Op]:
    """Return a block's ops in call order.

    A block's input counts as saved by its first norm, or by its first other reader.
    """
    h = rows * a.hidden
    before = [_norm(a, "attention_norm", rows, a.hidden)] if a.block_norms else []
    ops = before + _attention_ops(a, rows, compiled, own_input=True)
    if a.block_norms == 4:
        ops.append(replace(_norm(a, "post_attention_norm", rows, a.hidden), temporary=h))
    if a.parallel_block:  # both read the block's input; one residual sum of three at the end
        ops += [_norm(a, "mlp_norm", rows, a.hidden, saved=0)] if a.block_norms > 1 else []
        ops += _mlp_ops(a, rows, compiled, saved=h if a.block_norms > 1 else 0)
        return [*ops, pointwise("residual", 6 * h, "sequence", temporary=h, launches=2)]
    ops.append(pointwise("attention_residual", 3 * h, "sequence"))
    again = compiled and a.block_norms == 4  # this norm's input is recomputed from what both earlier norms save
    ops += [_norm(a, "mlp_norm", rows, a.hidden, saved=0 if again else h)] if a.block_norms > 1 else []
    if sparse and a.mixture is not None:
        ops += routed_ops(a, a.mixture, rows, compiled, saved=h)
    else:
        ops += _mlp_ops(a, rows, compiled, saved=h)
    if a.block_norms == 4:
        ops.append(replace(_norm(a, "post_mlp_norm", rows, a.hidden), temporary=h))
    return [*ops, pointwise("mlp_residual", 3 * h, "sequence")]


def _attention_ops(a: Architecture, rows: int, compiled: bool, *, own_input: bool) -> list[Op]:
    """Attention ops: projections, head norms, rotary embedding, attention, output projection.

    A fused projection's output is one storage: saving any of its views saves all of it.
    """
    if a.latent is not None:
        return latent_ops(a, a.latent, rows, compiled)
    q, kv, h = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden
    rope, normed, fused = a.positions == "rope", a.qk_norm != "none", a.fused_qkv
    raw_goes = rope and not normed and not fused  # the input of the rotation is not saved
    taken = rows * h if own_input else 0
    if fused:
        ops = [matmul("qkv", rows, h, q + 2 * kv, "column", saved=taken)]
    else:
        ops = [
            matmul("q", rows, h, q, "column", saved=taken, temporary=rows * q if raw_goes else 0),
            matmul("k", rows, h, kv, "column", temporary=rows * kv if raw_goes else 0),
            matmul("v", rows, h, kv, "column"),
        ]
    if normed:
        saved_raw = 0 if fused else rows * (q + kv)
        per_head = a.qk_norm == "head"
        norm = _norm(a, "qk_norm", rows, q + kv, saved=saved_raw)
        stats = rows * (a.heads + a.kv_heads if per_head else 2) * (1 if a.norm == "rms" else 2)
        temporary = rows * (q + kv) if rope else 0
        tp_sharding: TpSharding = "heads" if per_head else "none"
        ops.append(replace(norm, saved_fp32=stats, launches=2, temporary=temporary, tp_sharding=tp_sharding))
    if rope:  # cast to fp32, rotate, cast back, for queries and for keys
        turned = rows * (q + kv)
        op = pointwise("rope", 2 * turned, "heads", launches=6)
        copies = 0 if compiled else 2 * rows * q
        ops.append(replace(op, moved_fp32=4 * turned, temporary_fp32=copies))
    full = rows * (q + 2 * kv)
    inputs = full + (rows * (q + kv) if fused and (rope or normed) else 0)
    kept = inputs + rows * q
    ops.append(attention("attention", rows, a.heads, a.kv_heads, a.head_dim, causal=a.causal, saved=kept))
    output_kept = a.block_norms == 4
    return [*ops, matmul("o", rows, q, h, "row", temporary=0 if output_kept else rows * h)]


def _mlp_ops(a: Architecture, rows: int, compiled: bool, *, saved: int) -> list[Op]:
    """MLP ops; ``saved`` is the input, unless attention saved it.

    The activation saves its input, the product both operands.
    """
    h, wide = a.hidden, rows * a.ffn
    down = matmul("down", rows, a.ffn, h, "row", saved=wide, temporary=0 if a.block_norms == 4 else rows * h)
    if not a.gated:
        up = matmul("up", rows, h, a.ffn, "column", saved=saved)
        return [up, pointwise("activation", 2 * wide, "column", saved=wide), down]
    return [
        matmul("gate", rows, h, a.ffn, "column", saved=saved),
        pointwise("activation", 2 * wide, "column", saved=wide),
        matmul("up", rows, h, a.ffn, "column"),
        pointwise("gate_product", 3 * wide, "column", saved=wide if compiled else 2 * wide),
        down,
    ]


def _embedding(a: Architecture, rows: int) -> Unit:
    h = rows * a.hidden
    weights = [Weight(EMBEDDING, (a.vocab, a.hidden), tp_dim=0)]
    learned = a.positions == "learned"
    ops = [Op("embedding", "embedding", moved=2 * h, temporary=h if learned else 0, tp_sharding="vocab")]
    if learned:
        table = (a.max_seq_len or rows) + a.position_offset
        weights.append(Weight("embed_positions.weight", (table, a.hidden)))
        ops += [
            Op(
                "positions",
                "embedding",
                moved=2 * h,
                launches=2,
                saved_bytes=8 * rows,
                temporary=h,
                tp_sharding="sequence",
            ),
            pointwise("embedding_sum", 3 * h, "sequence"),
        ]
    if a.embedding_norm:
        weights += _norm_weights(a, "embed_norm")
        ops.append(_norm(a, "embedding_norm", rows, a.hidden))
    return Unit("embedding", "embedding", tuple(weights), tuple(ops), 0)


def _patches(a: Architecture, rows: int) -> Unit:
    """Patch embedding: stride-16 convolution of an RGB image, class token, learned positions."""
    patches, k = rows - 1, 3 * PATCH * PATCH
    weights = (
        Weight("class_token", (1, 1, a.hidden)),
        Weight("conv_proj.weight", (a.hidden, 3, PATCH, PATCH)),
        Weight("conv_proj.bias", (a.hidden,)),
        Weight("pos_embedding", (1, rows, a.hidden)),
    )
    out = patches * a.hidden
    conv = Op(
        "patches",
        "conv",
        patches,
        k,
        a.hidden,
        flops=2.0 * patches * k * a.hidden,
        moved=patches * k + k * a.hidden + out,
        saved=patches * k,
        temporary=out,
        weight=True,
    )
    full = rows * a.hidden
    ops = (conv, pointwise("class_token", 2 * full, temporary=full), pointwise("positions", 3 * full))
    return Unit("embedding", "embedding", weights, ops, patches * k)


def _head(a: Architecture, rows: int, *, image: bool) -> Unit:
    """Final norm, output projection, loss.

    An image has one row: its class token.
    """
    used = 1 if image else rows
    weights = list(_norm_weights(a, "norm")) if a.final_norm else []
    ops = [_norm(a, "final_norm", rows, a.hidden)] if a.final_norm else []
    if a.head_transform:  # a linear layer, GELU, a norm
        h = rows * a.hidden
        weights += [*_linear_weights("transform", a.hidden, a.hidden, bias=True, tp_dim=None)]
        weights += _norm_weights(a, "transform_norm")
        ops += [
            matmul("transform", rows, a.hidden, a.hidden, saved=h),
            pointwise("transform_activation", 2 * h, saved=h),
            _norm(a, "transform_norm", rows, a.hidden),
        ]
    bias = (Weight("lm_head.bias", (a.vocab,), tp_dim=0),) if a.head_bias else ()
    own = () if a.tied else (Weight(HEAD, (a.vocab, a.hidden), tp_dim=0),)
    ops += [
        matmul("lm_head", used, a.hidden, a.vocab, "vocab", saved=rows * a.hidden),
        cross_entropy(used, a.vocab, "vocab"),
    ]
    return Unit("head", "head", (*weights, *own, *bias), tuple(ops), rows * a.hidden)
