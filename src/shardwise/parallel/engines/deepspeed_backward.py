"""Keep a loss's own ``torch.autograd.grad`` from counting as a micro batch.

Does not import DeepSpeed.

DeepSpeed detects a backward at the outputs of its engine, and takes any for that of a micro batch: it divides by the
number of micro batches, and counts one more, so that under offload the next gradient is added to the remains of an
earlier step (0.19.8; both without an error).
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import ModelError


class OwnBackward:
    """Hooks on an engine's outputs that let DeepSpeed count only the backwards of micro batches.

    Under ZeRO-3 a backward frees the weights, so a backward that keeps its graph for another one is refused.
    """

    def __init__(self, inner: Any, strategy: str) -> None:
        self._inner, self._strategy = inner, strategy
        self._begin, self._scale = inner._backward_prologue, inner._backward_prologue_per_tensor
        self._left_out = False
        inner._backward_prologue = self._begun
        inner._backward_prologue_per_tensor = self._of_output
        offload = getattr(inner.optimizer, "parameter_offload", None)
        if offload is not None:
            self._gather = offload.pre_sub_module_backward_function
            offload.pre_sub_module_backward_function = self._entered

    def _begun(self) -> None:
        """Handle the first output that backward reaches; DeepSpeed calls it once per forward."""
        self._left_out = not self._inner._running_engine_backward
        if not self._left_out:
            self._begin()

    def _of_output(self, gradient: torch.Tensor) -> torch.Tensor:
        """Classify an output's gradient for DeepSpeed."""
        if not self._inner._running_engine_backward:
            return gradient
        if self._left_out:
            self._begun()
        scaled: torch.Tensor = self._scale(gradient)
        return scaled

    def _entered(self, module: Any) -> None:
        """Handle the backward of a module under ZeRO-3, which gathers its weights and frees them.

        Raises:
            ModelError: another backward will follow through the same forward.
        """
        again = ""
        if torch.is_grad_enabled():  # the engine's sign for create_graph
            again = "create_graph=True (a gradient penalty, a Hessian)"
        elif not self._inner._running_engine_backward and _keeps_graph():
            again = "retain_graph=True"
        if again:
            raise ModelError(
                f"{again} goes backward through the model twice, and {self._strategy} frees the weights after the "
                "first time; use ddp or zero1"
            )
        self._gather(module)


def _keeps_graph() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
