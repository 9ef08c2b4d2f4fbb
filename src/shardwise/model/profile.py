"""`ModelProfile`: a model as a short list of units, with their weights and operations.

The inputs of the cost model: shapes, floating-point operations, elements moved and elements saved for backward. Sizes
are per sample of ``seq_len`` tokens (or per sample, where samples are not sequences), forward only, on one device; the
cost model applies the sharding and repetition of a plan. No torch is needed.

Elements at the *compute width* take the bytes of the plan's precision (2 in bf16, 4 in fp32); those named ``fp32`` take
4 bytes always; those named ``bytes`` are bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

OpKind = Literal["matmul", "attention", "conv", "norm", "pointwise", "embedding", "loss"]
TpSharding = Literal["column", "row", "heads", "sequence", "vocab", "none"]
UnitKind = Literal["embedding", "block", "head", "other"]


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameter of a unit; ``tp_dim`` is its dim sharded by tensor parallel, or ``None``.

    ``experts`` above 0: the first dim counts that many stacked experts, of which a token uses the fraction ``active``.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: float = 4.0  # in storage; 4-bit with double quantization has 0.516
    trainable: bool = True
    tp_dim: int | None = None
    scales: float = 0.0  # of ``itemsize``, the unsharded part: the scales of 4-bit blocks
    experts: int = 0
    active: float = 1.0

    @property
    def num_elements(self) -> int:
        """Elements, 1 for a 0-d parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Op:
    """Operation of a unit's forward, or several small ones that always occur together.

    ``m``, ``k``, ``n`` are a matmul's rows per sample, contraction and columns (a convolution's as implicit GEMM);
    an attention has ``heads``, ``kv_heads``, ``head_dim`` and its rows in ``m``. ``flops`` counts a multiply-add as two
    and a causal attention as the half that is computed. ``moved`` is what a memory-bound kernel reads and writes.
    ``saved`` is kept for backward, each storage counted at the first op that saves it. ``temporary`` lives only while
    the op runs forward. ``tp_sharding`` is how tensor parallel shards it: ``column`` divides ``n``, ``row`` divides
    ``k``, ``heads`` divides the heads, ``vocab`` divides the vocabulary, ``sequence`` divides the rows (sequence
    parallel), ``none`` repeats it on every rank. ``experts`` above 0: its rows are copies of tokens, spread over that
    many experts with weights of their own. ``value_dim`` is the width of a head's value, where it is not ``head_dim``.
    """

    name: str
    kind: OpKind
    m: int = 0
    k: int = 0
    n: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    causal: bool = False
    flops: float = 0.0
    moved: int = 0
    moved_fp32: int = 0
    launches: int = 1  # kernels that eager PyTorch launches forward
    saved: int = 0
    saved_fp32: int = 0
    saved_bytes: int = 0
    temporary: int = 0
    temporary_fp32: int = 0
    tp_sharding: TpSharding = "none"
    fusible: bool = False  # torch.compile fuses it with its neighbours
    kept_by_selective: bool = False  # selective recompute saves its output instead of recomputing it
    weight: bool = False  # backward also computes a weight gradient
    experts: int = 0
    share: float = 1.0  # of the experts that one token takes
    value_dim: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit executed ``count`` times in a row: a block, the embedding, the head.

    ``input_elements`` per sample at compute width is what full recompute saves of it, and what a pipeline sends if
    a stage begins with it. A unit of kind ``block`` is one of the repeated blocks: a unit of sharding and of recompute.
    """

    name: str
    kind: UnitKind
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    input_elements: int
    count: int = 1
    autocast_ops: tuple[Op, ...] = ()  # under autocast, weights and stream in fp32; empty where not known

    @property
    def num_elements(self) -> int:
        """Elements of the weights of one repetition."""
        return sum(w.num_elements for w in self.weights)

    @property
    def num_trainable(self) -> int:
        """Elements that get a gradient, of one repetition."""
        return sum(w.num_elements for w in self.weights if w.trainable)

    @property
    def experts(self) -> int:
        """Experts of the unit; 0 where it has none."""
        return max((w.experts for w in self.weights), default=0)

    @property
    def share(self) -> float:
        """Share of the experts that one token takes; 1 where the unit has none."""
        return min((w.active for w in self.weights if w.experts), default=1.0)

    @property
    def flops(self) -> float:
        """Forward floating-point operations per sample, of one repetition."""
        return sum(op.flops for op in self.ops)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Model as units in order of execution.

    ``tied`` names weights ``(kept, alias)``: a head tied to the embedding has no weight of its own, but its op is
    listed. ``unknown`` describes for people what could not be determined.
    """

    name: str
    units: tuple[Unit, ...]
    seq_len: int | None
    origin: Literal["catalogue", "config", "traced"]
    hidden_size: int | None = None
    vocab_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    max_seq_len: int | None = None
    tied: tuple[tuple[str, str], ...] = ()
    source: str = ""
    unknown: tuple[str, ...] = field(default=())

    @property
    def num_blocks(self) -> int:
        """Repeated blocks."""
        return sum(unit.count for unit in self.units if unit.kind == "block")

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones once."""
        return sum(unit.num_elements * unit.count for unit in self.units)

    @property
    def num_trainable(self) -> int:
        """Elements that get a gradient."""
        return sum(unit.num_trainable * unit.count for unit in self.units)

    @property
    def num_active(self) -> float:
        """Elements that one token uses: of experts those that it is routed to."""
        return sum(w.num_elements * w.active * unit.count for unit in self.units for w in unit.weights)

    @property
    def num_active_trainable(self) -> float:
        """Elements that one token uses and that get a gradient."""
        return sum(w.num_elements * w.active * unit.count for unit in self.units for w in unit.weights if w.trainable)

    @property
    def experts(self) -> int:
        """Common divisor of the experts of all layers that have some; 0 for a dense model."""
        return math.gcd(*{unit.experts for unit in self.units})

    @property
    def flops(self) -> float:
        """Forward floating-point operations of one sample; causal attention counts half."""
        return sum(unit.flops * unit.count for unit in self.units)
