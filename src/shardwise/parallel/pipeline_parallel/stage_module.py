"""Pipeline stage as a module: the user's own forward, computing only its own blocks.

Every stage runs the full forward on the micro batch's own inputs, so masks, positions and rotary tables are computed
by the model's code wherever they are needed, and only the hidden state is sent. Blocks of earlier stages are skipped,
the last of them returns the received state, and the first block of the next stage ends the forward there. Parameters
of other stages are zeros without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError, UserError
from shardwise.model.read import STAGE, clean_name
from shardwise.model.wiring import BlockCall, Wiring


class _StageEnd(BaseException):
    """Exception that ends a stage's forward with its hidden state.

    A user's ``except Exception`` lets it pass.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Absent(nn.Module):
    """Placeholder of a module whose parameters are on another stage.

    Its plain attributes can still be read.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        own = nn.Module().__dict__
        facts = {
            k: v for k, v in inner.__dict__.items() if k not in own and not isinstance(v, torch.Tensor | nn.Module)
        }
        object.__setattr__(self, "_facts", facts)

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("_facts", {})
        if name in facts:
            return facts[name]
        return super().__getattr__(name)


class StandIn(Absent):
    """Placeholder that computes the output shape of an absent module from zeros.

    Values are never used.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        object.__setattr__(self, "_inner", inner)  # hidden from module traversal

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # zero weights, for callers that read their device or dtype; its methods
            if "_inner" not in self.__dict__:
                raise
            return getattr(self.__dict__["_inner"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output with zero weights."""
        inner = self.__dict__["_inner"]
        if type(inner) is nn.Embedding and len(args) == 1 and not kwargs:
            return inner.weight.new_zeros(1).expand(*args[0].shape, inner.embedding_dim)
        with torch.no_grad():
            return inner(*args, **kwargs)


class Skip(Absent):
    """Placeholder of an earlier stage's block: passes its hidden state on in its output form."""

    def __init__(self, inner: nn.Module, call: BlockCall) -> None:
        super().__init__(inner)
        self.call = call

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden state among the arguments."""
        key = self.call.argument
        return args[key] if isinstance(key, int) else kwargs[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state unchanged."""
        return self._returned(self.hidden(args, kwargs))

    def _returned(self, hidden: Any) -> Any:
        return (hidden, *(None,) * (self.call.returns - 1)) if self.call.returns else hidden


class Receive(Skip):
    """Placeholder of the last block before the stage: returns what the previous stage has sent."""

    received: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden state."""
        if self.received is None:
            raise UserError("a pipeline stage was called by itself; train with step.run(model, loss_fn)")
        return self._returned(self.received)


class Send(Skip):
    """Placeholder of the first block after the stage: ends the forward with its hidden state."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward; never returns."""
        raise _StageEnd(self.hidden(args, kwargs))


class StageContainer(nn.Module):
    """Container of a rank's stages, under the user's names.

    Other attributes are those of the user's model.
    """

    def __init__(self, stages: dict[int, nn.Module]) -> None:
        super().__init__()
        for index, stage in stages.items():
            self.add_module(f"{STAGE}{index}", stage)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            stages = self.__dict__.get("_modules", {})
            if not stages:
                raise
            return getattr(next(iter(stages.values())), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: one rank does not have the full model."""
        raise UserError(
            "under pipeline parallel the model is spread over ranks and cannot be called; replace model(inputs), the "
            "loss and step.backward by step.run(model, loss_fn)"
        )


def copies(module: nn.Module, number: int) -> list[nn.Module]:
    """Return ``module`` and ``number - 1`` structural copies that share its tensors.

    Raises:
        ModelError: it contains something that cannot be copied.
    """
    made = [module]
    for _ in range(number - 1):
        shared = [*module.parameters(), *module.buffers()]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
        config = getattr(module, "config", None)
        if config is not None:
            memo[id(config)] = config
        try:
            made.append(copy.deepcopy(module, memo))
        except Exception as error:  # the user's objects may raise anything
            raise ModelError(
                f"several stages on a rank need copies of the model without its weights, and it cannot be copied: "
                f"{error}; use pipeline_schedule 1f1b"
            ) from None
    return made


def build_stage(
    module: nn.Module,
    blocks: Sequence[str],
    own: range,
    wiring: Wiring,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Receive | None:
    """Make ``module`` the stage that computes ``blocks[own]``, in place.

    Return its receiving module.

    ``dtype`` is the dtype that floating-point parameters are cast to before they compute, ``None`` if they are not.
    """
    places = {clean_name(name): name for name, _ in module.named_modules()}
    receive: Receive | None = None
    for index, block in enumerate(blocks):
        if index in own:
            continue
        inner, call = module.get_submodule(places[block]), wiring.calls[block]
        kind = Receive if index == own.start - 1 else Send if index == own.stop else Skip
        stand_in = kind(inner, call)
        module.set_submodule(places[block], stand_in)
        receive = stand_in if isinstance(stand_in, Receive) else receive
    first, last = own.start == 0, own.stop == len(blocks)
    slots = {clean_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    taken = {id(p) for slot, p in slots.items() if slot in wiring.before or slot in wiring.after}
    for name, part in list(module.named_modules()):
        if any(clean_name(name) == block or clean_name(name).startswith(f"{block}.") for block in blocks):
            continue
        gone = []
        for key, parameter in list(part._parameters.items()):
            slot = clean_name(f"{name}.{key}".lstrip("."))
            if parameter is None or (first and slot in wiring.before) or (last and slot in wiring.after):
                continue
            if first and id(parameter) not in taken:  # not used, not even under another name
                continue
            narrow = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            zero = torch.zeros(1, dtype=narrow, device=device)
            del part._parameters[key]
            object.__setattr__(part, key, zero.expand(parameter.shape))
            gone.append(key)
        is_leaf = not any(True for _ in part.children())
        if gone and name and is_leaf and all(p is None for p in part._parameters.values()):
            module.set_submodule(name, StandIn(part))
    _end_early(module)
    return receive


def _end_early(module: nn.Module) -> None:
    """Let `Send` end the forward of ``module``, inside any wrapper that is added later."""
    given: Callable[..., Any] | None = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            if given is not None:
                return given(*args, **kwargs)
            return type(module).forward(module, *args, **kwargs)
        except _StageEnd as end:
            return end.hidden

    object.__setattr__(module, "forward", forward)
