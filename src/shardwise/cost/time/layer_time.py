"""Seconds of one unit and micro batch on one rank: kernels, tp and cp traffic, host.

The seconds of ops are kept: the search requests the same few combinations of degrees and micro batch thousands of
times, with each recompute and communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.cost.flops import attention_square_flops, recomputed
from shardwise.cost.same import Same
from shardwise.cost.time.expert_time import dispatch_s, grouped_s, resort_s, routed_ops
from shardwise.cost.time.machine import FP8_EAGER_LAUNCHES, FP8_ROWWISE, Machine, larger
from shardwise.cost.time.overlap import CONTENTION
from shardwise.cost.time.work_split import WorkSplit
from shardwise.model.profile import Op, Unit, Weight
from shardwise.plan.fp8_recipes import converts, in_fp8
from shardwise.plan.plan import Precision
from shardwise.plan.traffic import REPEATED_DISPATCHES

FP32_BYTES = 4
COMPUTE_BYTES = {"fp32": FP32_BYTES, "bf16": 2, "fp16": 2, "fp8": 2}
# Bytes that a chain of fusible ops moves when it is one kernel, of what its ops move in the compute width; what they
# move in fp32 stays in registers. A Llama block of 4096 and 14336 has 8 h + 3 f for 10 h + 5 f.
COMPILED_MOVES = 0.67
# Bytes that a memory-bound op's backward moves, of what its forward does: a norm reads the gradient and its input and
# writes a gradient and two sums; an activation's reads one more operand; an op that keeps nothing is linear, and its
# backward only scales or adds where branches meet.
BACKWARD_MOVES = {"norm": 2.0, "pointwise": 1.5, "embedding": 2.0, "loss": 1.0}
LINEAR_BACKWARD_MOVES = 0.8
# Host time, in bare launches (`kernels.launch_s`): of an op of the profile (module call, autograd, casts, small kernels
# that the profile does not list), and of a tensor-parallel collective. Fitted on vTrain's small blocks, which wait for
# the host: 3 ms for each block and micro batch of Megatron-DeepSpeed, whatever its width.
EAGER_LAUNCHES = 12.0
COLLECTIVE_LAUNCHES = 4.0
SKEW_S = 6e-5  # skew of a tensor-parallel group's ranks at each collective of a block; vTrain's rows
BACKWARD_LAUNCHES = 1.4  # host time of an op's backward nodes, of its forward's
# The same of a CPU, whose measured kernels have their own call in them (`benchmarks/choice`).
CPU_LAUNCHES, CPU_BACKWARD_LAUNCHES = 6.0, 0.5
# DeepSpeed's ZeRO-3 gathers and releases each module's weights by hooks in Python: its host seconds for one module and
# pass. From Qwen's table of 2023 (1.8B on one GPU, 256 to 1,024 tokens: 2.1 s for eight micro batches); its 7B and 72B
# rows are then 15 to 29 % too fast up to 1,024 tokens.
GATHERED_MODULE_S = 3e-4
COMPILED_LAUNCHES = 0.35  # host time of a compiled unit, of an eager one's; an assumption


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds of one of a unit's ``count``, for one micro batch."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tp_forward_s: float
    tp_backward_s: float
    tp_recompute_s: float
    cp_forward_s: float
    cp_backward_s: float
    cp_recompute_s: float
    host_forward_s: float
    host_backward_s: float
    ep_forward_s: float = 0.0
    ep_backward_s: float = 0.0
    ep_recompute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitElements:
    """Weights of one of a unit's ``count`` on one tensor-parallel rank, before any sharding.

    Those of experts that are spread over ranks are also counted apart.
    """

    elements: float
    trainable: float
    at_rest_bytes: float  # as they are stored
    expert_elements: float = 0.0
    expert_trainable: float = 0.0
    expert_at_rest_bytes: float = 0.0
    in_fp8: float = 0.0  # those whose product a recipe of fp8 converts
    wide: float = 0.0  # stored in fp32: autocast copies them, and not a frozen base in 16 or 4 bits
    expert_wide: float = 0.0


def unit_elements(unit: Unit, tp: int, ep: int) -> UnitElements:
    """Count the weights of ``unit``."""
    local = [(w, w.num_elements / _ways(w, tp, ep)) for w in unit.weights]
    spread = [(w, n) for w, n in local if w.experts and ep > 1]
    return UnitElements(
        elements=sum(n for _, n in local),
        trainable=sum(n for w, n in local if w.trainable),
        at_rest_bytes=sum(n * w.itemsize for w, n in local),
        expert_elements=sum(n for _, n in spread),
        expert_trainable=sum(n for w, n in spread if w.trainable),
        expert_at_rest_bytes=sum(n * w.itemsize for w, n in spread),
        in_fp8=sum(n for w, n in local if in_fp8(unit, w)),
        wide=sum(n for w, n in local if w.itemsize == FP32_BYTES),
        expert_wide=sum(n for w, n in spread if w.itemsize == FP32_BYTES),
    )


class _Kernels:
    """Machine that is equal to those whose kernels take as long: of the same GPU, or with the same rates."""

    __slots__ = ("gpu", "machine")

    def __init__(self, machine: Machine) -> None:
        self.machine, self.gpu = machine, Same(machine.gpu)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernels) and self.gpu == other.gpu and self.machine.rates == other.machine.rates

    def __hash__(self) -> int:
        return hash((self.gpu, self.machine.rates))


@lru_cache(maxsize=4096)
def _of_ops(split: WorkSplit) -> WorkSplit:
    """Return the split without what the seconds of an op itself do not depend on."""
    return replace(
        split,
        recompute="none",
        hides_reduction=False,
        ring=False,
        host=1.0,
        weighs_early=False,
        hidden_dispatch=0.0,
    )


@lru_cache(maxsize=8192)
def _ops_s(kernels: _Kernels, unit: Same[Unit], split: WorkSplit) -> tuple[tuple[float, float], ...]:
    """Seconds of each op of a unit, forward and backward; none of copies that are not made to be sent."""
    sent = split.once_each_rank and split.ep > 1
    return tuple(
        (0.0, 0.0) if sent and op.name == "dispatch" else op_s(kernels.machine, unit.value, op, split)
        for op in unit.value.ops
    )


def unit_time(machine: Machine, unit: Unit, split: WorkSplit) -> UnitTime:
    """Seconds of ``unit`` under ``split``, without communication of the data-parallel axes."""
    forward = backward = recompute = 0.0
    cp_forward = cp_backward = cp_recompute = 0.0
    launches = recompute_launches = 0.0
    seconds = _ops_s(_Kernels(machine), Same(unit), _of_ops(split))
    for op, repeated, (ahead, back) in zip(unit.ops, recomputed(unit, split.recompute), seconds, strict=True):
        forward += ahead
        backward += back
        launches += op.launches
        if repeated:
            recompute += ahead
            recompute_launches += op.launches
        if split.cp > 1 and op.kind == "attention":
            there, home = ring_s(machine, op, split, ahead, back) if split.ring else exchange_s(machine, op, split)
            cp_forward, cp_backward = cp_forward + there, cp_backward + home
            cp_recompute += there if repeated else 0.0
    tp_forward, tp_backward, tp_recompute = tensor_parallel_s(machine, unit, split)
    packed = sum(w.num_elements / _ways(w, split.tp, split.ep) for w in unit.weights if w.itemsize < 1)
    tokens_part, width = split.micro / split.cp / split.tp, COMPUTE_BYTES[split.precision]
    moved = dispatch_s(machine, unit, split.ep, tokens_part, width, once_each_rank=split.once_each_rank)
    if moved:
        sorting = resort_s(machine, unit, split.ep, split.experts_of(routed_ops(unit)[0])[0], width)
        forward, backward = forward + sorting, backward + sorting
        if split.recompute != "none":  # it ends in front of the results' way back where they are weighed early
            recompute += sorting / (2.0 if split.weighs_early else 1.0)
    again = 0 if split.recompute == "none" else 1 if split.weighs_early else REPEATED_DISPATCHES
    if packed:  # 4-bit weights are dequantized to the compute type before each use
        unpack = machine.memory_s(packed * (0.516 + COMPUTE_BYTES[split.precision]))
        forward, backward = forward + unpack, backward + unpack
        recompute += unpack if unit.kind == "block" and split.recompute != "none" else 0.0
    each, again_each = EAGER_LAUNCHES, BACKWARD_LAUNCHES
    if machine.rates is not None:
        each, again_each = CPU_LAUNCHES, CPU_BACKWARD_LAUNCHES
    host = (
        split.host
        * machine.launch_s()
        * each
        * (COMPILED_LAUNCHES if split.compiled_host and unit.kind == "block" else 1.0)
    )
    calls = collectives_of(unit, split) * COLLECTIVE_LAUNCHES * machine.launch_s()
    casts = _cast_launches(unit, split)
    hooks = _hooks_s(unit) if split.gathers_modules and machine.rates is None else 0.0
    return UnitTime(
        forward_s=forward,
        backward_s=backward,
        recompute_s=recompute,
        tp_forward_s=tp_forward,
        tp_backward_s=tp_backward,
        tp_recompute_s=tp_recompute,
        cp_forward_s=cp_forward,
        cp_backward_s=cp_backward,
        cp_recompute_s=cp_recompute,
        host_forward_s=host * launches + calls + casts[0] * machine.launch_s() + hooks,
        host_backward_s=host * (launches * again_each + recompute_launches)
        + (calls + hooks) * (2.0 if recompute else 1.0)
        + casts[1] * machine.launch_s(),
        ep_forward_s=_exposed_s(2 * moved, forward, split),
        ep_backward_s=_exposed_s(2 * moved, backward, split),
        ep_recompute_s=_exposed_s(again * moved, recompute, split),
    )


def _hooks_s(unit: Unit) -> float:
    """Host seconds of gathering a unit's modules one by one, in one pass."""
    return GATHERED_MODULE_S * len({weight.name.rpartition(".")[0] for weight in unit.weights})


