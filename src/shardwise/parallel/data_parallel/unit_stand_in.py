"""Stand-in forward on zeros for a unit that no other rank gathers, to end the step.

A rank that raised in the middle of a step would leave the others waiting for it. It continues instead, gathers and
reduces what the others do, and reports at the end of the step why that step must not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from shardwise.parallel.data_parallel.unit_forwards import FsdpUnit


def run_on_zeros(unit: FsdpUnit, device: torch.device) -> None:
    """Run the next forward of ``unit`` on zero weights, with FSDP2's hooks disabled."""
    module, state, group = unit.module, unit.state, unit.group
    phase, grad_mode = state._training_state, torch.is_grad_enabled()
    gathers = {name: group.__dict__.get(name) for name in ("unshard", "wait_for_unshard")}  # others replace them, too
    params = [(p, p._module_info.module._parameters[p._module_info.param_name]) for p in group.fsdp_params]

    def restore(_: nn.Module, __: Any, output: Any) -> Any:
        handle.remove()
        torch.set_grad_enabled(grad_mode)
        state._training_state = phase
        for name, method in gathers.items():
            del group.__dict__[name]
            if method is not None:
                setattr(group, name, method)
        for p, weight in params:
            p._setattr_on_modules(weight)
        return _pytree.tree_map_only(torch.Tensor, _as_if_trained, output)

    handle = module.register_forward_hook(restore, always_call=True)  # after FSDP2's own
    state._training_state = type(phase).PRE_BACKWARD  # FSDP2 treats it as a recomputed forward
    for name in gathers:
        setattr(group, name, lambda *_, **__: None)
    for p, _ in params:
        zeros = torch.zeros(p._orig_size, dtype=p.param_dtype or p.orig_dtype, device=device)
        p._setattr_on_modules(nn.Parameter(zeros, requires_grad=False))
    torch.set_grad_enabled(False)


def _as_if_trained(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose loss has a backward."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor
