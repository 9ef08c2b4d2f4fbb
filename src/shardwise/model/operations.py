"""Operations of profiles, and the rules by which all profiles count them.

Counting rules of every profile:

- ``moved`` of a norm, pointwise, embedding or loss op is what its eager kernels read and write. Of a convolution it is
  its input, weight and output, because an implicit GEMM reads each input element once. Of a matmul and an attention it
  is 0: it follows from their shapes.
- ``temporary`` is what the op allocates and does not save for backward, including its output if that is not
  saved either. It may be gone after the next op.
- In the op named ``loss``: ``temporary`` is the logits at compute width, ``temporary_fp32`` their copy in fp32 (there
  is none where compute is fp32 already), and ``saved_fp32`` the log-probabilities that cross-entropy keeps. Backward
  needs these, the fp32 gradient of the log-probabilities and the fp32 gradient of the logits together (three times
  ``saved_fp32``; four while the fp32 logits are still referenced), then casts the last to compute width.
- Floating-point operations are those of matmuls, convolutions and attention; the others are bound by memory.
- A norm keeps its input at compute width, which is what a model in bf16 does (FSDP2). Under autocast with fp32 weights
  (DDP, ZeRO-1) the stream between sublayers is fp32: there the ``saved`` of ops of kind ``norm`` takes 4 bytes, and
  `autocast_copies` are saved in addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.model.profile import Op, TpSharding


def matmul(
    name: str, m: int, k: int, n: int, tp_sharding: TpSharding = "none", *, saved: int = 0, temporary: int = 0
) -> Op:
    """Linear layer over ``m`` rows with a fused bias.

    ``saved`` is its input, if not saved before.
    """
    flops = 2.0 * m * k * n
    return Op(
        name, "matmul", m, k, n, flops=flops, saved=saved, temporary=temporary, tp_sharding=tp_sharding, weight=True
    )


def pointwise(
    name: str, moved: int, tp_sharding: TpSharding = "none", *, saved: int = 0, temporary: int = 0, launches: int = 1
) -> Op:
    """An elementwise op that moves ``moved`` elements at compute width."""
    return Op(
        name,
        "pointwise",
        moved=moved,
        launches=launches,
        saved=saved,
        temporary=temporary,
        tp_sharding=tp_sharding,
        fusible=True,
    )


def attention(name: str, rows: int, heads: int, kv_heads: int, head_dim: int, *, causal: bool, saved: int) -> Op:
    """Flash attention: no rows × rows matrix; saves the fp32 logsumexp of each row and head."""
    flops = 4.0 * heads * head_dim * rows * rows * (0.5 if causal else 1.0)
    return Op(
        name,
        "attention",
        m=rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
        flops=flops,
        saved=saved,
        saved_fp32=heads * rows,
        tp_sharding="heads",
    )


def cross_entropy(rows: int, classes: int, tp_sharding: TpSharding = "none") -> Op:
    """Cross-entropy of ``rows`` × ``classes`` logits: upcast, log-softmax, NLL.

    See the module's docstring. Labels are 8 bytes each. Moved: the cast reads low precision and writes fp32,
    log-softmax reads twice and writes once.
    """
    logits = rows * classes
    return Op(
        "loss",
        "loss",
        moved=logits,
        moved_fp32=4 * logits,
        launches=3,
        saved_fp32=logits,
        saved_bytes=8 * rows,
        temporary=logits,
        temporary_fp32=logits,
        tp_sharding=tp_sharding,
    )


def autocast_copies(ops: Iterable[Op]) -> int:
    """Elements that a unit saves under autocast in addition to a bf16 model.

    In the compute dtype. Under autocast a norm's output is fp32, and every linear layer that reads it saves its own
    low-precision copy: autocast caches casts of weights only. Queries, keys and values are three copies instead of one.
    """
    extra, reader = 0, None
    before = None
    for op in ops:
        if op.kind == "matmul" and op.saved:
            reader = op if before is not None and before.kind == "norm" else None
        elif op.kind == "matmul" and reader is not None and (op.m, op.k) == (reader.m, reader.k):
            extra += op.m * op.k if before is not None and before.kind != "attention" else 0
        before = op
    return extra


def mark_selective(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Mark the ops whose outputs selective recompute saves.

    These are attentions, and the 1st, 3rd, 5th … matmul of a block in call order. The rule of ``parallel.recompute``;
    batched matmuls count, convolutions do not.
    """
    marked, seen = [], 0
    for op in ops:
        seen += op.kind == "matmul"
        kept = op.kind == "attention" or (op.kind == "matmul" and seen % 2 == 1)
        marked.append(replace(op, kept_by_selective=kept))
    return tuple(marked)
