"""Locate an exception raised in a model."""

from __future__ import annotations

from torch import nn

from shardwise.model.read import clean_name


def in_layer(error: BaseException, module: nn.Module) -> str:
    """Name the innermost part of ``module`` that raised.

    As ``, in 'model.layers.0.mlp'``; empty if there is none.
    """
    names = {id(part): clean_name(name) for name, part in module.named_modules() if name}
    found, frame = "", error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return f", in '{found}'" if found else ""
