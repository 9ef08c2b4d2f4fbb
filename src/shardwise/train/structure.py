"""Detect parameters added to a model after `prepare`, which are neither reduced nor stepped."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch import nn

from shardwise.errors import ModelError
from shardwise.model.read import clean_name
from shardwise.train.session_interface import TrainingSession
from shardwise.train.step import Step


class StructureRecorder:
    """Observer that refuses a step with gradients of parameters that `prepare` has not seen.

    Parameters that are added and get no gradient (a frozen teacher, a copy for an average) are ignored. On a single
    rank, PyTorch's behaviour applies. While no module has got another child or parameter, a check costs a comparison
    each.
    """

    def __init__(self) -> None:
        self._holders: list[dict[str, Any]] = []
        self._seen: list[Any] = []
        self._trained: set[int] = set()
        self._frozen: list[nn.Parameter] = []
        self._watches = False

    def on_prepared(self, session: TrainingSession) -> None:
        """Record the structure of the model."""
        self._watches = session.ranks.world_size > 1 and session.applied.engine is None
        self._trained = {id(p) for p in session.module.parameters() if p.requires_grad}
        self._frozen = [p for p in session.module.parameters() if not p.requires_grad]
        parts = list(session.module.modules())
        self._holders = [holder for part in parts for holder in (part._modules, part._parameters)]
        self._seen = self._look()

    def on_gradients(self, session: TrainingSession, step: Step) -> None:
        """Check before the optimizer's step.

        Raises:
            ModelError: with the names of the parameters, and the fix.
        """
        if not self._watches or not self._is_other():
            return
        frozen = {id(p) for p in self._frozen}
        fresh = [
            clean_name(name)
            for name, p in session.module.named_parameters()
            if id(p) not in self._trained and (p.grad is not None or (id(p) in frozen and p.requires_grad))
        ]
        if fresh:
            more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
            raise ModelError(
                f"{', '.join(fresh[:3])}{more}: added, replaced or unfrozen after session.prepare, so that "
                f"{session.plan.strategy} neither reduces their gradients nor steps them; change the model before "
                "session.prepare, or in the middle of a run save, and load into a new session with the changed model"
            )

    def on_step_start(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def _look(self) -> list[Any]:
        """Return the children and the parameters of each module.

        FSDP2 has restored its shards by now.
        """
        return list(chain.from_iterable(holder.values() for holder in self._holders))

    def _is_other(self) -> bool:
        now = self._look()
        same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        return not same or any(p.requires_grad for p in self._frozen)
