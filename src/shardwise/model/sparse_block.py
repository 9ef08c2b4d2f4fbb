"""Weights and operations of blocks with routed experts, and of attention over latents.

Experts are counted as transformers' grouped path runs them (`integrations/moe.py: grouped_mm_experts_forward`), without
dropped tokens: every token is copied to each of its experts, copies are sorted by expert, two grouped products run over
them, and results are weighed and summed per token. Rows of an op of experts are these copies, on average as many on
each rank; ``Op.experts`` tells over how many experts they are spread. Attention over latents is counted with expanded
keys and values, as everybody trains it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.model.architecture import Architecture
from shardwise.model.mixture import LatentAttention, Mixture
from shardwise.model.operations import attention, matmul, pointwise
from shardwise.model.profile import Op, Weight

# Integers that routing keeps for each copy: the order of copies by expert, its inverse, and the expert of each.
ROUTING_BYTES = 24
LinearWeights = Callable[..., tuple[Weight, ...]]


def routed_weights(a: Architecture, m: Mixture, linear: LinearWeights) -> tuple[Weight, ...]:
    """Return the weights of a sparse layer's MLP: router, stacked experts, shared experts."""
    h, wide = a.hidden, (2 if a.gated else 1) * m.width
    active = m.per_token / m.experts
    router: tuple[Weight, ...] = (Weight("mlp.gate.weight", (m.experts, h)),)
    router += (Weight("mlp.gate.bias", (m.experts,)),) if m.router_bias else ()

    def stacked(name: str, *shape: int, tp_dim: int | None) -> Weight:
        return Weight(f"mlp.experts.{name}", (m.experts, *shape), tp_dim=tp_dim, experts=m.experts, active=active)

    experts: tuple[Weight, ...] = (
        stacked("gate_up_proj", wide, h, tp_dim=1),
        stacked("down_proj", h, m.width, tp_dim=2),
    )
    if m.expert_bias:
        experts += (
            stacked("gate_up_proj_bias", wide, tp_dim=1),
            stacked("down_proj_bias", h, tp_dim=None),
        )
    shared: tuple[Weight, ...] = ()
    if m.shared:
        for name in ("gate_proj", "up_proj") if a.gated else ("up_proj",):
            shared += linear(f"mlp.shared_expert.{name}", m.shared, h, bias=False, tp_dim=0)
        shared += linear("mlp.shared_expert.down_proj", h, m.shared, bias=False, tp_dim=1)
    if m.shared_gate:
        shared += (Weight("mlp.shared_expert_gate.weight", (1, h)),)
    return (*router, *experts, *shared)


def routed_ops(a: Architecture, m: Mixture, rows: int, compiled: bool, *, saved: int) -> list[Op]:
    """Return the ops of a sparse layer's MLP; ``saved`` is its input, unless attention saved it."""
    h, copies, width = a.hidden, rows * m.per_token, m.width
    wide = copies * width
    scores = rows * m.experts
    ops = [
        matmul("router", rows, h, m.experts, "sequence", saved=saved),
        replace(
            pointwise("routing", 2 * scores, "sequence", launches=8),
            moved_fp32=2 * scores,
            saved_fp32=scores + copies,
            saved_bytes=ROUTING_BYTES * copies,
        ),
        _routed(pointwise("dispatch", 2 * copies * h), m),
        _routed(matmul("experts_gate_up", copies, h, 2 * width, "column", saved=copies * h), m),
        _routed(
            pointwise("experts_activation", 5 * wide, "column", saved=(2 if compiled else 3) * wide, launches=2), m
        ),
        _routed(matmul("experts_down", copies, width, h, "row", saved=wide), m),
        _routed(pointwise("combine", 4 * copies * h + rows * h, saved=copies * h, temporary=copies * h, launches=3), m),
    ]
    if not a.gated:
        ops[3] = _routed(matmul("experts_up", copies, h, width, "column", saved=copies * h), m)
        ops[4] = _routed(pointwise("experts_activation", 2 * wide, "column", saved=wide), m)
    if m.shared:
        ops += _shared_ops(a, m, rows, compiled)
    return ops


def _routed(op: Op, m: Mixture) -> Op:
    return replace(op, experts=m.experts, share=m.per_token / m.experts)


