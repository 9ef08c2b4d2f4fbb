"""Build a module with its parameters on the meta device and its buffers real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.model.undrawn import undrawn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create every new ``nn.Parameter`` that a module registers on the meta device.

    Buffers stay real.

    Buffers must be real because many (rotary frequencies, masks) exist only as the constructor's code.
    """
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # a parameter registered under two names (tied by hand) must stay one

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if param not in made:
                kind = type(param) if nn.Parameter in type(param).__mro__ else nn.Parameter  # fake: plain
                made[param] = kind(param.detach().to("meta"), requires_grad=param.requires_grad)
            param = made[param]
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with undrawn():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
