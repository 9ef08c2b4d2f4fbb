"""Detect operations that mix tokens, by the sizes of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_TOKEN_WISE = {"aten", "prim", "prims", "bitsandbytes", "torchao", "quantized"}  # others' may do anything
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
_ALONG = {
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort",
    "topk", "kthvalue", "median", "mean", "sum", "prod", "amax", "amin", "max", "min", "argmax", "argmin",
    "logsumexp", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "flip", "roll", "_fft_r2c",
    "_fft_c2r", "_fft_c2c", "gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add",
    "index_copy", "unbind", "select", "unfold", "cat",
}  # fmt: skip
_RESIZING = {"slice", "split", "split_with_sizes", "constant_pad_nd", "repeat", "narrow"}
_ALWAYS = ("attention", "lstm", "gru", "rnn", "pool", "reflection_pad", "replication_pad", "im2col", "upsample")
_SMALL = 256
_NORMS = ("batch_norm", "group_norm")
_DIMS = ("dim", "dims", "axis")


class Mixing(TorchDispatchMode):
    """Record, per running module, the first operation that combines tokens.

    ``length`` divides the size of no dim but those of tokens. Only floating-point tensors count: masks and positions
    are computed from integers. ``positions`` is a tensor for which any read is recorded. ``known``
    are tensors with values that are combined with ones without (weights, and their results): rows to look up, angles.
    """

    def __init__(self, length: int, positions: torch.Tensor | None) -> None:
        super().__init__()
        self.length = length
        self.positions = positions
        self.positions_read = False
        self.running: list[str] = []
        self.found: dict[str, str] = {}
        self.known: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.positions_read |= any(tensor is self.positions for tensor in tensors)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            self.known |= {_value(t) for t in tensors if not isinstance(t, FakeTensor) and t.dtype != torch.bool}
        marked = [tensor for tensor in tensors if tensor.is_floating_point() and self.dims(tensor)]
        if marked and self._mixes(func, args, kwargs or {}, marked, outputs):
            self.found.setdefault(self.running[-1] if self.running else "", func._overloadpacket.__name__)
        return outputs

    def dims(self, tensor: torch.Tensor) -> set[int]:
        """Return the token dims of ``tensor``."""
        return {dim for dim, size in enumerate(tensor.shape) if size and size % self.length == 0}

    def _mixes(self, func: Any, args: Any, kwargs: Any, marked: list[torch.Tensor], outputs: Any) -> bool:
        name = func._overloadpacket.__name__.removesuffix("_") or func._overloadpacket.__name__
        if func.namespace not in _TOKEN_WISE or any(part in name for part in _ALWAYS):
            return True
        if name in _PRODUCTS:
            left = args[_PRODUCTS[name]]
            return left.ndim - 1 in self.dims(left)
        if name in _ALONG:
            return self._along(func, args, kwargs, marked)
        if name in _RESIZING:
            return self._resized(marked[0], outputs)
        check: dict[str, Callable[[], bool]] = {
            "convolution": lambda: self._convolved(*args[:2]),
            "native_layer_norm": lambda: any(d >= args[0].ndim - len(args[1]) for d in self.dims(args[0])),
            "_fused_rms_norm": lambda: any(d >= args[0].ndim - len(args[1]) for d in self.dims(args[0])),
            "index": lambda: any(i is not None and d in self.dims(args[0]) for d, i in enumerate(args[1])),
        }
        if any(part in name for part in _NORMS):
            return True  # statistics over all dims but channels
        return name in check and check[name]()

    def _along(self, func: Any, args: Any, kwargs: Any, marked: list[torch.Tensor]) -> bool:
        """Return whether an operation's dims are token dims; all dims count if it names none."""
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given = next((named.get(key, defaults.get(key)) for key in _DIMS if key in named or key in defaults), None)
        for tensor in marked:
            dims = range(tensor.ndim) if given is None or given == [] else [given] if isinstance(given, int) else given
            if self.dims(tensor) & {dim % tensor.ndim for dim in dims}:
                return True
        return False

    def _resized(self, before: torch.Tensor, outputs: Any) -> bool:
        """Return whether a result has a different number of tokens in some dim."""
        after = [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        dims = self.dims(before)
        return any(part.ndim != before.ndim or any(part.shape[d] != before.shape[d] for d in dims) for part in after)

    def _convolved(self, tensor: torch.Tensor, weight: torch.Tensor) -> bool:
        return any(dim >= 2 and weight.shape[dim] > 1 for dim in self.dims(tensor))


def _value(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().double().flatten()
    return (*tensor.shape, *flat.tolist()) if flat.numel() <= _SMALL else (*tensor.shape, float(flat.nansum()))
