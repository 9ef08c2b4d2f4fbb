"""Models that cast parts of their work to fp32 on purpose, kept in float64 for a comparison to the last digits."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CASTS = ("to", "type", "softmax", "log_softmax", "sum", "cumsum", "_to")


class Float64(TorchFunctionMode):
    """Inside, what would make fp32 of a float64 tensor leaves it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            name = getattr(func, "__name__", "")
            if name == "float":
                return args[0]
            if name in _CASTS:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
