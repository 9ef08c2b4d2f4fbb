"""Activation bytes of one unit and sample on one rank: saved and temporary ones.

Tensor parallel divides the saved tensors of an op over its ranks where the op is sharded. A column-parallel product
saves its full input, because PyTorch's tensor parallel gathers the rows in front of it and saves the gathered tensor
(Megatron gathers once more in backward and saves a shard; so do plans with fp32 masters). Context parallel divides all
rows. The loss of those plans computes its softmax and its gradient in place (Megatron-LM,
``vocab_parallel_cross_entropy``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.cost.expert_load import MEMORY_QUANTILE, fullest_load
from shardwise.cost.memory.local_shapes import FP32, ShardLayout
from shardwise.cost.same import Same
from shardwise.model.operations import autocast_copies
from shardwise.model.profile import Op, Unit
from shardwise.plan.divisibility import kv_repeats
from shardwise.plan.fp8_recipes import converts
from shardwise.plan.plan import Recompute


@dataclass(frozen=True, slots=True)
class OpBytes:
    """Bytes of one op for one sample. ``gradient_in`` is the gradient that its backward returns."""

    saved: float
    temporary: float
    gradient_in: float
    weight_gradient: float


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit for one sample.

    ``ops`` are those before the loss; ``logits`` counts the elements that the loss reads. Backward of the loss stores
    ``loss_copies`` fp32 tensors of that size: log-probabilities and the gradients of both sides; where the vocabulary
    is sharded, the logits and their gradient. ``kept`` stays from forward to backward, in ``pieces``, ``again`` is
    recomputed in backward; ``forward`` is the peak of the temporaries beside it in forward.
    """

    ops: tuple[OpBytes, ...]
    input: float
    kept: float
    pieces: tuple[float, ...]
    again: float
    forward: float
    logits: float
    loss_copies: int


def unit_bytes(unit: Unit, layout: ShardLayout, recompute: Recompute, compiled: bool) -> UnitBytes:
    """Compute `UnitBytes`; cached by the unit's identity."""
    mode = recompute if unit.kind == "block" else "none"
    load, early = 1.0, False
    if unit.experts:
        load = 1.0 if layout.balanced else fullest_load(unit.experts, layout.ep, MEMORY_QUANTILE, share=unit.share)
        load = load if layout.capacity_factor is None else layout.capacity_factor
        early = layout.framework != "shardwise"
    sharding = ActivationSharding(
        layout.tp,
        layout.cp,
        sequence=layout.sequence and (unit.kind == "block" or layout.framework != "shardwise"),
        vocab=layout.vocab,
        regathers=layout.loss_in_place,
        exchanges=layout.cp > 1 and layout.framework == "shardwise",
        own_loss=layout.framework == "shardwise",
        fp8=layout.fp8_saved and unit.kind == "block",
        casts=layout.fp8_casts and unit.kind == "block",
        ep=layout.ep,
        load=load,
        weighs_early=early,
    )
    return _unit_bytes(Same(unit), layout.width, layout.autocasts, sharding, mode, compiled)


@dataclass(frozen=True, slots=True)
class ActivationSharding:
    """Divisors of a unit's rows, heads and columns.

    ``regathers``: rows are gathered once more in backward, as in Megatron-LM (see the module docstring). ``exchanges``:
    attention sees all tokens of some heads. ``load``: rows of experts on the fullest of ``ep`` ranks, of the mean.
    ``weighs_early``: routing weights multiply inside the experts and not their results, which are not saved then, as in
    Megatron-LM and torchtitan.
    """

    tp: int
    cp: int
    sequence: bool
    vocab: bool
    regathers: bool
    exchanges: bool
    own_loss: bool
    fp8: bool = False  # inputs of products are saved in 8 bits
    casts: bool = False  # operands of products are cast to fp8, and saved as they were
    ep: int = 1
    load: float = 1.0
    weighs_early: bool = False

    def of_input(self, op: Op) -> int:
        """Ranks that divide an op's saved input; a column-parallel product saves its full input."""
        if op.experts and self.ep > 1:
            return self.tp
        if op.tp_sharding == "none" or (op.tp_sharding == "sequence" and not self.sequence):
            return 1
        full = op.kind == "matmul" and op.tp_sharding in ("column", "vocab") and not self.regathers
        return 1 if full else self.tp

    def of_gradient(self, op: Op) -> int:
        """Ranks that divide the gradient of an op's input, before it is summed over them."""
        if op.experts and self.ep > 1:
            return self.tp
        return (
            1
            if op.tp_sharding == "none" or (op.kind == "matmul" and op.tp_sharding in ("column", "vocab"))
            else self.tp
        )

    def of_output(self, op: Op) -> int:
        """Ranks that divide an op's result; a row-parallel product makes full-size partial sums."""
        if op.experts and self.ep > 1:
            return self.tp
        if op.tp_sharding == "none" or (op.tp_sharding == "sequence" and not self.sequence):
            return 1
        return 1 if op.kind == "matmul" and op.tp_sharding == "row" else self.tp

    def of_entry(self, unit: Unit) -> int:
        """Ranks that divide the stream between blocks: with sequence parallel as the block's norms."""
        return self.tp if self.sequence and any(op.tp_sharding == "sequence" for op in unit.ops) else 1


