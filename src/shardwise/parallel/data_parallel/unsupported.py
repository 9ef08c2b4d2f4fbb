"""Explicit errors for uses of FSDP2 and DeepSpeed that would crash or fail obscurely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import ModelError


def refuse_unsupported(outer: nn.Module, strategy: str) -> None:
    """Make copies of a sharded model and double backward raise errors that name the alternative."""
    if isinstance(outer, FSDPModule):
        _explain_module(type(outer))
    for part in outer.modules():
        if not isinstance(part, FSDPModule):
            continue
        type(part).__deepcopy__ = functools.partialmethod(_refuse_copy, strategy)  # type: ignore[attr-defined]
        state = part._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            group.pre_backward = functools.partial(_checked, group.pre_backward, strategy)


def _explain_module(kind: type[nn.Module]) -> None:
    """Explain ``model.module``, which only a model inside of DDP has; ``hasattr`` stays false."""
    if "__getattr__" in vars(kind):  # FSDP2 makes one class of each of the user's
        return
    found = kind.__getattr__

    def explained(self: nn.Module, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name != "module":
                raise
        raise AttributeError(
            "model.module is a habit of DDP: session.prepare has sharded your own model in place, without a wrapper; "
            "call model(inputs), read model.config and the like from it, and save with session.save(folder) on all "
            "ranks"
        )

    kind.__getattr__ = explained  # type: ignore[method-assign]


def refuse_unsupported_of_engine(inner: Any, strategy: str) -> None:
    """Refuse copies of DeepSpeed's engine, and under ZeRO-3 of each module (an empty copy)."""
    offload = getattr(inner.optimizer, "parameter_offload", None)
    way = "[p.detach().clone() for p in session.module.parameters()]"
    if offload is not None:
        way = "{n: w.clone() for n, w in session.applied.engine.weights()}"
    for part in (inner, inner.module) if offload is None else inner.modules():
        object.__setattr__(part, "__deepcopy__", functools.partial(_refuse_copy_of_engine, strategy, way))


def _refuse_copy_of_engine(strategy: str, way: str, memo: dict[int, Any]) -> NoReturn:
    raise ModelError(
        f"a model that {strategy} has taken over cannot be copied (copy.deepcopy, AveragedModel); for a moving average "
        f"of its weights keep ema = {way} on all ranks, and bring it up to date after each update"
    )


def _refuse_copy(self: nn.Module, strategy: str, memo: dict[int, Any]) -> NoReturn:
    raise ModelError(
        f"a model that {strategy} has sharded cannot be copied (copy.deepcopy, AveragedModel); for a moving average of "
        "its weights keep one of its parameters: ema = [p.detach().clone() for p in model.parameters()], and after "
        "each update torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 1 - decay)"
    )


def _checked(run: Callable[..., None], strategy: str, *args: Any, **options: Any) -> None:
    """Refuse double backward.

    FSDP2 frees weights after backward; a second one would read freed memory, and has crashed.
    """
    if torch.is_grad_enabled():  # the engine's sign for create_graph
        raise ModelError(
            f"create_graph=True (a gradient penalty, a Hessian) goes backward through the model twice, and {strategy} "
            "frees the weights after the first time; use ddp or zero1"
        )
    run(*args, **options)
