"""Hooks around PyTorch's own waits for other ranks. No collective is changed or added.

DDP waits at the end of its last backward, from the last gradient on, and where it broadcasts batch norm's buffers
before a forward. FSDP2 waits when it gathers a unit and when it reduces one: on a CPU in the calls themselves, on a GPU
where the compute stream waits. The copies into and out of the flat buffers count as waiting, too: without sharding
there would be none. ZeRO-1 waits where the optimizer broadcasts its updates. Waits that cannot be hooked are reported
by name, and their part is then not separated. Where gradients are not reduced there is nothing to hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.distributed.comm_timer import COMM_TIMER, EXPOSED_DP
from shardwise.measure.step_time.clock import EARLY
from shardwise.train.session import Session

DP = EXPOSED_DP
LEARN_STEPS = 2
"""Backwards to observe for the parameter whose gradient comes last."""
RECHECK = 53
"""Interval, in backwards, of repeated checks: a prime, to see every turn of an alternating model."""


class CommHooks:
    """Hooks around data-parallel traffic of one session. ``problem`` says why there are none.

    ``early`` counts the micro batches that reduced gradients before a step's last one, since it was last read.
    """

    def __init__(self, session: Session) -> None:
        self.problem = ""
        self.early = 0
        self._session = session
        self._undo: list[Callable[[], None]] = []
        self._last_early = 0
        outer = session.applied.outer
        if session.reduced_ranks == 1:
            return
        if session.applied.engine is not None:
            self.problem = f"{session.applied.engine.title} gathers and reduces inside its own calls"
        elif isinstance(outer, DistributedDataParallel):
            self._watch_ddp(outer)
            self._watch_zero1()
        else:
            self._watch_fsdp()

    @property
    def phase(self) -> str:
        """Phase of the session."""
        return self._session.phase

    def remove(self) -> None:
        """Remove all hooks."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def reduction(self) -> str:
        """Part that a reduction of gradients counts as now."""
        left = self._session.micros_left
        if not left:
            self._last_early = 0
            return DP
        if left != self._last_early:
            self.early += 1
            self._last_early = left
        return EARLY

    def _watch_ddp(self, outer: DistributedDataParallel) -> None:
        """Time from the last gradient to the end of backward.

        The first backwards show which is last.
        """
        parameters = [p for p in outer.parameters() if p.requires_grad]
        learner = _LastGradient(outer, parameters, self)
        self._undo.append(learner.remove)
        self._session.phase_watchers.append(learner.on_phase)
        self._undo.append(lambda: _discard(self._session.phase_watchers, learner.on_phase))
        if self._session.spec.batch_norms and not self._wrap(outer, "_sync_buffers", lambda: DP):
            self.problem = "this PyTorch's DDP sends buffers round elsewhere"

    def _watch_zero1(self) -> None:
        optimizer = self._session.optimizer
        if self._session.plan.parsed.base != "zero1":
            return
        if not self._wrap(optimizer, "_sync_params", lambda: DP):
            self.problem = "this PyTorch's ZeroRedundancyOptimizer sends its updates round elsewhere"

    def _watch_fsdp(self) -> None:
        gathers = ("wait_for_unshard",) if self._session.device.type == "cuda" else ("unshard", "wait_for_unshard")
        for group in fsdp_groups(self._session.applied.outer):
            found = [self._wrap(group, name, lambda: DP) for name in (*gathers, "finalize_backward")]
            found.append(self._wrap(group, "post_backward", self._reduces(group)))
            if not all(found):
                self.problem = "this PyTorch's FSDP2 gathers and reduces elsewhere"

    def _reduces(self, group: Any) -> Callable[[], str | None]:
        return lambda: self.reduction() if group.reduce_grads else None

    def _wrap(self, owner: Any, name: str, part: Callable[[], str | None]) -> bool:
        """Wrap the method ``name`` of one object; False if it has none."""
        plain, own = getattr(owner, name, None), name in vars(owner)
        if plain is None:
            return False

        def bracketed(*args: Any, **kwargs: Any) -> Any:
            now = part()
            if now is None or COMM_TIMER.listener is None:
                return plain(*args, **kwargs)
            COMM_TIMER.listener.enter(now)
            try:
                return plain(*args, **kwargs)
            finally:
                if COMM_TIMER.listener is not None:
                    COMM_TIMER.listener.leave()

        setattr(owner, name, bracketed)
        self._undo.append(lambda: setattr(owner, name, plain) if own else delattr(owner, name))
        return True


class _LastGradient:
    """Detect the last gradient of a backward that DDP synchronises.

    The first backwards show which one is last; every `RECHECK`-th checks it again.
    """

    def __init__(self, outer: DistributedDataParallel, parameters: list[nn.Parameter], comm_hooks: CommHooks) -> None:
        self._outer, self._comm_hooks, self._parameters = outer, comm_hooks, parameters
        self._seen: nn.Parameter | None = None
        self._last: nn.Parameter | None = None
        self._number = 0
        self._learners = [_hook(p, self._learn) for p in parameters]
        self._handle: Any = None

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._learners, self._handle):
            if handle is not None:
                handle.remove()
        self._learners, self._handle = [], None

    def on_phase(self, phase: str) -> None:
        """Begin another synchronised backward."""
        if not self._reduces():
            return
        self._number += 1
        if self._learners:
            self._compare()
            if self._number > LEARN_STEPS:
                self._conclude()
        elif self._number % RECHECK == 0:
            self._seen = None
            self._learners = [_hook(p, self._learn) for p in self._parameters]

    def _compare(self) -> None:
        """Evaluate the previous backward, if any."""
        if self._last is None:
            self._last = self._seen
        elif self._seen is not None and self._seen is not self._last:
            self._comm_hooks.problem = "the gradients of this model do not come in one order"

    def _conclude(self) -> None:
        """Stop observing all gradients, and hook only the last one."""
        for handle in self._learners:
            handle.remove()
        self._learners = []
        if self._handle is None and self._last is not None:
            self._handle = _hook(self._last, self._arrived)

    def _reduces(self) -> bool:
        """Return whether this is a step's reducing backward, and not one of the user's own."""
        return self._comm_hooks.phase == "backward" and self._outer.require_backward_grad_sync

    def _learn(self, parameter: nn.Parameter) -> None:
        if self._reduces():
            self._seen = parameter

    def _arrived(self, parameter: nn.Parameter) -> None:
        if COMM_TIMER.listener is not None and self._reduces():
            COMM_TIMER.listener.enter(self._comm_hooks.reduction())  # the end of backward, a new phase, ends it


def _hook(parameter: nn.Parameter, callback: Callable[[nn.Parameter], None]) -> Any:
    """Hook a parameter's gradient on its node in the graph, which DDP keeps.

    On the parameter itself there are only the user's hooks. Weak reference: DDP references the node where Python's
    collector cannot see it, and a session that is never closed would keep its model for ever.
    """
    weak, found = weakref.WeakMethod(callback), weakref.ref(parameter)

    def arrived(*gradients: Any) -> None:
        listener, parameter = weak(), found()
        if listener is not None and parameter is not None:
            listener(parameter)

    if not parameter.requires_grad:  # frozen since
        return None
    return torch.autograd.graph.get_gradient_edge(parameter).node.register_hook(arrived)


def fsdp_groups(outer: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups of each unit (one or several, by PyTorch version)."""
    for module in outer.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            one = getattr(state, "_fsdp_param_group", None)
            yield from (several if several is not None else [one] if one is not None else [])


def _discard(watchers: list[Callable[[str], None]], one: Callable[[str], None]) -> None:
    if one in watchers:
        watchers.remove(one)