@lru_cache(maxsize=4096)
def _unit_bytes(
    same: Same[Unit], width: int, autocasts: bool, sharding: ActivationSharding, mode: Recompute, compiled: bool
) -> UnitBytes:
    unit = same.value
    autocasts = autocasts and all(w.itemsize > width for w in unit.weights)  # low-precision base, same stream
    seen = unit.autocast_ops if autocasts else ()
    ops, outputs, shared, logits, divided = [], [], 0.0, 0.0, False
    shares = autocasts and sharding.tp > 1 and sharding.sequence and sharding.own_loss
    for op in _entered_once(seen or unit.ops) if shares else seen or unit.ops:
        if op.kind == "loss":
            divided = sharding.tp > 1 and sharding.vocab and op.tp_sharding == "vocab"
            logits = op.temporary / (sharding.cp * (sharding.tp if divided else 1))
            continue
        ops.append(_op_bytes(op, width, autocasts and not seen, sharding, compiled))
        if op.kept_by_selective:
            result = _output_bytes(op, width, sharding)
            outputs.append(result)
            shared += 0.0 if op.temporary else result  # a later op would have saved it, too
    if autocasts and not seen and not shares:
        ops.append(OpBytes(autocast_copies(unit.ops) * width, 0.0, 0.0, 0.0))
    entry = unit.input_elements * (FP32 if autocasts else width) / (sharding.cp * sharding.of_entry(unit))
    saved = sum(op.saved for op in ops)
    pieces = {"none": [op.saved for op in ops], "selective": [*outputs, entry], "full": [entry]}[mode]
    repeated = {"none": 0.0, "selective": max(0.0, saved - shared - entry), "full": max(0.0, saved - entry)}[mode]
    return UnitBytes(
        ops=tuple(ops),
        input=entry,
        kept=sum(pieces),
        pieces=tuple(pieces),
        again=repeated,
        forward=_forward_peak(ops, keeps=mode == "none"),
        logits=logits,
        loss_copies=_loss_copies(sharding, divided=divided) if logits else 0,
    )


