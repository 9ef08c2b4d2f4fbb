"""Run one forward with fake weights: real shapes and control flow, no large computation."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from shardwise.model.expert_layers import dense_experts
from shardwise.model.read import in_layer

_LENGTH = 16  # used if the sample length is unknown


def run_forward(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *contexts: AbstractContextManager[Any]
) -> tuple[Any, str]:
    """Return the output of ``module`` within ``contexts``, and the error text (empty if none).

    Nothing is changed.

    Weights are fake and inputs are not: values computed from inputs alone (masks, positions) are real. The key/value
    cache of models that use one by default is turned off: training does not use it.
    """
    if "use_cache" in inspect.signature(module.forward).parameters:
        kwargs = {"use_cache": False, **kwargs}
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in module.named_parameters()}
        for name, buffer in module.named_buffers():
            if buffer.device.type != "cpu":
                state[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(dense_experts(module))
        for context in contexts:
            stack.enter_context(context)
        try:
            return torch.func.functional_call(module, state, tuple(args), kwargs), ""
        except Exception as error:  # the user's code may raise anything
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None, message + in_layer(error, module) + _line_of(error)


def _line_of(error: Exception) -> str:
    """Return the user's line at which PyTorch raised."""
    inside = str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return f", at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""


def inputs_of(sample: Any, seq_len: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build the model's arguments for ``sample``, on the CPU.

    Token ids [1, length] if there is none.
    """
    if sample is None:
        sample = torch.zeros(1, seq_len or _LENGTH, dtype=torch.int64)
    sample = _pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu"), sample)
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, list | tuple):
        return tuple(sample), {}
    named = {key: value for key, value in dict(sample).items() if key != "labels"}
    if isinstance(named.get("attention_mask"), torch.Tensor):  # a sample's values do not matter, and zeros would mask
        named["attention_mask"] = torch.ones_like(named["attention_mask"])
    return (), named
