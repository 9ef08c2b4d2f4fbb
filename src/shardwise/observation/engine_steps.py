"""DeepSpeed's engine as an optimizer with step hooks; DeepSpeed is not imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[Any, Any, Any], Any]


class EngineSteps:
    """Optimizer of a DeepSpeed engine: the model's parameters in groups, the state on this rank, and step hooks."""

    def __init__(self, engine: Any) -> None:
        self._target = engine.optimizer
        self._before: list[Hook] = []
        self._after: list[Hook] = []
        self.wrapper = f"DeepSpeed ZeRO-{engine.zero_optimization_stage()}"
        base = getattr(self._target, "optimizer", self._target)
        groups = getattr(self._target, "bit16_groups", None) or getattr(self._target, "fp16_groups", None)
        self.param_groups: list[dict[str, Any]] = [{"params": list(g)} for g in groups] if groups else base.param_groups
        self.state: dict[torch.Tensor, dict[str, Any]] = base.state

    def register_step_pre_hook(self, hook: Hook) -> _Handle:
        """Call ``hook`` before each step that changes weights."""
        return _Handle(self, self._before, hook)

    def register_step_post_hook(self, hook: Hook) -> _Handle:
        """Call ``hook`` after it."""
        return _Handle(self, self._after, hook)

    def replace(self) -> None:
        """Put the hooks around the step, or give the optimizer its own back where none is left."""
        own = vars(self._target).get("step")
        if own is None and (self._before or self._after):
            self._target.step = _Step(self, self._target.step)
        elif isinstance(own, _Step) and not (self._before or self._after):
            del self._target.step

    def stepped(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Step between the hooks."""
        for hook in list(self._before):
            hook(self, args, kwargs)
        result = original(*args, **kwargs)
        for hook in list(self._after):
            hook(self, args, kwargs)
        return result


class _Step:
    """Step of the engine's optimizer with hooks around it."""

    def __init__(self, steps: EngineSteps, original: Callable[..., Any]) -> None:
        self._steps, self._original = steps, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.stepped(self._original, args, kwargs)


class _Handle:
    """Handle that removes a hook."""

    def __init__(self, steps: EngineSteps, hooks: list[Hook], hook: Hook) -> None:
        self._steps, self._hooks, self._hook = steps, hooks, hook
        hooks.append(hook)
        steps.replace()

    def remove(self) -> None:
        """Remove the hook, if it is there."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)
        self._steps.replace()