def _entered_once(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield ops so that each shared low-precision input is counted once.

    Under autocast every product that reads a norm's result keeps a separate low-precision copy of it; where sequences
    are gathered in front of them, they are cast and gathered once for all products that read one tensor
    (``parallel.tensor``).
    """
    reader: tuple[int, int] | None = None
    for op in ops:
        if op.kind == "norm" or op.tp_sharding == "row":
            reader = None
        elif op.kind == "matmul" and op.tp_sharding == "column" and op.saved >= op.m * op.k:
            if reader == (op.m, op.k):
                yield replace(op, saved=op.saved - op.m * op.k)
                continue
            reader = (op.m, op.k)
        yield op


def _loss_copies(sharding: ActivationSharding, *, divided: bool) -> int:
    """Number of fp32 copies of the logits in the backward of the loss.

    Megatron-LM works in place; a loss over a sharded vocabulary keeps the logits and makes their gradient
    (``train.loss``); torch's loss also keeps log-probabilities and exponentials.
    """
    if sharding.regathers:
        return 1
    if divided:
        return 2 if sharding.own_loss else 4
    return 3


def _op_bytes(op: Op, width: int, autocasts: bool, sharding: ActivationSharding, compiled: bool) -> OpBytes:
    """Bytes of one op. Under autocast the stream between sublayers, saved by norms, is fp32.

    Fused ops keep no fp32 copies.
    """
    fused = compiled and op.fusible
    rows = FP32 if autocasts and op.kind == "norm" else width
    rows = 1 if sharding.fp8 and op.kind == "matmul" else rows
    saved = (op.saved * rows + op.saved_fp32 * FP32 + op.saved_bytes) / (sharding.cp * sharding.of_input(op))
    temporary = (
        0.0 if fused else (op.temporary * width + op.temporary_fp32 * FP32) / (sharding.cp * sharding.of_output(op))
    )
    if sharding.casts and converts(op):
        temporary += _cast_bytes(op, compiled=compiled) / sharding.cp
    if sharding.exchanges and op.kind == "attention":
        kept, moment = _exchanged(op, width, sharding)
        saved, temporary = saved + kept, temporary + moment
    if op.experts:
        saved = 0.0 if op.name == "combine" and sharding.weighs_early else saved * sharding.load
        temporary *= sharding.load
    gradient_in = op.m * op.k * width / (sharding.cp * sharding.of_gradient(op)) if op.kind == "matmul" else saved
    gradient_in *= sharding.load if op.experts and op.kind == "matmul" else 1.0
    elements = op.k * op.n / (sharding.tp if op.tp_sharding in ("column", "row", "vocab") else 1)
    if op.experts:
        elements = op.k * op.n * op.experts / (sharding.ep if sharding.ep > 1 else sharding.tp)
    return OpBytes(saved, temporary, gradient_in, elements if op.weight and op.kind == "matmul" else 0.0)


def _cast_bytes(op: Op, *, compiled: bool) -> float:
    """Temporary bytes of the casts to fp8 around one product, for one sample.

    torchao's Float8Linear saves the input and the weight as they came in and casts them again in backward
    (float8_linear.py:45 and 95 of 0.18), so that fp8 saves nothing from forward to backward. Beside each other are the
    two operands of the weight gradient, input and gradient, a byte an element: the largest pair of the three products
    where there are more tokens than columns. Eager casts also make two fp32 tensors of the larger one
    (``tensor.to(torch.float32) * scale`` and its clamp, float8_training_tensor.py, ``_ToFloat8ConstrFunc``).
    """
    wide = 0.0 if compiled else 2.0 * FP32 * max(op.k, op.n)
    return op.m * (op.k + op.n + wide)


def _exchanged(op: Op, width: int, sharding: ActivationSharding) -> tuple[float, float]:
    """Bytes that the all-to-all around an attention saves in addition, and its temporary bytes.

    Saved are the repeated part of keys and values, and the result in the layout that the model uses; temporary are the
    packed queries, keys and values that are sent.
    """
    each = op.m * op.head_dim * width / sharding.cp
    heads, keys = op.heads / sharding.tp, max(1, op.kv_heads // sharding.tp)
    repeats = kv_repeats(keys, sharding.cp)
    return each * (heads + 2 * keys * (repeats - 1)), each * (heads + 2 * keys * repeats)


def _output_bytes(op: Op, width: int, sharding: ActivationSharding) -> float:
    """Bytes saved of an op by selective recompute: its result, of attention also the fp32 LSE."""
    if op.kind == "attention":
        return op.m * op.heads * ((op.value_dim or op.head_dim) * width + FP32) / (sharding.tp * sharding.cp)
    load = sharding.load if op.experts else 1.0
    return op.m * op.n * width * load / (sharding.cp * sharding.of_output(op))


def _forward_peak(ops: list[OpBytes], *, keeps: bool) -> float:
    """Peak bytes of temporaries over the ops of one forward, beside the saved tensors.

    Where nothing is saved, an op's results and those of the op before it live together.
    """
    if keeps:
        return max((op.temporary for op in ops), default=0.0)
    pairs = zip([0.0, *(op.saved for op in ops)], ops, strict=False)
    return max((before + op.saved + op.temporary for before, op in pairs), default=0.0)