def _exposed_s(exchange: float, compute: float, split: WorkSplit) -> float:
    """Seconds by which all-to-alls of experts lengthen a unit that computes for ``compute``."""
    hidden = split.hidden_dispatch * min(exchange, compute)
    return exchange - hidden + CONTENTION * hidden


def _ways(weight: Weight, tp: int, ep: int) -> int:
    """Ranks over which model-parallel axes divide a weight."""
    if weight.experts and ep > 1:
        return ep
    return tp if weight.tp_dim is not None else 1


def op_s(machine: Machine, unit: Unit, op: Op, split: WorkSplit) -> tuple[float, float]:
    """Seconds of an op's forward and backward (input gradient, and weight gradient if any)."""
    tp, micro = split.tp, split.micro
    if op.kind in ("matmul", "conv"):
        rows, depth, columns = op.m * micro / split.cp, float(op.k), float(op.n)
        if op.tp_sharding in ("column", "vocab", "heads"):
            rounds = op.tp_sharding == "vocab" and (tp > 1 or split.padded)
            columns = math.ceil(columns / tp / 128) * 128.0 if rounds else columns / tp
        elif op.tp_sharding == "row":
            depth /= tp
        elif op.tp_sharding == "sequence" and shards_sequence(unit, split):
            rows /= tp
        precision = "bf16" if split.precision == "fp8" and unit.kind != "block" else split.precision
        if precision == "fp8" and split.recipe != "none":
            return _recipe_s(machine, op, rows, depth, columns, split)
        if op.experts:
            return _experts_s(machine, op, depth, columns, split, precision)
        if op.kind == "conv":
            return _convolution_s(
                machine, op, rows, depth, columns, precision, machine.memory_s(_moved_bytes(unit, op, split))
            )
        ahead, back = _products_s(machine, op, rows, depth, columns, precision)
        if precision == "fp8":  # products that fp8 would slow down stay in 16 bits
            casts = _casts_s(machine, op, rows, depth, columns, split)
            bf16_ahead, bf16_back = _products_s(machine, op, rows, depth, columns, "bf16")
            ahead, back = ahead + casts[0], back + casts[1]
            if bf16_ahead + bf16_back < ahead + back:
                ahead, back = bf16_ahead, bf16_back
        return ahead, back
    if op.kind == "attention":
        return _attention_s(machine, op, split, backward=False), _attention_s(machine, op, split, backward=True)
    linear = op.kind == "pointwise" and not (op.saved or op.saved_fp32 or op.saved_bytes)
    again = LINEAR_BACKWARD_MOVES if linear else BACKWARD_MOVES.get(op.kind, 2.0)
    return machine.op_s("linear" if linear else op.kind, _moved_bytes(unit, op, split), again)


