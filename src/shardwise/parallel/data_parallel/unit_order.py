"""One order of gathers and reductions for all ranks, whichever units a rank's samples enter.

FSDP2 gathers a unit when its forward begins, and reduces the parameters that have a gradient on this rank.
Where a model branches on its samples (routed experts, branches by modality, early exit, layer drop), ranks would gather
different units, or reduce different parameters, in the same collective: a hang, an abort, or, where sizes agree,
gradients of different parameters silently added to each other.

Here every rank follows one order of units. It is agreed on in the first forward (one small message for each unit) and
needs no message afterwards: a rank that skips a unit still gathers and frees it, in forward and in backward, and
a missing gradient counts as zero. The order of reductions is compared at the end of each step.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import ModelError, UserError
from shardwise.model.read import clean_name
from shardwise.parallel.data_parallel.left_gathered import LeftGathered
from shardwise.parallel.data_parallel.unit_forwards import (
    FsdpUnit,
    OrderEntry,
    Pass,
    UnitForward,
    View,
    backward_runs,
    free_gathered,
    has_gradient,
    left_order,
    needs_gradient,
    outside,
    refuse_changed,
    units_of,
    views_in,
    with_named_error,
)
from shardwise.parallel.data_parallel.unit_stand_in import run_on_zeros

_MARK = "_shardwise_unit_order"
CUT_OFF = (
    "the backward before this forward raised, and left some gradients unreduced, which would be added to the next; "
    "leave the loop and go on with a new session.steps(...), which discards them"
)


class UnitOrder:
    """Keep the units inside the sharded ``root`` in one order on all ranks of ``mesh``.

    ``pipelined``: micro batches interleave, so a unit's forwards and backwards do not nest.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, *, pipelined: bool = False) -> None:
        self.units = units_of(root)
        self._pipelined = pipelined
        self._groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self._device = torch.device(mesh.device_type)
        self._orders: dict[bool, list[OrderEntry]] = {}
        self._now: Pass | None = None
        self._active: Pass | None = None
        self._ended: list[Pass] = []  # forwards whose backward has not ended
        self._follows_flags = False
        self._skipped = ""
        self._passes = 0
        self._finishing = False
        self._events: list[tuple[int, int]] = []
        self._filled: Counter[Any] = Counter()
        self._given: set[Any] | None = None  # parameters that had a gradient before the padding micro batches
        self._stray: list[Any] = []
        self._in_step = False
        self._views: list[View] = []  # returned by units
        self.left: list[str] = []  # units that this rank has run in this step although other ranks do not follow
        self.skipped: Counter[str] = Counter()  # units gathered for other ranks in this step
        self._nodes: list[Any] = []
        for unit in self.units:
            self._patch(unit)
            if unit.module is not root:
                unit.module.register_forward_pre_hook(functools.partial(self._enter, unit), prepend=True)
        if isinstance(root, FSDPModule):
            state = root._get_fsdp_state()
            if state._fsdp_param_group is None:  # all weights are in blocks
                self._patch_end(state)
            self._patch_root(state)
        root.forward = functools.wraps(root.forward)(functools.partial(with_named_error, root.forward))
        root.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's own hooks, which gather and free
        root.register_forward_hook(self._end, prepend=True)
        own = next((unit for unit in self.units if unit.module is root), None)
        self._left_gathered = LeftGathered(root, self.units, self._is_idle)
        if own is not None:
            for module in {id(p._module_info.module): p._module_info.module for p in own.group.fsdp_params}.values():
                if module is not root:
                    module.register_forward_pre_hook(functools.partial(self._check_gathered, own))

    def begin_step(self) -> None:
        """Reset the state of the previous step, also of one that was interrupted."""
        self._free_cut()
        self._now = self._active = None
        self._ended.clear()
        self._events.clear()
        self._given = None
        self._stray.clear()
        self._filled.clear()
        self.left.clear()
        self.skipped.clear()
        self._views.clear()
        self._in_step = True
        for unit in self.units:
            unit.open, unit.reduced, unit.reductions = 0, False, 0

    def end_step(self, *, done: bool = True) -> None:
        """Stop reporting units that left the order; what one that was not ``done`` left gathered is freed later."""
        self._in_step = False
        if not done:
            self._now = self._active = None
            self._ended.clear()
            self._left_gathered.left = True

    def check_views(self) -> None:
        """Check views before a backward; autograd misses a unit whose view was changed in place."""
        views, self._views = self._views, []
        refuse_changed(views)

    def digest(self) -> int:
        """Hash the reductions of this step, in order, to 32 bits."""
        return zlib.crc32(repr(self._events).encode())

    def reductions(self) -> list[str]:
        """List the units reduced in this step, in order, with the parameters that had no gradient."""
        found = []
        for index, mask in self._events:
            params = self.units[index].group.fsdp_params
            names = [
                str(p._param_fqn) for at, p in enumerate(params) if p.sharded_param.requires_grad and not mask >> at & 1
            ]
            without = f" without {', '.join(map(clean_name, names[:2]))}" if names else ""
            found.append(f"{self.units[index].name or 'the root'}{without}")
        return found

    def without_gradient(self) -> list[nn.Parameter]:
        """Return the parameters for which this rank contributed only zeros in this step."""
        if self._given is not None:
            return [p.sharded_param for p in self._fsdp_params() if p not in self._given]
        if not self._filled:
            return []
        times = {id(fsdp_param): unit.reductions for unit in self.units for fsdp_param in unit.group.fsdp_params}
        return [
            fsdp_param.sharded_param for fsdp_param, number in self._filled.items() if number == times[id(fsdp_param)]
        ]

    def before_padding(self) -> None:
        """Mark the start of padding micro batches; gradients from them alone count as missing."""
        if self._given is None:
            self._given = {p for p in self._fsdp_params() if has_gradient(p)}

    def strays(self) -> list[str]:
        """Return names of sharded parameters reached directly; their gradients are not reduced."""
        return sorted({clean_name(str(p._param_fqn)) for p in self._stray})  # FSDP2 names them in the first forward

    def watch_strays(self) -> None:
        """Detect gradients that bypass FSDP2, once it has created its parameters."""
        if self._nodes:
            return
        for p in self._fsdp_params():
            node = torch.autograd.graph.get_gradient_edge(p.sharded_param).node
            node.register_hook(lambda *_, p=p: self._stray.append(p))
            self._nodes.append(node)

    def _fsdp_params(self) -> list[Any]:
        return [p for unit in self.units for p in unit.group.fsdp_params if p.sharded_param.requires_grad]

    def _patch(self, unit: FsdpUnit) -> None:
        """Hook FSDP2's operations on a unit."""
        state, group = unit.state, unit.group
        register_post, register_pre = group._register_post_backward_hook, state._register_pre_backward_hook

        def registers_post(args: Any, kwargs: Any) -> Any:
            found = register_post(args, kwargs)
            wraps = found[0] is not args or found[1] is not kwargs  # inputs that need a gradient
            if wraps and not backward_runs():  # a recomputed forward has no backward of its own
                unit.open += 1
                if unit.entry is not None:
                    unit.entry.defers = False
            return found

        def registers_pre(output: Any) -> Any:
            now, entry = self._now, unit.entry
            if now is None or entry is None or not now.has_backward:
                return register_pre(output)
            entry.backs = needs_gradient(output) or (entry.planned is not None and entry.planned.backs)
            unit.open += int(entry.backs and entry.defers)
            self._views += views_in(unit, output)
            state._pre_backward = functools.partial(self._reach, now, entry)  # FSDP2 hooks it to the outputs
            try:
                return register_pre(output)
            finally:
                del state._pre_backward

        group._register_post_backward_hook = registers_post
        state._register_pre_backward_hook = registers_pre
        group.post_backward = functools.partial(self._post_backward, unit, group.post_backward)
        self._patch_end(state)

    def _patch_end(self, state: Any) -> None:
        plain = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(self._finish, plain)

    def _patch_root(self, state: Any) -> None:
        """Hook the gradient of the root's output, which identifies the forward of a backward."""
        register_pre = state._register_pre_backward_hook

        def registers_pre(output: Any) -> Any:
            if not self._ended or backward_runs():
                return register_pre(output)
            state._pre_backward = functools.partial(self._reach_root, state, self._ended[-1])
            try:
                return register_pre(output)
            finally:
                del state._pre_backward

        state._register_pre_backward_hook = registers_pre

    def _begin(self, module: nn.Module, args: Any) -> None:
        if backward_runs():
            return
        trains = torch.is_grad_enabled()
        if trains and any(u.state._state_ctx.post_backward_final_callback_queued for u in self.units[:1]):
            raise UserError(CUT_OFF)
        self._free_cut()
        self._left_gathered.free()
        self._passes += 1
        self._now = Pass(self._passes, trains, learns=trains not in self._orders)
        for unit in self.units:
            unit.entry = None

    def _free_cut(self) -> None:
        """Free what a forward that raised left gathered."""
        for unit in self.units if self._now is not None else ():
            free_gathered(unit.state._modules[0])

    def _enter(self, unit: FsdpUnit, module: nn.Module, args: Any) -> None:
        now, planned = self._now, None
        if backward_runs():  # recomputed: it is gathered already, unless a user's own checkpoint bypassed that
            if self._skipped and unit.state._training_state.name != "PRE_BACKWARD":
                raise ModelError(
                    f"'{unit.name}' is recomputed by a torch.utils.checkpoint around several blocks, or by one with "
                    f"use_reentrant=True, and this rank's samples skip '{self._skipped}': weights could not be "
                    "gathered alike on all ranks; checkpoint each block by itself (recompute='full'), or use ddp"
                )
            return
        if now is None:
            raise outside(unit.name)
        if unit.group.is_sharded:
            for p in unit.group.fsdp_params:  # FSDP2 would replace these with its own weights
                if p._module_info.module._parameters.get(p._module_info.param_name) is not p.sharded_param:
                    raise ModelError(
                        f"weights of '{unit.name}' are replaced for one forward (torch.func.functional_call), and "
                        "sharded ones would be used in their place; use ddp or zero1"
                    )
        if now.learns:
            while (chosen := self._agree(unit.index)) != unit.index:
                self._skip(now, self.units[chosen])
        else:
            planned = self._follow(now, unit)
            if planned is None:
                return
        unit.entry = UnitForward(unit, len(now.entries), planned)
        now.entries.append(unit.entry)

    def _follow(self, now: Pass, unit: FsdpUnit) -> OrderEntry | None:
        """Advance to ``unit`` in the order; ``None`` if it has none and the step will be rejected."""
        order = self._orders[now.has_backward]
        at = now.cursor
        while at < len(order) and order[at].unit is not unit:
            at += 1
        if at == len(order):
            if not (now.has_backward and self._in_step):
                raise ModelError(left_order(unit.name))
            self.left.append(unit.name)
            run_on_zeros(unit, self._device)
            return None
        for planned in order[now.cursor : at]:
            self._skip(now, planned.unit, planned)
        now.cursor = at + 1
        return order[at]

    def _skip(self, now: Pass, unit: FsdpUnit, planned: OrderEntry | None = None) -> None:
        """Gather and free a unit that this rank skips, to match the ranks that enter it."""
        unit.entry = None
        self._skipped = unit.name
        self.skipped[unit.name] += 1
        unit.state._pre_forward(unit.module, (), {})
        unit.state._post_forward(unit.module, (), None)
        now.entries.append(UnitForward(unit, len(now.entries), entered=False))
        if planned is not None:
            self._expect(now, now.entries[-1], planned)

    def _expect(self, now: Pass, entry: UnitForward, planned: OrderEntry) -> None:
        if now.has_backward:
            entry.planned, entry.backs = planned, planned.backs
            entry.unit.open += int(planned.backs)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        now = self._now
        if now is None or backward_runs():
            return
        if now.learns:
            self._learn(now)
        else:
            order = self._orders[now.has_backward]
            for planned in order[now.cursor :]:
                self._skip(now, planned.unit, planned)
            if now.has_backward and self._follows_flags:
                self._orders[True] = self._agree_on_flags(now)
        now.pending = len(now.entries) - 1
        if now.has_backward:
            self._ended.append(now)
        self._now = None

    def _is_idle(self) -> bool:
        """Return whether neither a step nor a forward or backward runs."""
        return not (self._in_step or self._now is not None or self._ended or backward_runs())

    def _learn(self, now: Pass) -> None:
        """Store the order that all ranks followed in this pass, with units that no rank entered."""
        end = len(self.units)
        while (chosen := self._agree(end)) != end:
            self._skip(now, self.units[chosen])
        order = self._agree_on_flags(now)
        entered = {planned.unit.index for planned in order}
        for unit in self.units:
            if unit.index not in entered and unit.name:
                self._skip(now, unit, OrderEntry(unit))
                before = [at for at, planned in enumerate(order) if planned.unit.index < unit.index]
                order.insert(before[-1] + 1 if before else 0, OrderEntry(unit))
        self._orders[now.has_backward] = order
        # trainable weights that are not reached yet may be later, on some ranks first
        self._follows_flags |= now.has_backward and any(
            not planned.backs and any(p.sharded_param.requires_grad for p in planned.unit.group.fsdp_params)
            for planned in order
        )

    def _agree_on_flags(self, now: Pass) -> list[OrderEntry]:
        """Return the entries of this pass that have a backward on some rank.

        All ranks have the same entries.
        """
        flags = torch.zeros(len(now.entries), dtype=torch.int64, device=self._device)
        for entry in now.entries:
            flags[entry.position] = int(entry.entered and entry.backs)
        for group in self._groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        order = [OrderEntry(e.unit, bool(backs)) for e, backs in zip(now.entries, flags.tolist(), strict=True)]
        for entry, planned in zip(now.entries, order, strict=True):
            if entry.planned is not None and not entry.entered:
                entry.unit.open -= int(entry.backs)
            if entry.entered:
                entry.unit.open += int(planned.backs and not entry.backs and entry.defers)
                entry.planned, entry.backs = planned, planned.backs
            else:
                self._expect(now, entry, planned)
        return order

    def _agree(self, index: int) -> int:
        """Return the first of the units that ranks are about to enter."""
        chosen = torch.tensor(index, dtype=torch.int64, device=self._device)
        for group in self._groups:
            dist.all_reduce(chosen, dist.ReduceOp.MIN, group=group)
        return int(chosen.item())

    def _check_gathered(self, own: FsdpUnit, module: nn.Module, args: Any) -> None:
        if self._now is None and not own.group.is_unsharded and not backward_runs():
            raise outside(type(module).__name__)

    def _begin_backward(self, now: Pass) -> None:
        """Finish pending backwards of later forwards first."""
        if self._active is now:
            return
        later = [] if self._pipelined else [one for one in self._ended if one.number > now.number]
        for one in reversed(later):
            self._catch_up(one, -1)
        self._active = now

    def _reach_root(self, state: Any, now: Pass, gradient: torch.Tensor) -> Any:
        """Handle the arrival of the gradient of the root's output."""
        self._begin_backward(now)
        return type(state)._pre_backward(state, gradient)

    def _reach(self, now: Pass, entry: UnitForward, gradient: torch.Tensor) -> Any:
        """Handle the gradient of a unit's output: first match what other ranks do for later units."""
        state = entry.unit.state
        self._begin_backward(now)
        if not entry.done:
            self._catch_up(now, entry.position)
            entry.done = True
        return type(state)._pre_backward(state, gradient)

    def _catch_up(self, now: Pass, position: int) -> None:
        """Run the backward of later units that the gradient does not reach on this rank.

        Units that it has reached are reduced here where FSDP2 would do so only at the end.
        """
        while now.pending > position:
            entry = now.entries[now.pending]
            now.pending -= 1
            state = entry.unit.state
            if not entry.done and entry.backs:
                entry.done = True
                type(state)._pre_backward(state, None)
                entry.unit.group.post_backward()
            elif entry.done and entry.entered and entry.defers:
                entry.unit.group.post_backward()

    def _post_backward(self, unit: FsdpUnit, plain: Any, *unused: Any) -> None:
        """Reduce a unit once per backward, after its first forward's; missing gradients are zero."""
        if unit.open and not self._finishing:
            unit.open -= 1
        group = unit.group
        if not group.reduce_grads:
            plain()
        elif self._pipelined or self._finishing or not unit.open:
            unit.reduced = True
            self._note(unit, self._fill(unit))
            plain()
        else:  # more will follow: keep the gradients; weights that stay gathered after forward stay so here
            resharding = group.reshard_after_backward
            group.reduce_grads, group.reshard_after_backward = False, resharding and group._reshard_after_forward
            try:
                plain()
            finally:
                group.reduce_grads, group.reshard_after_backward = True, resharding

    def _fill(self, unit: FsdpUnit) -> int:
        """Fill missing gradients of trained parameters with zeros.

        Return a bit mask of those that have one.
        """
        mask, params = 0, unit.group.fsdp_params
        kept = any(p.unsharded_accumulated_grad is not None for p in params)
        for at, p in enumerate(params):
            if p.unsharded_accumulated_grad is None:
                full = p._unsharded_param
                if full.grad is None:
                    if not full.requires_grad or not p.sharded_param.requires_grad:
                        continue
                    full.grad = torch.zeros(full.shape, dtype=full.dtype, device=full.device)  # fp8 has no zeros_like
                    self._filled[p] += 1
                if kept:  # from earlier micro batches: in the reduction dtype, and a collective takes one
                    p.to_accumulated_grad_if_needed()
            mask |= 1 << at
        return mask

    def _note(self, unit: FsdpUnit, mask: int) -> None:
        """Record a reduction, so that ranks can compare it."""
        if mask:
            unit.reductions += 1
            self._events.append((unit.index, mask))

    def _finish(self, plain: Any) -> None:
        """Finish a backward: the rest of the order, and units whose last forward had no backward."""
        if self._pipelined:
            passes = [self._active] if self._active is not None else []
        else:
            passes = self._ended[::-1]
        for now in passes:
            self._catch_up(now, -1)
        self._ended = [one for one in self._ended if one not in passes]
        self._active, self._finishing = None, True
        try:
            for unit in self.units:
                through = unit.group._training_state.name == "POST_BACKWARD"
                if through and unit.group.reduce_grads and not unit.reduced:
                    unit.group.post_backward()
            plain()
        finally:
            self._finishing = False
            for unit in self.units:
                unit.reduced, unit.open = False, unit.open if self._pipelined else 0


def keep_order(root: nn.Module, mesh: DeviceMesh, *, pipelined: bool = False) -> None:
    """Attach a `UnitOrder` to the sharded ``root``; a single rank or a fake world needs none."""
    # PyTorch warns about every output that is a view, as a linear layer's is; in-place changes of it raise anyway
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    if mesh.size() > 1 and str(dist.get_backend(mesh.get_group(0))) != "fake":
        object.__setattr__(root, _MARK, UnitOrder(root, mesh, pipelined=pipelined))


def orders_of(outer: nn.Module) -> list[UnitOrder]:
    """Return the unit orders of a prepared model: one per pipeline stage.

    None if nothing is sharded.
    """
    found = (part.__dict__.get(_MARK) for part in outer.modules())
    return [order for order in found if order is not None]
