"""Grouped products of experts on fake tensors, in every dtype that the real ones know."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give a grouped product on fake tensors its shape; enter it inside of ``FakeTensorMode``.

    torch's own rule for fake tensors refuses fp32, which its kernels compute, and prints a traceback as it does.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; a grouped product is an empty tensor."""
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        rows, matrices, *more = args
        ends: Any = (kwargs or {}).get("offs", more[0] if more else None)
        groups = (len(ends),) if rows.ndim == matrices.ndim == 2 else ()  # the gradient of the groups' matrices
        return rows.new_empty((*groups, rows.shape[-2], matrices.shape[-1]))