def _shared_ops(a: Architecture, m: Mixture, rows: int, compiled: bool) -> list[Op]:
    """Ops of the shared experts, which read what the router has saved, and of the sum with the routed ones' result."""
    h, wide = a.hidden, rows * m.shared
    ops = [matmul("shared_gate", rows, h, m.shared, "column"), matmul("shared_up", rows, h, m.shared, "column")]
    if not a.gated:
        ops = ops[1:]
    kept = wide * ((1 if compiled else 2) if a.gated else 0)
    ops += [
        pointwise("shared_activation", (5 if a.gated else 2) * wide, "column", saved=wide + kept, launches=2),
        matmul("shared_down", rows, m.shared, h, "row", saved=wide, temporary=rows * h),
    ]
    if m.shared_gate:
        ops.append(matmul("shared_expert_gate", rows, h, 1, "sequence"))
        ops.append(pointwise("shared_weighing", 3 * rows * h, "sequence", saved=rows * (h + 1), launches=2))
    return [*ops, pointwise("shared_sum", 3 * rows * h, "sequence")]


def latent_weights(a: Architecture, latent: LatentAttention, linear: LinearWeights) -> tuple[Weight, ...]:
    """Return the weights of an attention over latents; those of the latents are on every tensor-parallel rank."""
    h, heads = a.hidden, a.heads
    if latent.q_rank is None:
        weights = linear("self_attn.q_proj", heads * latent.key, h, bias=False, tp_dim=0)
    else:
        weights = linear("self_attn.q_a_proj", latent.q_rank, h, bias=latent.bias, tp_dim=None)
        weights += (Weight("self_attn.q_a_layernorm.weight", (latent.q_rank,)),)
        weights += linear("self_attn.q_b_proj", heads * latent.key, latent.q_rank, bias=False, tp_dim=0)
    weights += linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope, h, bias=latent.bias, tp_dim=None)
    weights += (Weight("self_attn.kv_a_layernorm.weight", (latent.kv_rank,)),)
    weights += linear("self_attn.kv_b_proj", heads * (latent.nope + latent.value), latent.kv_rank, bias=False, tp_dim=0)
    return weights + linear("self_attn.o_proj", h, heads * latent.value, bias=a.output_bias, tp_dim=1)


def latent_ops(a: Architecture, latent: LatentAttention, rows: int, compiled: bool) -> list[Op]:
    """Return the ops of an attention over latents.

    Keys are assembled from their own and the shared columns, so both queries and keys are copied once more; values are
    a view of the expanded latent, which is saved as it is.
    """
    h, heads = a.hidden, a.heads
    q, kv, v = heads * latent.key, heads * (latent.nope + latent.value), heads * latent.value
    if latent.q_rank is None:
        ops = [matmul("q", rows, h, q, "column", saved=rows * h, temporary=rows * q)]
    else:
        ops = [
            matmul("q_a", rows, h, latent.q_rank, "sequence", saved=rows * h),
            _latent_norm("q_a_norm", rows, latent.q_rank),
            matmul("q_b", rows, latent.q_rank, q, "column", saved=rows * latent.q_rank, temporary=rows * q),
        ]
    turned = rows * (heads + 1) * latent.rope
    ops += [
        matmul("kv_a", rows, h, latent.kv_rank + latent.rope, "sequence"),
        _latent_norm("kv_a_norm", rows, latent.kv_rank),
        matmul("kv_b", rows, latent.kv_rank, kv, "column", saved=rows * latent.kv_rank),
        replace(
            pointwise("rope", 2 * turned + 4 * rows * q, "heads", launches=10),
            moved_fp32=4 * turned,
            temporary_fp32=0 if compiled else 2 * turned,
        ),
    ]
    # the kernel's work is that of the mean of both widths: 2 · rows² · heads · (key + value)
    mean = (latent.key + latent.value) // 2
    found = attention("attention", rows, heads, heads, mean, causal=a.causal, saved=rows * (2 * q + kv + v))
    return [*ops, replace(found, value_dim=latent.value), matmul("o", rows, v, h, "row", temporary=rows * h)]


def _latent_norm(name: str, rows: int, width: int) -> Op:
    elements = rows * width
    return Op(name, "norm", moved=2 * elements, saved=elements, saved_fp32=rows, tp_sharding="sequence", fusible=True)
