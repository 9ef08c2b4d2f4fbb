"""Types of parameters, gradients and optimizer state, compared with the plan after each step.

For plans that store or reduce anything in bf16. Looking at a type costs nothing; a wrong one is sent with the message
that starts the next step, so that all ranks stop. Types on the wire are judged by the effects receipt of the second
step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.distributed.control_message import Table
from shardwise.errors import ReceiptError
from shardwise.model.read import clean_name, dtype_name
from shardwise.plan.plan import Plan
from shardwise.plan.stored_types import gradient_dtype, state_dtype, stored_dtype, stores_low
from shardwise.train.session import Session
from shardwise.train.step import Step

KINDS = {"parameter": stored_dtype, "gradient": gradient_dtype, "optimizer state": state_dtype}


@dataclass
class DtypeRecorder:
    """Observer on every rank; ``steps`` counts those that were checked."""

    size: int = 1
    steps: int = 0
    _plan: Plan | None = None
    _planned: list[tuple[nn.Parameter, tuple[torch.dtype, ...]]] = field(default_factory=list)
    _wrong: int = 0

    @classmethod
    def attach(cls, session: Session) -> DtypeRecorder:
        """Start observing ``session``."""
        one = cls()
        session.observers.append(one)
        session.header.append(one)
        return one

    def on_prepared(self, session: Session) -> None:
        """Note the planned types of each parameter's tensors."""
        plan = session.plan
        if not stores_low(plan):
            return
        known = {name: p.dtype for p in session.spec.parameters for name in (p.name, *p.aliases)}
        self._plan = plan
        for name, parameter in session.module.named_parameters():
            dtype = known.get(clean_name(name))
            if dtype is not None:
                planned = tuple(getattr(torch, kind(plan, dtype)) for kind in KINDS.values())
                self._planned.append((parameter, planned))

    def on_step_start(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_gradients(self, session: Session, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: Session, step: Step) -> None:
        """Compare the types, while gradients exist."""
        state = getattr(session.optimizer, "optim", session.optimizer).state
        for parameter, planned in self._planned:
            found = [{parameter.dtype}, set() if parameter.grad is None else {parameter.grad.dtype}]
            values = state[parameter].values() if parameter in state else ()
            found.append({one.dtype for one in values if isinstance(one, torch.Tensor) and one.ndim})
            for at, (kinds, dtype) in enumerate(zip(found, planned, strict=True)):
                if not self._wrong and kinds - {dtype}:
                    self._wrong = _packed(at, dtype, next(iter(kinds - {dtype})), step.number)
        self.steps += bool(self._planned)

    def on_step_abandoned(self, session: Session, step: Step) -> None:
        """Do nothing."""

    # sent with each step's message

    def post(self) -> list[int]:
        """Return what was wrong after the last step; 0 if nothing."""
        return [self._wrong]

    def deliver(self, rows: Table) -> None:
        """Stop all ranks if a type is wrong on any.

        Raises:
            ReceiptError: with the kind of tensor, both types, the step and the rank.
        """
        if rows.any():
            rank = int((rows[:, 0] != 0).argmax())
            kind, planned, found, step = _unpacked(int(rows[rank, 0]))
            raise ReceiptError(
                f"effects: {kind} dtype: planned {planned}, found {found} after step {step} (rank {rank})"
            )


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _number(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def _packed(kind: int, planned: torch.dtype, found: torch.dtype, step: int) -> int:
    return ((step * 8 + _number(found)) * 8 + _number(planned)) * 8 + kind + 1


def _unpacked(code: int) -> tuple[str, str, str, int]:
    names = [*map(dtype_name, _DTYPES), "another type"]
    code, kind = divmod(code, 8)
    code, planned = divmod(code, 8)
    step, found = divmod(code, 8)
    return [*KINDS][kind - 1], names[planned], names[found], step
