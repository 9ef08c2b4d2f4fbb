"""Parameters that had a gradient, and have none any more: a warning names them, and training goes on.

Legitimate code may use a parameter in some steps only (routed experts, dropped layers, heads by turns), or not at first
(an adapter whose other half is still zero). Only one that had a gradient in each of `CHECKS` checks on end, and then in
none of as many, is named; what has lost its gradient and got it back once is not looked at again, and what is frozen
begins anew. The experts of a layer (`experts.0.up`, `experts.1.up`) count as one: which of them have tokens is their
router's choice. A step in which nothing has a gradient (no labels, rewards that are all alike) says nothing of one
parameter; as many on end are told of all.
"""

from __future__ import annotations

import logging
import math
import re
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.distributed.control_message import Table
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
_EXPERT = re.compile(r"(?<![^.])((?:\w+_)?experts)\.[^.]*\d\.")


@dataclass
class _Seen:
    """Checks on end with a gradient, since then without; ``varies`` once it has come back."""

    had: int = 0
    lost: int = 0
    lost_at: int = 0
    varies: bool = False


@dataclass
class _Check:
    """Check of ``step``: what this rank has of each parameter, and the largest magnitudes that are still to come."""

    step: int
    found: dict[str, int]
    names: list[str]
    largest: torch.Tensor | None
    arrived: torch.cuda.Event | None = None

    def values(self) -> dict[str, int]:
        """Return for each parameter whether this rank's part of its gradient has a number other than zero."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers = [] if self.largest is None else self.largest.tolist()
        return self.found | {name: int(number != 0) for name, number in zip(self.names, numbers, strict=True)}


@dataclass
class LostGradients:
    """Observer on every rank; checks as often as ``share`` of the time allows, at the same steps on all.

    Magnitudes are read a step later, when the device has long computed them: nobody waits for it.
    """

    share: float = SHARE
    size: int = 1
    checks: int = 0
    spent_s: float = 0.0
    _names: list[str] = field(default_factory=list)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _check: _Check | None = None
    _empty: int = 0  # checks on end in which nothing had a gradient, since the step
    _empty_at: int = 0
    _unlogged: list[dict[str, Any]] = field(default_factory=list)
    _begun: float = 0.0
    _last_s: float = 0.0
    _least_s: float = math.inf  # of the collective: what it takes where no rank is late, who is waited for anyway
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
        """Judge the check of the step before; begin one, if all ranks have the time."""
        if self._check is None and not (self._due and self._names):
            return
        started, waited = time.perf_counter(), 0.0
        check, self._check = self._check, None
        if check is not None:
            waited = self._judge(check, session)
            self._least_s = min(self._least_s, waited)
        if self._due and self._names:
            self.checks += 1
            self._check = _begin(session.module, step.number)
        self._last_s = time.perf_counter() - started - waited + (self._least_s if waited else 0.0)
        self.spent_s += self._last_s

    def on_step_end(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Do nothing."""

    # sent with each step's message

    def post(self) -> list[int]:
        """Return whether there is time for a check."""
        gone = time.perf_counter() - self._begun if self._begun else 0.0
        return [int(not self.checks or self.share * gone >= self.spent_s + self._last_s)]

    def deliver(self, rows: Table) -> None:
        """Agree on whether this step has a check."""
        self._due = bool(rows[:, 0].all())

    def log_fields(self) -> dict[str, Any]:
        """Return what the next logged line says of parameters that were named since the last one, on rank 0."""
        named, self._unlogged = self._unlogged, []
        return {"lost_gradients": named} if named else {}

    def _judge(self, check: _Check, session: Session) -> float:
        """Put together what all ranks have found; name what is lost. Return the seconds of the collective."""
        mine = check.values()
        row = [mine.get(name, _NONE) for name in self._names]
        started = time.perf_counter()
        with COMM_TIMER.part("control"):
            rows = gather_largest(row, session.ranks)
        waited = time.perf_counter() - started
        found: dict[str, int] = {}
        for name, value in zip(self._names, rows, strict=True):
            key = _EXPERT.sub(r"\1.*.", name)
            found[key] = _SOME if _SOME in (value, found.get(key)) else max(value, found.get(key, _NONE))
        lost = self._lost(found, check.step)
        if lost and session.ranks.is_main:
            self._say(lost, check.step)
        return waited

    def _lost(self, found: dict[str, int], step: int) -> list[str]:
        """Take what a check has found of all parameters; return what is lost by now."""
        if _SOME in found.values():
            self._empty = 0
            return [name for name, value in found.items() if self._is_lost(name, value, step)]
        self._empty += 1
        self._empty_at = self._empty_at if self._empty > 1 else step
        if self._empty != CHECKS:
            return []
        lost = [name for name, one in self._seen.items() if one.had >= CHECKS and not one.lost]
        for name in lost:
            self._seen[name].lost_at, self._seen[name].varies = self._empty_at, True
        return lost

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
        self._unlogged.append({"parameters": lost, "since": one.lost_at})
        logging.getLogger("shardwise").warning(
            f"by step {step}, {names}: no gradient any more, on any rank (missing or all zero in {CHECKS} checks since "
            f"step {one.lost_at}; there was one in each of {one.had} checks before): the loss does not depend on "
            f"{'it' if len(lost) == 1 else 'them'} now. If that is not meant, look for a detach, a no_grad, a branch "
            "that is not taken any more, units that are always off, or gradients too small for their type"
        )


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    ownership = ownership_of(module)
    named = ((clean_name(name), p) for name, p in module.named_parameters())
    return {name if ownership is None else ownership.canonical(name): p for name, p in named}


def _begin(module: nn.Module, step: int) -> _Check:
    """Begin a check: by the largest magnitude of each gradient, as squares of small numbers are zero."""
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
    if not parts:
        return _Check(step, found, [], None)
    norms = torch._foreach_norm(list(parts.values()), math.inf)
    device = norms[0].device
    largest = torch.stack([norm.to(device) for norm in norms]).to("cpu", non_blocking=True)
    arrived = None
    if device.type == "cuda":
        arrived = torch.cuda.Event()
        arrived.record()
    return _Check(step, found, [*parts], largest, arrived)