def _casts_s(
    machine: Machine, op: Op, rows: float, depth: float, columns: float, split: WorkSplit
) -> tuple[float, float]:
    """Seconds of a product's casts to fp8, forward and backward.

    Where the sequence is sharded between products, what is gathered is cast before that, as torchao's
    ``Float8ColwiseParallel`` does.
    """
    share = split.tp if split.sequence_parallel else 1
    inputs = rows * depth / (share if op.tp_sharding == "column" else 1)
    gradients = rows * columns / (share if op.tp_sharding == "row" else 1)
    weights = depth * columns if split.casts_weights else 0.0
    again = inputs + gradients if op.weight else 0.0
    fused = split.compiled and not split.compiled_host
    return machine.cast_s(inputs + weights, fused=fused), machine.cast_s(gradients + weights + again, fused=fused)


def _recipe_s(
    machine: Machine, op: Op, rows: float, depth: float, columns: float, split: WorkSplit
) -> tuple[float, float]:
    """Seconds of a product forward and backward as torchao's Float8Linear computes it.

    Each of the three products casts both operands (float8_linear.py of 0.18): input and weight forward; in backward the
    output's gradient, once for each of two products (compiled code shares it where the scale is one for the tensor),
    weight and input. What torchao does not convert stays in bf16.
    """
    if op.experts:
        return _experts_s(machine, op, depth, columns, split, "bf16")
    if not converts(op):
        return _products_s(machine, op, rows, depth, columns, "bf16")
    ahead, back = _products_s(machine, op, rows, depth, columns, "fp8")
    slower = FP8_ROWWISE if split.recipe == "rowwise" else 1.0
    weights = 0.0 if split.gathers_fp8 else depth * columns
    gradients = rows * columns * (1.0 if split.compiled_host and split.recipe == "tensorwise" else 2.0)
    return (
        ahead * slower + machine.cast_s(rows * depth + weights, compiled=split.compiled_host),
        back * slower + machine.cast_s(gradients + weights + rows * depth, compiled=split.compiled_host),
    )


