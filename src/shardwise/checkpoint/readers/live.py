"""Read the tensors of a module in memory as a `Source`, for weights without a file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.readers.reader import TensorInfo, WeightsOnly

_PREFIX = "model/"


class LiveSource(WeightsOnly):
    """Parameters and persistent buffers of a plain module on the CPU, as a `Source`; ``place`` is what it is called."""

    def __init__(self, module: nn.Module, place: str) -> None:
        self.kind = "model in memory"
        self.place = place
        self._tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                continue
            if id(value) in first:
                aliases[f"{_PREFIX}{name}"] = first[id(value)]
                continue
            first[id(value)] = f"{_PREFIX}{name}"
            self._tensors[f"{_PREFIX}{name}"] = value.detach()
        self.aliases: Mapping[str, str] = aliases
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def __exit__(self, *exc: object) -> None:
        self._tensors = {}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        place = tuple(slice(start, start + count) for start, count in zip(box.offsets, box.lengths, strict=True))
        return self._tensors[name][place].contiguous()
