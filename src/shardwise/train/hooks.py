"""Gradient hooks of users (``register_hook``), with the same meaning as in one process.

Autograd would call them on one rank's share of one micro batch, which is right for a mask and wrong for a clip, and
FSDP2 would not call them. Here each is called once per step, on the full gradient of the global batch, before
clipping by the norm; the optimizer sees its result, the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.distributed.control_message import Table
from shardwise.distributed.process_group import Ranks, gather_text
from shardwise.errors import ModelError, UserError
from shardwise.model.read import clean_name
from shardwise.parallel.ownership import ownership_of
from shardwise.plan.plan import Plan
from shardwise.train.session_interface import TrainingSession
from shardwise.train.step import Step

_Hooks = dict[int, Any]  # torch's own, by the id of a handle, which removes from it
_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"


class ParameterHooks:
    """Observer and `StepHeader` that takes hooks off parameters and calls them on full gradients.

    ``model`` is the argument of `Session.prepare`, untouched. Hooks that are registered later are taken when the next
    step begins; one that the plan cannot call is refused then, on all ranks.

    Raises:
        ModelError: a hook that the plan cannot call, by the parameter's name.
    """

    size = 1

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._found = {
            clean_name(name): (getattr(p, _BEFORE), getattr(p, _AFTER))
            for name, p in model.named_parameters()
            if p.requires_grad and (getattr(p, _BEFORE) or getattr(p, _AFTER))
        }
        self._plan = plan
        self._takes = plan.parsed.engine == "torch" and not plan.optimizer_in_backward
        self._takes_after = self._takes and _keeps_full(plan)
        self._named: list[tuple[str, nn.Parameter]] = []
        self._before: dict[str, list[_Hooks]] = {}
        self._after: dict[str, list[_Hooks]] = {}
        self._peers: list[int] = []
        self._ranks: Ranks | None = None
        self._own: set[int] = set()  # ids of hooks that the library and DeepSpeed have registered
        _check(self._found, plan)

    def on_prepared(self, session: TrainingSession) -> None:
        """Transfer hooks from the original parameters to the trained ones."""
        ownership = ownership_of(session.module)
        for name, parameter in session.module.named_parameters():
            name = clean_name(name) if ownership is None else ownership.canonical(clean_name(name))
            if parameter.requires_grad:
                self._named.append((name, parameter))
                before, after = self._found.get(name, (None, None))
                self._keep(self._before, name, before)
                self._keep(self._after, name, after)
        self._peers = [*range(session.ranks.world_size)] if ownership is None else [*ownership.ranks]
        self._ranks = session.ranks
        self._own = {number for _, parameter in self._named for number in parameter._post_accumulate_grad_hooks or ()}
        self._take()

    def post(self) -> list[int]:
        """Encode which parameters have hooks as one number, so that all ranks gather them.

        It is negative if one has a hook that the plan cannot call.
        """
        self._take()
        if self._late():
            return [-1]
        return [zlib.crc32(repr(sorted([*_active(self._before), "", *_active(self._after)])).encode())]

    def deliver(self, rows: Table) -> None:
        """Refuse, on all ranks, hooks missing on some rank, and late ones that the plan cannot call.

        Raises:
            ModelError: with the parameters that have hooks here.
        """
        if (rows < 0).any():
            late = next(iter(self._late().items()), ("", (None, None)))
            texts = gather_text(f"{late[0]} {int(bool(late[1][1]))}" if late[0] else "", _known(self._ranks))
            name, _, after = next(text for text in texts if text).partition(" ")
            _check({name: ({}, {0: None} if after == "1" else {})}, self._plan)
        if len(rows) > 1 and (rows[self._peers] != rows[self._peers[0]]).any():
            here = sorted({*_active(self._before), *_active(self._after)})
            raise ModelError(
                f"hooks on parameters differ between ranks (here: {', '.join(here[:3]) or 'none'}), and ranks would "
                "continue with different weights; register the same hooks on every rank"
            )

    def on_gradients(self, session: TrainingSession, step: Step) -> None:
        """Call each hook on the full gradient; random numbers are the same on all ranks."""
        _check(self._late(), self._plan)
        late = [name for name, parameter in self._named if parameter._backward_hooks]
        if late:
            raise ModelError(
                f"{', '.join(late[:3])}: a hook was registered in the middle of step {step.number}, and saw one rank's "
                "gradient; register it between two steps"
            )
        if not (self._before or self._after):
            return
        with torch.no_grad(), torch.random.fork_rng(devices=_gpus(session.device)):
            torch.manual_seed(step.number)
            for name, parameter in self._named:
                if parameter.grad is not None and self._before.get(name):
                    _change(name, parameter.grad, _called(self._before[name]))
                if parameter.grad is not None:
                    for hook in _called(self._after.get(name, [])):
                        hook(parameter)

    def on_step_start(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_end(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def on_step_abandoned(self, session: TrainingSession, step: Step) -> None:
        """Do nothing."""

    def _take(self) -> None:
        """Take the hooks off the parameters; existing handles still remove from an empty dict."""
        for name, parameter in self._named if self._takes else ():
            if parameter._backward_hooks:
                self._keep(self._before, name, parameter._backward_hooks)
                parameter._backward_hooks = None
            if parameter._post_accumulate_grad_hooks and self._takes_after:
                self._keep(self._after, name, parameter._post_accumulate_grad_hooks)
                parameter._post_accumulate_grad_hooks = type(parameter._post_accumulate_grad_hooks)()

    def _late(self) -> dict[str, tuple[_Hooks | None, _Hooks | None]]:
        """Return parameters that got a hook since `prepare` which the plan cannot call."""
        found: dict[str, tuple[_Hooks | None, _Hooks | None]] = {}
        for name, parameter in self._named:
            before = None if self._takes else parameter._backward_hooks
            after = None if self._takes_after else parameter._post_accumulate_grad_hooks
            mine = {number: hook for number, hook in after.items() if number not in self._own} if after else None
            if before or mine:
                found[name] = before, mine
        return found

    @staticmethod
    def _keep(kept: dict[str, list[_Hooks]], name: str, hooks: _Hooks | None) -> None:
        if hooks and not any(hooks is one for one in kept.get(name, [])):
            kept.setdefault(name, []).append(hooks)


def _check(found: dict[str, tuple[_Hooks | None, _Hooks | None]], plan: Plan) -> None:
    both, after = list(found), [name for name, (_, hooks) in found.items() if hooks]
    if plan.parsed.engine == "deepspeed" and both:
        raise ModelError(
            f"{_some(both)} a hook, and {plan.strategy} reduces gradients by its own hooks before the user's "
            "hook could see the full gradient; remove it, or use fsdp or ddp"
        )
    if plan.optimizer_in_backward and both:
        raise ModelError(
            f"{_some(both)} a hook, and optimizer_in_backward steps a parameter before the hook could be called on "
            "the full gradient; set it to False, or remove the hook"
        )
    if after and not _keeps_full(plan):
        raise ModelError(
            f"{_some(after)} a hook of register_post_accumulate_grad_hook, which expects the full parameter, but "
            f"{plan.strategy} has a shard of it; change the gradient by register_hook, or use ddp"
        )


def _keeps_full(plan: Plan) -> bool:
    """Return whether each rank has full parameters and full gradients when it steps."""
    return plan.parsed.base in ("ddp", "zero1") and plan.dims.tp * plan.dims.pp == 1


def _known(ranks: Ranks | None) -> Ranks:
    assert ranks is not None
    return ranks


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(repr(name) for name in names[:3])}{more} {'has' if len(names) == 1 else 'have'}"


def _active(kept: dict[str, list[_Hooks]]) -> Iterator[str]:
    return (name for name, hooks in kept.items() if any(hooks))


def _called(kept: Iterable[_Hooks]) -> list[Any]:
    return [hook for hooks in kept for hook in hooks.values()]


def _gpus(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _change(name: str, gradient: torch.Tensor, hooks: list[Any]) -> None:
    """Replace ``gradient`` by the result of ``hooks`` on the full gradient.

    Collective if it is sharded.
    """
    if not hooks:
        return
    full = given = _gathered(gradient) if isinstance(gradient, DTensor) else gradient
    for hook in hooks:
        result = hook(full)
        full = full if result is None else result
    if full.shape != given.shape:
        raise UserError(
            f"a hook of '{name}' returned shape {tuple(full.shape)} for a gradient of {tuple(given.shape)}; "
            "return a tensor of the same shape, or None"
        )
    if not isinstance(gradient, DTensor):
        if full is not gradient:
            gradient.copy_(full)
        return
    mesh, local = gradient.device_mesh, gradient.to_local()
    shard = distribute_tensor(full.contiguous(), mesh, gradient.placements, src_data_rank=None)
    local.copy_(shard.to_local())


def _gathered(gradient: DTensor) -> torch.Tensor:
    """Return the full gradient on the mesh's device, also if it is stored in CPU memory."""
    mesh, local = gradient.device_mesh, gradient.to_local()
    here = local.to(mesh.device_type)
    if here is not local:
        gradient = DTensor.from_local(
            here, mesh, gradient.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
    return gradient.full_tensor()