def _cast_launches(unit: Unit, split: WorkSplit) -> tuple[int, int]:
    """Kernels of the eager casts around a unit's products, forward and backward."""
    if split.recipe == "none" or split.compiled_host or unit.kind != "block":
        return 0, 0
    ahead = back = 0
    for op, repeated in zip(unit.ops, recomputed(unit, split.recompute), strict=True):
        if converts(op):
            weight = 0 if split.gathers_fp8 else 1
            ahead += 1 + weight
            back += 3 + weight + (1 + weight) * repeated
    return ahead * FP8_EAGER_LAUNCHES, back * FP8_EAGER_LAUNCHES


def _convolution_s(
    machine: Machine, op: Op, rows: float, depth: float, columns: float, precision: Precision, moved_s: float
) -> tuple[float, float]:
    """Seconds of a convolution forward and backward: its implicit GEMMs or its images through memory, the longer ones.

    A kernel gathers the rows of the product in a multiprocessor's own memory, so that each pixel passes through
    device memory once, not once for each place of the filter. The gradients of input and weight move as much each.
    Left out is what stays in a large L2 from one kernel to the next. Predicted images/s of ResNet-50 are below
    published ones by 9 % (A100), 22 % (V100), 27 % (RTX 3090) and 32 % (RTX 4090) (`tests/unit/test_time.py`).
    """
    kind: Precision = "bf16" if precision == "fp8" else precision
    shapes = [(rows, depth, columns), (rows, columns, depth), *([(depth, rows, columns)] if op.weight else [])]
    seconds = [machine.matmul_s(*shape, kind, operands=False) for shape in shapes]
    ahead, *back = (larger(one, moved_s) if moved_s else one for one in seconds)
    return ahead, sum(back)


def _experts_s(
    machine: Machine, op: Op, depth: float, columns: float, split: WorkSplit, precision: Precision
) -> tuple[float, float]:
    """Seconds of one grouped product over the rows of the fullest rank."""
    part, local = split.experts_of(op)
    if split.ep > 1:
        depth, columns = float(op.k), float(op.n)
    ahead, back = grouped_s(machine, op, op.m * part, depth, columns, local, precision)
    if precision == "fp8":
        weights = depth * columns * local if split.casts_weights else 0.0
        # what comes from other ranks is cast by a kernel of its own; the second product's inputs come from a fused one
        fused = split.compiled and not split.compiled_host and op.tp_sharding == "row"
        cast = (
            machine.cast_s(op.m * part * depth + weights, fused=fused),
            machine.cast_s(op.m * part * (2 * columns + depth) + weights, fused=fused),
        )
        plain = grouped_s(machine, op, op.m * part, depth, columns, local, "bf16")
        ahead, back = ahead + cast[0], back + cast[1]
        return (ahead, back) if ahead + back < sum(plain) else plain
    return ahead, back


