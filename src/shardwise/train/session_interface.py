"""`TrainingSession`: what a session's own parts (its steps, its checks, its checkpoints) ask of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.distributed.process_group import Ranks
from shardwise.optim.in_backward import InBackward
from shardwise.parallel.apply import Applied
from shardwise.plan.dims import MeshCoord
from shardwise.plan.plan import Plan
from shardwise.train.agreement import Agreement
from shardwise.train.data.position import Stream


class TrainingSession(Protocol):
    """See `shardwise.train.session.Session`, which is the one there is; its parts do not import it."""

    ranks: Ranks
    steps_done: int
    first_step: int
    in_step: bool
    micros_left: int
    scaler: torch.amp.GradScaler | None
    in_backward: InBackward | None

    @property
    def phase(self) -> str:
        """The phase of the step."""

    @phase.setter
    def phase(self, name: str) -> None:
        """The phase of the step."""

    @property
    def stream(self) -> Stream:
        """Position in the data."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""

    @property
    def place(self) -> MeshCoord:
        """Coordinates of this rank on the axes of the plan."""

    @property
    def reduced_ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""

    @property
    def applied(self) -> Applied:
        """The model under the plan."""

    @property
    def agreement(self) -> Agreement:
        """The message at the end of a step's last backward."""

    @property
    def module(self) -> nn.Module:
        """The user's module, without DDP around it."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that `prepare` returned."""

    def check_forward(self) -> None:
        """Refuse a loss that did not come through the prepared model under DDP."""

    def meet_before_backward(self) -> None:
        """Wait for the other ranks where their forwards may differ."""

    def begin_micro(self, *, last: bool, filler: bool = False) -> None:
        """Called before each micro batch."""

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Clip gradients to the global norm ``clip_norm``; returns the norm before, 0-d."""

    def finish_gradients(self) -> None:
        """Reduce what the model's own axes leave partial."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer other than the prepared one."""

    def notify(self, event: str, *args: Any) -> None:
        """Call ``event`` of every observer."""
