"""Interface of a library that runs backward, reduction and update itself.

Plain PyTorch needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class EngineTensors:
    """Live tensors of an engine on this rank, without temporary ones.

    ``parameters`` are those that compute, ``masters`` the fp32 ones that the optimizer updates, ``states`` its own.
    ``gradients`` exist between the last backward and the update. Padding at the end of a shard is in the tensors
    and is given by ``padding`` (elements of parameters, masters, gradients and of each state alike).
    ``swapped`` are files on a drive with the data that are not in memory.
    """

    parameters: tuple[torch.Tensor, ...] = ()
    masters: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()
    states: tuple[torch.Tensor, ...] = ()
    padding: int = 0
    swapped: tuple[Path, ...] = field(default_factory=tuple)


class Engine(Protocol):
    """Engine around one model and its optimizer; every method but `local_tensors` is collective.

    ``title`` is its name in messages, ``base`` is the user's optimizer, and ``groups`` are the names of the
    parameters in each of its groups. It ``gathers`` if a forward needs the weights of all ranks.
    """

    title: str
    base: Optimizer
    groups: tuple[tuple[str, ...], ...]

    @property
    def gathers(self) -> bool:
        """Return whether a forward gathers weights that are sharded over ranks."""

    def shape(self, name: str) -> torch.Size:
        """Return the unsharded shape of a parameter."""

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's optimizer state: unsharded if it has its shape, else unchanged.

        Collective.
        """

    def make_states(
        self, groups: list[dict[str, torch.Tensor | None]], apart: dict[str, dict[str, torch.Tensor] | None]
    ) -> None:
        """Allocate the optimizer's state: keys by group, ``None`` for tensors, else the value.

        ``apart`` has the scalars of the parameters that differ, ``None`` for parameters that were never updated.
        """

    def set_state(self, name: str, key: str, full: torch.Tensor) -> None:
        """Write an unsharded tensor into a parameter's optimizer state."""

    def begin_micro(self, *, last: bool) -> None:
        """Prepare for the forward of a micro batch; the last one of a step ends the accumulation."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of an already normalised loss.

        The mean of its gradients over ranks is the gradient.
        """

    def update(self, clip_norm: float | None) -> float:
        """Clip, step and clear; return the gradient's global norm before clipping.

        It is not finite if the engine found the gradients not finite and left the weights unchanged.
        """

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return a parameter's full reduced gradient, fp32, before the update. Collective."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every unsharded parameter in the optimizer's precision, one at a time. Collective.

        The receiver owns each tensor.
        """

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's elements of each trained parameter in the optimizer's precision.

        None from a drive.
        """

    def set_weights(self, new: Callable[[str], torch.Tensor]) -> None:
        """Replace every parameter by an unsharded one, requested by name, one at a time. Collective."""

    def local_tensors(self) -> EngineTensors:
        """Return the tensors that are stored on this rank now."""

    def discard(self) -> None:
        """Discard the gradients of an interrupted step."""

    def close(self) -> None:
        """Release all resources."""


def engine_around(module: nn.Module) -> Engine | None:
    """Return the engine that contains a model; ``None`` if PyTorch runs it."""
    found: Engine | None = module.__dict__.get(_MARK)
    return found


def note_engine(module: nn.Module, engine: Engine | None) -> None:
    """Record the engine on the user's module, for callers that have only the module."""
    object.__setattr__(module, _MARK, engine)


_MARK = "_shardwise_engine"