def _products_s(
    machine: Machine, op: Op, rows: float, depth: float, columns: float, precision: Precision
) -> tuple[float, float]:
    """Seconds of a product and of those of its backward, without casts."""
    back = machine.matmul_s(rows, columns, depth, precision)
    if op.weight:
        back += machine.matmul_s(depth, rows, columns, precision)
    return machine.matmul_s(rows, depth, columns, precision), back


def _moved_bytes(unit: Unit, op: Op, split: WorkSplit) -> float:
    width = COMPUTE_BYTES[split.precision]
    full = op.tp_sharding == "none" or (op.tp_sharding == "sequence" and not shards_sequence(unit, split))
    full = full or (op.kind == "loss" and not split.loss_parallel)
    share = float(split.cp * (1 if full else split.tp))
    if op.experts and split.ep > 1:
        share = split.micro / split.experts_of(op)[0]
    if split.compiled and op.fusible and unit.kind == "block":
        moved = COMPILED_MOVES * op.moved * width
    else:
        moved = op.moved * width + op.moved_fp32 * 4
    return moved * split.micro / share


def shards_sequence(unit: Unit, split: WorkSplit) -> bool:
    """Return whether norms and residuals of ``unit`` work on a rank's shard of the sequence."""
    return split.sequence_parallel and (unit.kind == "block" or split.shards_ends)


