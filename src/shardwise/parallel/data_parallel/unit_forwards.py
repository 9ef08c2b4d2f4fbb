"""Records of sharded units and their forwards for `unit_order`, and queries to FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils import _pytree

from shardwise.errors import ModelError, UserError
from shardwise.model.read import clean_name
from shardwise.parallel.experts.expert_parallel import experts_here


@dataclass(eq=False)
class FsdpUnit:
    """Module that FSDP2 shards as one unit.

    ``open`` counts its forwards whose backward is pending.
    """

    index: int
    name: str
    module: nn.Module
    state: Any
    group: Any
    open: int = 0
    reduced: bool = False
    reductions: int = 0
    entry: UnitForward | None = None


@dataclass(frozen=True)
class OrderEntry:
    """Entry in the unit order. ``backs``: the unit's output needs a gradient on some rank."""

    unit: FsdpUnit
    backs: bool = True


@dataclass(eq=False)
class UnitForward:
    """Forward of a unit, or its stand-in on a rank that skips it (``entered`` is false).

    ``defers``: its inputs need no gradient, so that FSDP2 would reduce it only at the end of the full backward.
    """

    unit: FsdpUnit
    position: int
    planned: OrderEntry | None = None
    entered: bool = True
    backs: bool = False
    defers: bool = True
    done: bool = False


@dataclass(frozen=True)
class View:
    """View returned by a unit: its base tensor, and the base's version at that time."""

    unit: str
    base: Callable[[], torch.Tensor | None]
    version: int


@dataclass(eq=False)
class Pass:
    """Forward of the root. ``pending`` is the last entry whose backward has not run."""

    number: int
    has_backward: bool
    learns: bool
    entries: list[UnitForward] = field(default_factory=list)
    cursor: int = 0
    pending: int = -1


def units_of(root: nn.Module) -> list[FsdpUnit]:
    """Return the units inside ``root`` that have parameters, in module order.

    Experts over ranks are left out: every rank runs them, and they nest inside of a block's unit.
    """
    found: list[FsdpUnit] = []
    for name, module in root.named_modules():
        if isinstance(part := module, FSDPModule) and experts_here(module) is None:
            state = part._get_fsdp_state()
            group = state._fsdp_param_group
            if group is not None:
                found.append(FsdpUnit(len(found), clean_name(f"{name}.").rstrip("."), module, state, group))
    return found


def has_gradient(p: Any) -> bool:
    """Return whether this rank has a gradient, reduced or not, for an FSDP2 parameter."""
    full = getattr(p, "_unsharded_param", None)
    kept = p.unsharded_accumulated_grad is not None or p.sharded_param.grad is not None
    return kept or (full is not None and full.grad is not None)


def free_gathered(module: FSDPModule) -> None:
    """Free the weights of a unit, also those on their way, which FSDP2 would use in the next forward however old."""
    state: Any = module._get_fsdp_state()
    state._training_state, state._state_ctx.iter_forward_root = TrainingState.IDLE, None
    if (group := state._fsdp_param_group) is not None:
        work = group._all_gather_result and group._all_gather_result.all_gather_work
        if isinstance(work, dist.Work):
            work.wait()
        group._all_gather_result, group._training_state = None, TrainingState.IDLE  # in a forward, some are kept
    module.reshard()


def needs_gradient(output: Any) -> bool:
    """Return whether FSDP2 would find a tensor in ``output`` that needs a gradient."""
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors  # also searches dataclasses
    except ImportError:  # before PyTorch 2.13
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in _pytree.tree_leaves(output))
    return bool(collect_grad_tensors(output))


def views_in(unit: FsdpUnit, output: Any) -> list[View]:
    """Return the outputs of a unit that are views, with their current versions."""
    views = (one for one in _pytree.tree_leaves(output) if isinstance(one, torch.Tensor) and one._is_view())
    return [View(unit.name, weakref.ref(one._base), one._version) for one in views if one.requires_grad]


def refuse_changed(views: list[View]) -> None:
    """Raise if one of ``views`` was changed in place."""
    for view in views:
        base = view.base()
        if base is not None and base._version != view.version:
            raise ModelError(
                f"'{view.unit}' returns a view (of view, transpose, chunk or an index), which is changed in place "
                "afterwards, and autograd then goes around the hook that gathers the block's weights for backward; "
                "return a copy (x.clone()), or change it out of place (x = x + y for x += y)"
            )


def backward_runs() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def with_named_error(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the root's forward.

    Explain the use of a weight while it is sharded in the model's terms.
    """
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ModelError(
            "the model's forward uses a block's weights outside that block's own forward, and sharded weights are "
            "gathered only while their block runs: give the block an output or an input for it, or use ddp or zero1"
        ) from error


def outside(name: str) -> UserError:
    """Build the error for a submodule that is called without the model around it."""
    return UserError(
        f"'{name}' was called by itself: sharded weights are gathered when the prepared model is called; call "
        "model(inputs), and move what model.some_method(...) or a submodule does into the model's forward"
    )


def left_order(name: str) -> str:
    """Describe a unit that runs outside the order that all ranks follow."""
    return (
        f"'{name}' runs later or more often than in the first forward: sharded weights are gathered in one order on "
        "all ranks, so a model may skip units, but not reorder or repeat them as it likes; use ddp or zero1"
    )
