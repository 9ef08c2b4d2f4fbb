"""What every checkpoint looks like to whoever reads it, whichever tool wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

import torch

from shardwise.checkpoint.layout import Box


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and the whole shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def whole(self) -> Box:
        """All of it."""
        return Box((0,) * len(self.shape), self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.whole.numel * self.dtype.itemsize


@runtime_checkable
class Source(Protocol):
    """Tensors by name, read a part at a time; a context manager."""

    @property
    def kind(self) -> str:
        """What it is, in words (``PyTorch DCP folder``)."""
        ...

    @property
    def place(self) -> str:
        """Where it is, as the user wrote it."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names as in Shardwise's own manifests: ``model/<fqn>`` for weights and buffers, ``optimizer/<fqn>/<key>``
        (``exp_avg``, ``exp_avg_sq``, ``step``) for state that is kept by name.
        """
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied tensors, each to the name under which the one copy is in ``tensors``."""
        ...

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """Class name, groups and scalars as `OptimizerEntry` has them, as JSON; ``None`` where unknown."""
        ...

    @property
    def step(self) -> int | None:
        """Optimizer steps done; ``None`` where unknown."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is there and is not among ``tensors``, one sentence each, to be said aloud."""
        ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of ``box``, a contiguous CPU tensor of shape ``box.lengths``.

        Needs memory for the tensor at most. Safe to call from several threads.

        Raises:
            CheckpointError: a file is missing, truncated or damaged; names the file and the tensor.
        """
        ...

    def __enter__(self) -> Self:
        """The source itself."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Let go of the files."""
        ...


class WeightsOnly:
    """The members of a `Source` that holds weights alone and nothing open.

    A reader adds ``kind``, ``place``, ``tensors`` and `Source.read`, and sets the others where it has something to say.
    """

    kind: str
    aliases: Mapping[str, str] = MappingProxyType({})
    optimizer: Mapping[str, Any] | None = None
    step: int | None = None
    notes: Sequence[str] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is open."""
