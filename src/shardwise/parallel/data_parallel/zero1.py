"""ZeRO-1: replicated parameters and gradients, each optimizer state on one rank only."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.errors import ModelError


def shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """Shard the optimizer's state over the ranks by full parameters.

    PyTorch's ZeroRedundancyOptimizer assigns parameters to ranks to balance them, steps those, and broadcasts
    them. A parameter is never split, so the largest one limits the balance. Frozen
    parameters are left out: they would be broadcast needlessly. A single rank keeps its optimizer.
    """
    if dist.get_world_size() == 1:
        return optimizer
    with warnings.catch_warnings():  # torch.distributed.optim still uses torch.jit.script at import
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    kind = type(optimizer)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ModelError(
            "a learning-rate scheduler was built before session.prepare, and zero1 replaces the optimizer; "
            "build the scheduler from the optimizer that prepare returns"
        )
    accepted = inspect.signature(kind).parameters
    defaults: dict[str, Any] = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    groups = []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [p for p in group["params"] if p.requires_grad]})  # custom keys, too
    try:
        return ZeroRedundancyOptimizer(groups, kind, **defaults)
    except (TypeError, ValueError) as error:
        raise ModelError(f"zero1 cannot build {kind.__name__} from its defaults ({error}); use fsdp or ddp") from None
