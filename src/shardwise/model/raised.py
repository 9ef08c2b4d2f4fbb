"""Where in a model an exception was raised."""

from __future__ import annotations

from torch import nn

from shardwise.model.read import clean_name


def in_layer(error: BaseException, module: nn.Module) -> str:
    """``, in 'model.layers.0.mlp'``: the innermost part of ``module`` whose forward was running; empty if none was."""
    names = {id(part): clean_name(name) for name, part in module.named_modules() if name}
    found, frame = "", error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return f", in '{found}'" if found else ""
