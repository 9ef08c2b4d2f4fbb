"""Step each parameter during backward once its gradient is final, and free the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


class InBackward:
    """Hooks that step one parameter at a time with an ordinary optimizer.

    FSDP2 calls them on the sharded parameter after its reduction, autograd on an unsharded one after it has accumulated
    all of its uses. During a step the optimizer sees only that parameter, in its parameter group: options that were
    changed since the last step apply. Outside of `running` gradients are not touched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepped: set[int] = set()  # ids of the parameters that the last backward stepped
        self._optimizer = optimizer
        self._running = False
        self._number = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._step)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enable the hooks for the only backward of a step."""
        self.stepped = set()
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def remove(self) -> None:
        """Remove the hooks and release the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _step(self, parameter: torch.Tensor) -> None:
        if not self._running:
            return
        optimizer = self._optimizer
        groups = optimizer.param_groups
        group = groups[self._number[id(parameter)]]
        members = group["params"]
        group["params"] = [parameter]
        optimizer.param_groups = [group]
        try:
            optimizer.step()
        finally:
            group["params"] = members
            optimizer.param_groups = groups
        self.stepped.add(id(parameter))
        parameter.grad = None
