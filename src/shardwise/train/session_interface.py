"""`TrainingSession`: interface of a session for its own parts (steps, checks, checkpoints)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.distributed.control_message import Table
from shardwise.distributed.process_group import Ranks
from shardwise.optim.in_backward import InBackward
from shardwise.parallel.apply import Applied
from shardwise.plan.dims import MeshCoord
from shardwise.plan.plan import Plan
from shardwise.train.agreement import Agreement
from shardwise.train.data.position import Stream


class StepHeader(Protocol):
    """Integers sent with the message at the start of every step."""

    @property
    def size(self) -> int:
        """Number of integers."""

    def post(self) -> list[int]:
        """Return this rank's integers."""

    def deliver(self, rows: Table) -> None:
        """Receive the integers of all ranks: [ranks, size], in rank order."""


class Timekeeper(Protocol):
    """Recorder of the time that steps take."""

    def timing(self) -> Any:
        """`shardwise.measure.step_time.timing.Timing` so far.

        ``None`` before the second step, and off rank 0.
        """

    def detach(self) -> None:
        """Stop timing; recorded times stay."""


class TrainingSession(Protocol):
    """Interface of `shardwise.train.session.Session`, which its parts cannot import."""

    ranks: Ranks
    steps_done: int
    first_step: int
    in_step: bool
    stopped: bool
    stopped_by: int
    micros_left: int
    scaler: torch.amp.GradScaler | None
    in_backward: InBackward | None
    nonfinite_file: Path | None

    @property
    def phase(self) -> str:
        """Phase of the step."""

    @phase.setter
    def phase(self, name: str) -> None:
        """Phase of the step."""

    @property
    def stream(self) -> Stream:
        """Position in the data."""

    @property
    def device(self) -> torch.device:
        """Device of this rank."""

    @property
    def plan(self) -> Plan:
        """Plan in force."""

    @property
    def place(self) -> MeshCoord:
        """Coordinates of this rank on the axes of the plan."""

    @property
    def reduced_ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""

    @property
    def applied(self) -> Applied:
        """Model under the plan."""

    @property
    def agreement(self) -> Agreement:
        """Message at the end of a step's last backward."""

    @property
    def module(self) -> nn.Module:
        """User's module, without DDP around it."""

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer that `prepare` returned."""

    def sync_rng_state(self) -> None:
        """Give a tensor-parallel group one RNG state. Collective."""

    def pass_ended(self) -> bool:
        """Whether no step is left of the current pass; collective."""

    def check_forward(self) -> None:
        """Refuse a loss that did not come through the prepared model under DDP."""

    def meet_before_backward(self) -> None:
        """Wait for the other ranks where their forwards may differ."""

    def begin_micro(self, *, last: bool, padding: bool = False) -> None:
        """Called before each micro batch."""

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Clip gradients to the global norm ``clip_norm``; returns the norm before, 0-d."""

    def finish_gradients(self) -> None:
        """Reduce what the model's own axes leave partial."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer other than the prepared one."""

    def notify(self, event: str, *args: Any) -> None:
        """Call ``event`` of every observer."""