def _attention_s(machine: Machine, op: Op, split: WorkSplit, *, backward: bool) -> float:
    """Seconds of one attention; any mask counts in proportion to its FLOPs, rows split evenly."""
    full = attention_square_flops(op) * (0.5 if op.causal else 1.0)
    rows, documents = op.m, 1.0
    if split.document is not None and split.document < op.m and op.causal:
        rows, documents = split.document, op.m / split.document
    seconds = machine.attention_s(
        batch=math.ceil(split.micro * documents),
        heads=max(1, op.heads // split.tp),
        kv_heads=max(1, op.kv_heads // split.tp),
        head_dim=op.head_dim,
        rows=rows,
        causal=op.causal,
        precision=split.precision,
        backward=backward,
        kernel=split.attention,
    )
    if split.attention == "unfused":  # a mask saves nothing
        return seconds / split.cp
    part = min(1.0, op.flops / full) if full and op.flops else 1.0
    return seconds * part / split.cp


def ring_s(machine: Machine, op: Op, split: WorkSplit, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Exposed seconds of context parallel around one attention, forward and backward.

    Keys and values go around a ring while local rows are attended to; transfers that a turn's attention does not cover
    are exposed. Backward sends their gradients around as well. Ranks are neighbours outside the tensor-parallel group.
    """
    cp = split.cp
    per_node = max(1, machine.cluster.devices_per_node // split.tp)
    turn = 2.0 * op.m * split.micro * max(1, op.kv_heads // split.tp) * op.head_dim / cp
    turn *= COMPUTE_BYTES[split.precision]
    send = machine.collective_s("all_gather", turn * cp, cp, per_node) / max(1, cp - 1)
    return (
        (cp - 1) * max(0.0, send - forward_s / cp),
        (cp - 1) * max(0.0, 2 * send - backward_s / cp),
    )


def exchange_s(machine: Machine, op: Op, split: WorkSplit) -> tuple[float, float]:
    """Seconds of the all-to-alls around one attention, forward and backward, without overlap.

    Queries, keys and values go out as this rank's tokens of all heads and come back as all tokens of its heads; the
    result goes the other way, and gradients likewise.
    """
    cp, per_node = split.cp, max(1, machine.cluster.devices_per_node // split.tp)
    heads, kv_heads = op.heads / split.tp, max(op.kv_heads / split.tp, float(cp))
    row = op.m * split.micro / cp * op.head_dim * COMPUTE_BYTES[split.precision]
    each = [machine.collective_s("all_to_all", row * count, cp, per_node) for count in (heads, kv_heads)]
    seconds = 2 * sum(each)
    return seconds, seconds


def tensor_parallel_s(machine: Machine, unit: Unit, split: WorkSplit) -> tuple[float, float, float]:
    """Seconds of the collectives of tensor parallel: forward, backward, recomputed.

    With sequence parallel a block's rows are gathered before a column-parallel product and reduce-scattered after a
    row-parallel one; backward mirrors them. Embedding and head do one of the two, and a vocabulary-parallel loss three
    reductions of one number per token; without that, the logits are gathered. Without sequence parallel, one all-reduce
    replaces each pair, the embedding's in forward and the head's in backward; so it does where embedding and head work
    on full sequences, which are scattered after the embedding and gathered before the head.
    """
    tp = split.tp
    if tp <= 1 or not unit.weights:
        return 0.0, 0.0, 0.0
    per_node = machine.cluster.devices_per_node
    width = COMPUTE_BYTES[split.precision]
    message = unit.input_elements * split.micro * width / split.cp
    rows = sum(1 for op in unit.ops if op.kind == "matmul" and op.tp_sharding == "row" and not op.experts)
    rows += _gathered_mlps(unit, split)
    vocab = sum(1 for op in unit.ops if op.tp_sharding == "vocab" and op.kind in ("matmul", "embedding"))
    if unit.kind == "embedding":  # bytes that its lookup writes; it reads as many
        message = sum(op.moved for op in unit.ops if op.tp_sharding == "vocab") / 2 * split.micro * width / split.cp
    skew = SKEW_S if machine.rates is None else 0.0
    gather = machine.tp_factor() * machine.collective_s("all_gather", message, tp, per_node) + skew
    scatter = machine.tp_factor() * machine.collective_s("reduce_scatter", message, tp, per_node) + skew
    if not split.sequence_parallel:
        gather = 0.0
        scatter = machine.tp_factor() * machine.collective_s("all_reduce", message, tp, per_node) + skew
    if rows:
        forward = rows * (gather + scatter)
        last = scatter if split.sequence_parallel else 0.0  # Megatron-LM's checkpoints repeat the last reduction
        recompute = forward - last if unit.kind == "block" and split.recompute != "none" else 0.0
        hidden = (
            min(rows * (scatter - skew), _weight_gradients_s(machine, unit, split)) if split.hides_reduction else 0.0
        )
        return forward, forward - hidden, recompute
    if not vocab:
        return 0.0, 0.0, 0.0
    if split.sequence_parallel and not split.shards_ends:
        scatter = machine.tp_factor() * machine.collective_s("all_reduce", message, tp, per_node) + skew
    if unit.kind == "embedding":
        return scatter, gather, 0.0
    tokens = max((op.m for op in unit.ops), default=0) * split.micro / split.cp
    if split.loss_parallel:
        losses = 3 * machine.collective_s("all_reduce", 4.0 * tokens, tp, per_node)
    else:
        words = max((op.n for op in unit.ops if op.tp_sharding == "vocab"), default=0)
        losses = machine.collective_s("all_gather", tokens * words * width, tp, per_node)
    return gather + losses, scatter, 0.0


def _gathered_mlps(unit: Unit, split: WorkSplit) -> int:
    """Rows of a routed MLP that tensor parallel gathers and sums beside those of dense products.

    Without ``+ep`` experts are cut like any MLP, and one gather and one sum serve them and the shared experts.
    """
    routed = any(op.experts for op in unit.ops)
    shared = any(op.name == "shared_down" for op in unit.ops)
    return 1 if routed and split.ep == 1 and not shared else 0


def _weight_gradients_s(machine: Machine, unit: Unit, split: WorkSplit) -> float:
    """Seconds of the products for the gradients of a unit's column-parallel weights."""
    rows, precision = split.micro / split.cp, split.precision
    column_parallel = [
        op for op in unit.ops if op.kind == "matmul" and op.tp_sharding == "column" and op.weight and not op.experts
    ]
    return sum(machine.matmul_s(float(op.k), op.m * rows, op.n / split.tp, precision) for op in column_parallel)


def collectives_of(unit: Unit, split: WorkSplit) -> int:
    """Tensor-parallel collectives of a unit's forward.

    A gather and a scatter, or a reduction, for each row-parallel product.
    """
    if split.tp <= 1:
        return 0
    each = 2 if split.sequence_parallel else 1
    dense = sum(1 for op in unit.ops if op.kind == "matmul" and op.tp_sharding == "row" and not op.experts)
    return each * (dense + _gathered_mlps(unit, split))


def is_finite(time: UnitTime) -> bool:
    """Return False where a rate or a link's bandwidth is unknown."""
    return math.isfinite(time.forward_s + time.tp_forward_s + time.cp_forward_s + time.ep_forward_s)
