"""What a session asks of a library that does backward, reduction and update itself; PyTorch's way has none."""

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
    """The live tensors of an engine on this rank, each list without what is there only in passing.

    ``parameters`` are those that compute, ``masters`` the fp32 ones that the optimizer updates, ``states`` its own.
    ``gradients`` are there between the last backward and the update. Padding at the end of a shard is in the tensors
    and is told by ``padding`` (elements of parameters, masters, gradients and of each state alike).
    ``swapped`` are files on a drive that hold what is not in memory.
    """

    parameters: tuple[torch.Tensor, ...] = ()
    masters: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()
    states: tuple[torch.Tensor, ...] = ()
    padding: int = 0
    swapped: tuple[Path, ...] = field(default_factory=tuple)


class Engine(Protocol):
    """An engine around one model and its optimizer; every method but `held` is called on all ranks alike.

    ``title`` is its name in messages, ``base`` is the user's optimizer, and ``groups`` are the names of the
    parameters that each of its groups stands for. It ``gathers`` where a forward needs the weights of all ranks.
    """

    title: str
    base: Optimizer
    groups: tuple[tuple[str, ...], ...]

    @property
    def gathers(self) -> bool:
        """Whether a forward brings weights together that ranks hold in parts."""

    def shape(self, name: str) -> torch.Size:
        """The whole shape of a parameter."""

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """The optimizer's state of a parameter: whole where it has the parameter's shape, else as it is. Collective."""

    def make_states(
        self, groups: list[dict[str, torch.Tensor | None]], apart: dict[str, dict[str, torch.Tensor] | None]
    ) -> None:
        """Room for the optimizer's state: keys by group, ``None`` for what is a tensor, else its value.

        ``apart`` has those values of the parameters that have other ones, ``None`` for what never had an update.
        """

    def set_state(self, name: str, key: str, whole: torch.Tensor) -> None:
        """Put a whole tensor into the optimizer's state of a parameter."""

    def begin_micro(self, *, last: bool) -> None:
        """Before the forward of a micro batch; the last one of a step ends the accumulation."""

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss that is normalised already: the mean over ranks of its gradients is the gradient."""

    def update(self, clip_norm: float | None) -> float:
        """Clip, step and clear; returns the gradient's global norm before clipping.

        It is not finite where the engine has found that the gradients are not, and has left the weights alone.
        """

    def gradient(self, name: str) -> torch.Tensor | None:
        """The whole reduced gradient of a parameter, fp32, between the last backward and the update. Collective."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter as the optimizer has it (fp32 where it computes in less), whole, one at a time. Collective.

        What is yielded is the receiver's own.
        """

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's elements of each trained parameter as the optimizer has them; none of what lies on a drive."""

    def set_weights(self, new: Callable[[str], torch.Tensor]) -> None:
        """Replace every parameter by a whole one, asked for by name, one at a time. Collective."""

    def held(self) -> EngineTensors:
        """What is on this rank now."""

    def discard(self) -> None:
        """Throw away the gradients of a step that was left."""

    def close(self) -> None:
        """Let go of everything."""


def engine_around(module: nn.Module) -> Engine | None:
    """The engine that a model is in; ``None`` where PyTorch runs it."""
    found: Engine | None = module.__dict__.get(_MARK)
    return found


def note_engine(module: nn.Module, engine: Engine | None) -> None:
    """Note the engine on the user's module, for those who are given only that."""
    object.__setattr__(module, _MARK, engine)


_MARK = "_shardwise_engine"
