"""LoRA and QLoRA: a profile with a frozen base and trainable low-rank adapters beside its linear layers.

An adapter of rank r beside a linear layer of k inputs and n outputs has A [r, k] and B [n, r], adds x·Aᵀ·Bᵀ to the
layer's output and is held in fp32. Sources: LoRA, arXiv:2106.09685, section 4; QLoRA, arXiv:2305.14314, sections 2–3:
NF4 with double quantisation takes 4.127 bits a weight (4 + 8/64 + 32/(64·256)).

A quantised weight is unpacked to compute width while its layer runs, forward and backward: that does not grow with the
samples, so it is no op's ``temporary``; `unpacked_elements` says how much it is.

Left out: dropout in front of the adapter (0 here), paged optimizer states, the scale factor (folded into B's product).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwise.errors import PlanError, did_you_mean
from shardwise.spec.ops import mark_selective
from shardwise.spec.profile import Cut, ModelProfile, Op, Unit, Weight

BF16_BYTES = 2.0
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
KINDS = ("lora", "qlora")


def with_adapters(
    profile: ModelProfile, adapter: str, rank: int = 16, targets: Collection[str] | None = None
) -> ModelProfile:
    """``profile`` with its base frozen and adapters of ``rank`` at the linear layers of its blocks.

    ``adapter`` is ``lora`` or ``qlora``, or anything with such a word as its ``.adapter``; ``none`` changes nothing.
    ``targets`` are names of matmul ops (``q``, ``v``, ``down``); ``None`` means all that have a weight of their own.

    Raises:
        PlanError: an adapter, rank or target that cannot be.
    """
    kind = str(getattr(adapter, "adapter", adapter))
    if kind == "none":
        return profile
    problems = []
    if kind not in KINDS:
        problems.append(f"adapter '{kind}' is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if rank < 1:
        problems.append(f"LoRA rank {rank} must be 1 or more")
    known = {name for unit in profile.units if unit.kind == "block" for name in _linears(unit)}
    wrong = sorted(set(targets or ()) - known)
    problems += [f"LoRA target '{name}' is no linear layer of the blocks{did_you_mean(name, known)}" for name in wrong]
    if not known:
        problems.append(f"model '{profile.name}' has no linear layers in repeated blocks for adapters to stand beside")
    if problems:
        raise PlanError(*problems)
    chosen = known if targets is None else set(targets)
    units, began = [], False
    for unit in profile.units:
        adapts = unit.kind == "block" and bool(chosen & set(_linears(unit)))
        units.append(_adapted(unit, kind, rank, chosen) if adapts else _frozen(unit, backward=began))
        began = began or adapts
    return replace(profile, units=tuple(units))


def unpacked_elements(unit: Unit) -> int:
    """Elements of the largest weight that is unpacked while its layer runs; 0 where nothing is quantised."""
    return max((w.num_elements for w in unit.weights if w.itemsize < 1), default=0)


def _linears(unit: Unit) -> dict[str, int]:
    """Matmuls with a weight of their own, by name: the index of the weight. Weights and matmuls come in one order."""
    weights = [index for index, weight in enumerate(unit.weights) if len(weight.shape) == 2]
    found: dict[str, int] = {}
    for op in unit.ops:
        if op.kind != "matmul" or not op.weight:
            continue
        fits = [i for i in weights if sorted(unit.weights[i].shape) == sorted((op.n, op.k))]
        if fits:
            found[op.name] = fits[0]
            weights.remove(fits[0])
    return found


def _frozen(unit: Unit, *, backward: bool) -> Unit:
    """Base weights in bf16 without gradients. Inputs that only a weight gradient needs are not kept.

    Without ``backward`` nothing in front of the unit trains, and nothing at all is kept of it.
    """
    weights = tuple(replace(w, itemsize=BF16_BYTES, trainable=False) for w in unit.weights)
    ops = tuple(_without_gradient(op, backward=backward) for op in unit.ops)
    return replace(unit, weights=weights, ops=ops)


def _without_gradient(op: Op, *, backward: bool) -> Op:
    if not backward and op.kind != "loss":
        return replace(op, weight=False, saved=0, saved_fp32=0, saved_bytes=0, temporary=op.temporary + op.saved)
    if op.kind in ("matmul", "conv") and op.weight:
        return replace(op, weight=False, saved=0, temporary=op.temporary + op.saved)
    return replace(op, weight=False, saved_bytes=0) if op.kind == "embedding" else op


def _adapted(unit: Unit, kind: str, rank: int, chosen: Collection[str]) -> Unit:
    """A block with adapters. An input is kept where an adapter reads it; readers of one input share one storage."""
    owned = _linears(unit)
    base, added = list(unit.weights), []
    quantised = set(owned.values()) if kind == "qlora" else set()
    for index, weight in enumerate(base):
        base[index] = replace(weight, itemsize=NF4_BYTES if index in quantised else BF16_BYTES, trainable=False)
    ops: list[Op] = []
    pending = 0  # an input that linear layers without an adapter have read and not kept
    for before, op in zip((None, *unit.ops), unit.ops, strict=False):
        if op.name not in owned:
            ops.append(replace(op, weight=op.weight and op.kind == "matmul"))
            continue
        weight, takes = unit.weights[owned[op.name]], op.name in chosen
        kept_already = not op.saved and before is not None and before.kind == "attention"
        pending = op.saved or pending
        kept = pending if takes and not kept_already else 0
        left = op.temporary + max(0, op.saved - kept)
        unpacks = 1 if kind == "qlora" else 0
        ops.append(replace(op, weight=False, saved=kept, temporary=left, launches=op.launches + unpacks))
        pending -= kept
        if takes:
            added += _adapter_weights(weight, op, rank)
            ops += _adapter_ops(op, rank)
    marked = mark_selective(ops)
    return replace(unit, weights=(*base, *added), ops=marked)


def _adapter_weights(weight: Weight, op: Op, rank: int) -> list[Weight]:
    """A and B; tensor parallel cuts the one whose side of the layer it cuts."""
    stem = weight.name.removesuffix(".weight")
    return [
        Weight(f"{stem}.lora_A.weight", (rank, op.k), tp_dim=1 if op.cut == "row" else None),
        Weight(f"{stem}.lora_B.weight", (op.n, rank), tp_dim=0 if op.cut == "column" else None),
    ]


def _adapter_ops(op: Op, rank: int) -> list[Op]:
    """The two small products and the sum. B's product keeps A's; the sum keeps nothing."""
    inner: Cut = "row" if op.cut == "row" else "none"
    outer: Cut = "column" if op.cut == "column" else "none"
    small, large = op.m * rank, op.m * op.n
    return [
        Op(
            f"{op.name}.lora_A",
            "matmul",
            op.m,
            op.k,
            rank,
            flops=2.0 * op.k * small,
            cut=inner,
            weight=True,
        ),
        Op(
            f"{op.name}.lora_B",
            "matmul",
            op.m,
            rank,
            op.n,
            flops=2.0 * rank * large,
            saved=small,
            temporary=large,
            cut=outer,
            weight=True,
        ),
        Op(f"{op.name}.lora_sum", "pointwise", moved=5 * large, launches=2, temporary=large, cut=outer, fusible=True),
    ]
