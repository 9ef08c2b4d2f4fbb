"""Parameters that had a gradient, and have none any more: a warning names them, and training goes on.

Legitimate code may use a parameter in some steps only (routed experts, dropped layers, heads by turns), or not at first
(an adapter whose other half is still zero). Only one that had a gradient in each of `CHECKS` checks on end, and then in
none of as many, is named; what has lost its gradient and got it back once is not looked at again, and what is frozen
begins anew.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.process_group import gather_largest
from shardwise.measure import state
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.train.session import Session
from shardwise.train.step import Step

SHARE = 0.001  # of a run's time, at most
CHECKS = 12
"""At any share of steps in which a parameter is unused at random, this happens once in 4¹² (16 million) parameters."""
_NAMED = 3
_NONE, _SOME, _FROZEN = 0, 1, 2  # the largest of all ranks counts


@dataclass
class _Seen:
    """Checks on end with a gradient, since then without; ``varies`` once it has come back."""

    had: int = 0
    lost: int = 0
    lost_at: int = 0
    varies: bool = False


@dataclass
class LostGradients:
    """Observer on every rank; checks as often as ``share`` of the time allows, at the same steps on all."""

    share: float = SHARE
    size: int = 1
    checks: int = 0
    spent_s: float = 0.0
    _names: list[str] = field(default_factory=list)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _begun: float = 0.0
    _last_s: float = 0.0
    _due: bool = False

    @classmethod
    def attach(cls, session: Session, share: float = SHARE) -> LostGradients:
        """Start observing ``session``."""
        one = cls(share)
        session.observers.append(one)
        session.header.append(one)
        return one

    def on_prepared(self, session: Session) -> None:
        """List the parameters; none where gradients are not there when they are whole: an engine, or in-backward."""
        if session.applied.engine is not None or session.plan.optimizer_in_backward:
            return
        ownership = ownership_of(session.module)
        self._names = [*dict.fromkeys(_named(session.module) if ownership is None else ownership.names)]

    def on_step_start(self, session: Session, step: Step) -> None:
        """Start the clock with the first step."""
        self._begun = self._begun or time.perf_counter()

    def on_gradients(self, session: Session, step: Step) -> None:
        """Look for parameters without a gradient on any rank, if all ranks have the time."""
        if not self._due or not self._names:
            return
        started = time.perf_counter()
        mine = _present(session.module)
        row = [mine.get(name, _NONE) for name in self._names]
        self._last_s = time.perf_counter() - started
        self.spent_s += self._last_s
        self.checks += 1
        with COMM_TIMER.part("control"):
            found = gather_largest(row, session.ranks)
        lost = [name for name, value in zip(self._names, found, strict=True) if self._is_lost(name, value, step.number)]
        if lost and session.ranks.is_main:
            self._say(lost, step.number)

    def on_step_end(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Do nothing."""

    # sent with each step's message

    def post(self) -> list[int]:
        """Return whether there is time for a check."""
        gone = time.perf_counter() - self._begun if self._begun else 0.0
        return [int(not self.checks or self.share * gone >= self.spent_s + self._last_s)]

    def deliver(self, rows: list[list[int]]) -> None:
        """Agree on whether this step has a check."""
        self._due = all(row[0] for row in rows)

    def _is_lost(self, name: str, value: int, step: int) -> bool:
        """Take what a check has found of a parameter; return whether it is lost by now."""
        if value == _FROZEN:
            self._seen.pop(name, None)
            return False
        one = self._seen.setdefault(name, _Seen())
        if value == _SOME:
            one.varies = one.varies or one.lost > 0
            one.had, one.lost = one.had + 1, 0
            return False
        if one.had < CHECKS or one.varies:
            one.had = 0
            return False
        one.lost += 1
        one.lost_at = one.lost_at if one.lost > 1 else step
        return one.lost == CHECKS

    def _say(self, lost: list[str], step: int) -> None:
        names = ", ".join(f"'{name}'" for name in lost[:_NAMED])
        names += f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        one = self._seen[lost[0]]
        first = one.lost_at
        logging.getLogger("shardwise").warning(
            f"by step {step}, {names}: no gradient any more, on any rank (missing or all zero in {CHECKS} checks since "
            f"step {first}; there was one in each of {one.had} checks before): the loss does not depend on "
            f"{'it' if len(lost) == 1 else 'them'} now. If that is not meant, look for a detach, a no_grad, a branch "
            "that is not taken any more, units that are always off, or gradients too small for their type"
        )


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    ownership = ownership_of(module)
    named = ((clean_name(name), p) for name, p in module.named_parameters())
    return {name if ownership is None else ownership.canonical(name): p for name, p in named}


def _present(module: nn.Module) -> dict[str, int]:
    """Return for each parameter whether this rank's part of its gradient has a number other than zero.

    By the largest magnitude, as squares of small numbers are zero. One wait for the device.
    """
    found: dict[str, int] = {}
    parts: dict[str, torch.Tensor] = {}
    for name, parameter in _named(module).items():
        gradient = parameter.grad
        found[name] = _NONE if parameter.requires_grad else _FROZEN
        if gradient is None or not parameter.requires_grad:
            continue
        part = state.local(gradient.detach())
        part = part._values() if part.is_sparse else part
        if part.numel():
            parts[name] = part
    if parts:
        norms = torch._foreach_norm(list(parts.values()), math.inf)
        largest = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist()
        found |= {name: int(number != 0) for name, number in zip(parts, largest, strict=True)}
    return found
