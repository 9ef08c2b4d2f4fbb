"""Call of a module on the inputs of a micro batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def call(module: nn.Module, inputs: Any) -> Any:
    """Call ``module`` on the inputs of a micro batch, in any container."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, list | tuple) else module(inputs)
