"""Record the operations of a forward on fake tensors, with sizes and saved tensors.

Works on any device that fake tensors support. Differences of CUDA from the CPU are corrected: a norm's statistics are
fp32, ``rms_norm`` is one kernel that saves its input and rstd, ``dropout`` is one that saves a mask of bytes, attention
with dropout stays fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ModelError
from shardwise.model.profile import Op, OpKind, TpSharding
from shardwise.model.trace_experts import GROUPED

MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "mv", "addmv"}
CONVOLUTIONS = {"convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "mkldnn_convolution"}
NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_fused_rms_norm"}
ATTENTIONS = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward")
EMBEDDINGS = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
# derivatives.yaml of PyTorch: their backward reads the result, not the input
KEEP_RESULT = NORMS | {
    *("relu", "relu_", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "reciprocal", "_softmax", "_log_softmax"),
    *("native_dropout", "max_pool2d_with_indices", "max_pool3d_with_indices", "nll_loss_forward", "norm", "cumprod"),
}
SEPARATE = {"index", "index_put", "index_put_", "sort", "topk", "scatter", "gather", "nonzero", "_fft_r2c", "_fft_c2r"}
UNCOUNTED = {"empty", "empty_like", "empty_strided", "new_empty", "scalar_tensor", "_local_scalar_dense"}


@dataclass(slots=True)
class OperationSizes:
    """Sizes: elements in the compute dtype, elements in fp32, and bytes of everything else."""

    narrow: int = 0
    fp32: int = 0
    other_bytes: int = 0

    def add(self, dtype: torch.dtype, elements: int, compute: torch.dtype) -> None:
        """Count ``elements`` of ``dtype``; ``compute`` is the compute dtype of the trace."""
        if dtype == compute:
            self.narrow += elements
        elif dtype == torch.float32:
            self.fp32 += elements
        else:
            self.other_bytes += elements * dtype.itemsize


@dataclass(slots=True)
class Recorded:
    """Recorded operation; ``outputs`` are its new storages: key, dtype and elements."""

    name: str
    kind: OpKind
    facts: dict[str, Any] = field(default_factory=dict)
    moved: OperationSizes = field(default_factory=OperationSizes)
    saved: OperationSizes = field(default_factory=OperationSizes)
    outputs: list[tuple[int, torch.dtype, int]] = field(default_factory=list)
    fusible: bool = False
    reads: set[int] = field(default_factory=set)  # storages, also those of parameters
    writes: set[int] = field(default_factory=set)
    biases: tuple[int, ...] = ()
    tp_sharding: TpSharding = "none"


@dataclass(slots=True)
class Segment:
    """Operations between two boundaries: those of a block (named ``block``), or between blocks."""

    block: str | None
    ops: list[Recorded] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    input_elements: int = 0
    width: int | None = None  # last dim of the first input, where that is [sample, length, width]
    parameters: list[str] = field(default_factory=list)
    late: OperationSizes = field(
        default_factory=OperationSizes
    )  # created here, first saved by a later segment that shares it


MOST_OPERATIONS = 20_000
"""Of one block. Blocks of 160 experts, one by one, have some 2,000; a loop over 4,096 tokens has more than this."""


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder that counts into ``segments``.

    ``own`` maps the storage of each parameter to its name, ``trainable`` are those of them that get a gradient,
    ``outside`` are storages that are not counted: buffers and inputs. Under autocast the low-precision copy of a
    parameter is that parameter: the cost model counts it with the weights.
    """

    def __init__(
        self,
        own: dict[int, str],
        trainable: set[int],
        outside: set[int],
        compute: torch.dtype,
        *,
        autocasts: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own, self.trainable, self.outside, self.compute = own, trainable, outside, compute
        self.segments = [Segment(None)]
        self.kept: set[int] = set()
        self.crossed: set[int] = set()  # storages passed between segments
        self.rms = False
        self.autocasts = autocasts
        self._made: dict[int, int] = {}  # storage -> index of the segment that created it
        self._alive: list[torch.UntypedStorage] = []  # keeps keys unique
        self._statistics: dict[int, bool] = {}  # storage of a norm's statistics -> whether CUDA has it at all
        self._waiting: list[tuple[torch.dtype, int]] = []  # saved inputs of the next op
        self._used: set[str] = set()
        self._entered: set[int] = set()
        self._count = 0  # operations of the present segment

    def begin(self, block: str | None, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Start a segment: the following operations belong to ``block``, or to none."""
        self._flush()
        segment = Segment(block, width=inputs[0].shape[-1] if inputs and inputs[0].ndim == 3 else None)
        for tensor in inputs:
            key = storage_key(tensor)
            segment.inputs.add(key)
            self.crossed.add(key)
            if key not in self._entered:  # an encoder's output enters every block of a decoder and is saved once
                segment.input_elements += tensor.numel()
            if block is not None:
                self._entered.add(key)
        self.segments.append(segment)
        self._count = 0

    def check_count(self) -> None:
        """Refuse a block that runs operation after operation, before it takes minutes.

        Raises:
            ModelError: it has run more than `MOST_OPERATIONS`.
        """
        if self._count > MOST_OPERATIONS:
            where = self.segments[-1].block or "the model"
            raise ModelError(
                f"'{where}' runs more than {MOST_OPERATIONS:,} operations on one sample, as a loop over its tokens "
                "does; such a model is not planned at this length: set a shorter --seq-len, or give a module that "
                "computes all tokens at once"
            )

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook for tensors saved by autograd: each storage once, never parameters and inputs."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.kept or key in self.own or key in self.outside:
            return tensor
        self.kept.add(key)
        self._alive.append(storage)
        dtype, elements = tensor.dtype, storage.nbytes() // tensor.dtype.itemsize
        if key in self._statistics:
            if not self._statistics[key]:
                return tensor
            dtype = torch.float32
        here, made = len(self.segments) - 1, self._made.get(key)
        current = self.segments[here]
        if made is not None and made != here and key not in current.inputs:
            self.segments[made].late.add(dtype, elements, self.compute)
            return tensor
        last = current.ops[-1] if current.ops else None
        result = last is not None and (last.name in KEEP_RESULT or last.kind == "attention")
        if last is not None and last.kind == "norm":  # its statistics; its output is saved by its readers
            result = key in self._statistics
        if last is not None and result and any(key == other for other, _, _ in last.outputs):
            last.saved.add(dtype, elements, self.compute)
        else:
            self._waiting.append((dtype, elements))
        return tensor

    def finish(self) -> list[Segment]:
        """Return the completed segments."""
        self._flush()
        return self.segments

    def _flush(self) -> None:
        segment = self.segments[-1]
        target = segment.ops[-1].saved if segment.ops else segment.late
        for dtype, elements in self._waiting:
            target.add(dtype, elements, self.compute)
        self._waiting.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count += 1
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._record(func, args, kwargs or {}, out)
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = _tensors((args, kwargs))
        results = _tensors(out)
        name = func._schema.name.partition("::")[2]
        read = {storage_key(t) for t in inputs}
        segment = self.segments[-1]
        if self.autocasts and name == "_to_copy" and storage_key(inputs[0]) in self.own:
            self._narrowed(inputs[0], results[0])
            return
        for key in read & self.own.keys():
            if self.own[key] not in self._used:
                self._used.add(self.own[key])
                segment.parameters.append(self.own[key])
        fresh = []
        for tensor in results:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in read and key not in self._made:
                self._alive.append(storage)
                self._made[key] = len(self.segments) - 1
                fresh.append((key, tensor.dtype, storage.nbytes() // tensor.dtype.itemsize))
        if (not fresh and not func._schema.is_mutable) or name in UNCOUNTED:
            return
        if name in MATMULS | CONVOLUTIONS and len({t.dtype for t in inputs}) > 1:  # fake tensors let it pass
            raise RuntimeError(f"{name} of {' and '.join(str(t.dtype) for t in inputs)}")
        recorded = self._classified(name, args, inputs, results)
        recorded.outputs = fresh
        recorded.reads, recorded.writes = read, {storage_key(t) for t in results}
        recorded.biases = tuple(storage_key(t) for t in inputs if t.ndim == 1 and storage_key(t) in self.own)
        for dtype, elements in self._waiting:
            recorded.saved.add(dtype, elements, self.compute)
        self._waiting.clear()
        if recorded.kind not in ("matmul", "attention"):
            for tensor in (*inputs, *results[: 1 if recorded.kind == "norm" else None]):
                held = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
                looked_up = recorded.kind == "embedding" and storage_key(tensor) in self.own
                elements = results[0].numel() if looked_up else min(tensor.numel(), held)
                recorded.moved.add(tensor.dtype, elements, self.compute)
        segment.ops.append(recorded)

    def _narrowed(self, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        key, new = storage_key(parameter), storage_key(copy)
        self._alive.append(copy.untyped_storage())
        self.own[new] = self.own[key]
        self.trainable |= {new} if key in self.trainable else set()

    def _classified(
        self, name: str, args: tuple[Any, ...], inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> Recorded:
        if name in MATMULS:
            return Recorded(name, "matmul", self._matmul(name, inputs, results[0]))
        if name in GROUPED:
            return Recorded(name, "matmul", self._grouped(inputs, results[0]))
        if name in CONVOLUTIONS:
            return Recorded(name, "conv", self._weighted(_convolution(args, results[0]), inputs[1]))
        if name.startswith(ATTENTIONS):
            return Recorded(name, "attention", _attention(args))
        if name in NORMS:
            for index, tensor in enumerate(results[1:]):
                self._statistics[storage_key(tensor)] = not (self.rms and index == 0)
            self.rms = False
            return Recorded(name, "norm", fusible=True)
        if name in EMBEDDINGS:
            return Recorded(name, "embedding", {"owner": storage_key(inputs[0])})
        if "rnn" in name or "lstm" in name or "gru" in name:
            return Recorded(name, "matmul", self._recurrent(inputs, results[0]))
        return Recorded(name, "pointwise", fusible=name not in SEPARATE)

    def _matmul(self, name: str, inputs: list[torch.Tensor], out: torch.Tensor) -> dict[str, Any]:
        left, right = inputs[-2:]
        k = left.shape[-1]
        n = 1 if right.ndim == 1 else right.shape[-1]
        m = out.numel() // max(n, 1)
        facts = {"m": m, "k": k, "n": n, "flops": 2.0 * m * k * n}
        for operand in (left, right):
            if storage_key(operand) in self.own:
                return self._weighted(facts, operand) | {"outputs_first": operand.stride(0) == 1}
        return facts | {"weight": True}  # both operands get a gradient

    def _grouped(self, inputs: list[torch.Tensor], out: torch.Tensor) -> dict[str, Any]:
        """Count a grouped product: rows sorted by expert, and the stacked matrices of all experts."""
        rows, stacked = inputs[:2]
        m, k, n = out.shape[0], rows.shape[-1], out.shape[-1]
        facts = {"m": m, "k": k, "n": n, "flops": 2.0 * m * k * n, "experts": stacked.shape[0]}
        return self._weighted(facts, stacked) if storage_key(stacked) in self.own else facts | {"weight": True}

    def _recurrent(self, inputs: list[torch.Tensor], out: torch.Tensor) -> dict[str, Any]:
        """Count all steps of a recurrent layer as one matmul with all its weights."""
        weights = [t for t in inputs if storage_key(t) in self.own and t.ndim > 1]
        m, n = out.numel() // out.shape[-1], sum(t.shape[0] for t in weights)
        k = max((t.shape[1] for t in weights), default=0)
        flops = sum(2.0 * m * t.numel() for t in weights)
        return {"m": m, "k": k, "n": n, "flops": flops, "weight": True}

    def _weighted(self, facts: dict[str, Any], weight: torch.Tensor) -> dict[str, Any]:
        key = storage_key(weight)
        return facts | {"weight": key in self.trainable, "owner": key}


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> dict[str, Any]:
    """Count a convolution as implicit GEMM.

    A transposed one maps each input position to a kernel of outputs.
    """
    image, weight = args[0], args[1]
    kernel = math.prod(weight.shape[2:])
    if len(args) > 6 and args[6] is True:
        m, k, n = image.numel() // image.shape[1], weight.shape[0], weight.shape[1] * kernel
    else:
        m, k, n = out.numel() // out.shape[1], weight.shape[1] * kernel, weight.shape[0]
    return {"m": m, "k": k, "n": n, "flops": 2.0 * m * k * n}


def _attention(args: tuple[Any, ...]) -> dict[str, Any]:
    query, key, value = args[:3]
    batch, heads, rows, head_dim = query.shape
    causal = next((a for a in args[3:] if isinstance(a, bool)), False)
    pairs = batch * heads * rows * key.shape[-2] * (0.5 if causal else 1.0)
    return {
        "m": batch * rows,
        "heads": heads,
        "kv_heads": key.shape[1],
        "head_dim": head_dim,
        "causal": causal,
        "flops": 2.0 * pairs * (head_dim + value.shape[-1]),
    }


class Bounded(TorchFunctionMode):
    """Call `OperationRecorder.check_count` between operations; an exception inside of one would end the process."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.recorder.check_count()
        return func(*args, **(kwargs or {}))


class AsOnCuda(TorchFunctionMode):
    """Replace functions that are composite on the CPU by CUDA's single kernels."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            names = ("input", "normalized_shape", "weight", "eps")
            given = dict(zip(names, args, strict=False)) | kwargs
            self.recorder.rms = True
            return torch.nn.functional.layer_norm(given["input"], given["normalized_shape"], given.get("weight"))
        if func in (torch.nn.functional.dropout, torch.dropout):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            chance = given.get("p", 0.5)
            if chance and given.get("training", given.get("train", True)):
                return torch.native_dropout(given["input"], chance, True)[0]
        if func is torch.nn.functional.multi_head_attention_forward and len(args) > 10:
            args = (*args[:10], 0.0, *args[11:])  # the operations that it calls are hidden here
        if func is torch.nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


def operations(
    segment: Segment, kept: set[int], own: dict[int, str], prefix: str, samples: int, compute: torch.dtype
) -> list[Op]:
    """Return a segment's operations per sample; consecutive pointwise ones are merged.

    ``kept`` storages are not temporaries; ``own`` maps a storage to its parameter's name, here without ``prefix``.

    """
    ops: list[Op] = []
    run: list[Recorded] = []
    for recorded in segment.ops:
        if run and (
            recorded.kind != "pointwise"
            or (recorded.fusible, recorded.tp_sharding) != (run[0].fusible, run[0].tp_sharding)
        ):
            ops.append(_merged(run, kept, samples, compute))
            run = []
        if recorded.kind == "pointwise":
            run.append(recorded)
            continue
        owner = own.get(recorded.facts.get("owner", 0), "").removeprefix(prefix)
        label = owner.removesuffix(".weight") or recorded.name
        ops.append(_op(label, [recorded], _temporary(recorded, kept, compute), samples))
    if run:
        ops.append(_merged(run, kept, samples, compute))
    if segment.late != OperationSizes():
        shared = Recorded("shared", "pointwise", saved=segment.late, fusible=True)
        ops.append(replace(_op("shared", [shared], OperationSizes(), samples), launches=0))
    return ops


def _temporary(recorded: Recorded, kept: set[int], compute: torch.dtype) -> OperationSizes:
    sizes = OperationSizes()
    for key, dtype, elements in recorded.outputs:
        if key not in kept:
            sizes.add(dtype, elements, compute)
    return sizes


def _merged(run: list[Recorded], kept: set[int], samples: int, compute: torch.dtype) -> Op:
    """Merge a run of pointwise ops; two consecutive ones have their results in memory together."""
    each = [_temporary(recorded, kept, compute) for recorded in run]
    most = max(
        (
            OperationSizes(a.narrow + b.narrow, a.fp32 + b.fp32, a.other_bytes + b.other_bytes)
            for a, b in zip([OperationSizes(), *each], each, strict=False)
        ),
        key=lambda size: 2 * size.narrow + 4 * size.fp32 + size.other_bytes,
    )
    names = [recorded.name for recorded in run]
    label = "+".join(names) if len(names) < 5 else f"{'+'.join(names[:3])}+{len(names) - 3} more"
    return _op(label, run, most, samples)


def _op(name: str, run: list[Recorded], temporary: OperationSizes, samples: int) -> Op:
    def share(number: int) -> int:
        return round(number / samples)

    facts = {key: value for key, value in run[0].facts.items() if key not in ("owner", "outputs_first")}
    if samples > 1:
        facts |= {"m": share(facts.get("m", 0)), "flops": facts.get("flops", 0.0) / samples}
    others = sum(recorded.moved.other_bytes for recorded in run)
    return Op(
        name,
        run[0].kind,
        moved=share(sum(recorded.moved.narrow for recorded in run)),
        moved_fp32=share(sum(recorded.moved.fp32 for recorded in run) + others // 4),
        launches=len(run),
        saved=share(sum(recorded.saved.narrow for recorded in run)),
        saved_fp32=share(sum(recorded.saved.fp32 for recorded in run)),
        saved_bytes=share(sum(recorded.saved.other_bytes for recorded in run)),
        temporary=share(temporary.narrow),
        temporary_fp32=share(temporary.fp32 + temporary.other_bytes // 4),
        tp_sharding=run[0].tp_sharding,
        fusible=run[0].fusible,
        **facts,
    )
