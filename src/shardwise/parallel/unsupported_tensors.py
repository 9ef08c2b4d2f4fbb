"""Refuse parameters and buffers that cannot be sent, sharded or stepped as laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.errors import ModelError
from shardwise.model.read import check_initialized, clean_name
from shardwise.plan.plan import Plan

_Named = tuple[str, torch.Tensor]


def check_tensors(module: nn.Module, plan: Plan) -> None:
    """Refuse tensors of ``module`` that ``plan`` would handle wrongly. No rank is needed.

    Nothing is changed.

    Raises:
        ModelError: up to three of each kind, with the rule and the fix.
    """
    check_initialized(module)
    parameters = [(clean_name(name), p) for name, p in module.named_parameters()]
    buffers = [(clean_name(name), b) for name, b in module.named_buffers()]
    problems = [
        f"buffer '{name}' is quantized ({buffer.dtype}), and its scale cannot be sent to other ranks; keep its "
        "int_repr() and its scale as two buffers"
        for name, buffer in buffers
        if buffer.is_quantized
    ][:3]
    problems += [problem for named in parameters for problem in _odd_parameter(*named, plan)][:3]
    if not problems:
        problems = [
            f"'{first}' and '{second}' share memory but are two tensors, and {plan.strategy} would keep them apart: "
            "make them one parameter (a.weight = b.weight), or clone one"
            for first, second in _shared(parameters, buffers, plan)
        ][:3]
    if problems:
        raise ModelError(*problems)


def _odd_parameter(name: str, parameter: nn.Parameter, plan: Plan) -> Iterator[str]:
    kind = f"parameter '{name}'"
    if parameter.is_quantized:
        yield f"{kind} is quantized ({parameter.dtype}), and its scale cannot be sent to other ranks; dequantize it"
    elif parameter.layout is not torch.strided:
        yield f"{kind} is sparse ({parameter.layout}), and no strategy can reduce or shard it; use to_dense()"
    elif any(not stride and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        yield f"{kind} has several elements in one place of memory, as expand() makes them; clone() it"
    elif parameter.is_complex() and parameter.requires_grad and not _keeps_full(plan):
        yield (
            f"{kind} is complex ({parameter.dtype}), which {plan.strategy} cannot shard or send; store it as real "
            "numbers (torch.view_as_real, and torch.view_as_complex in the forward), or use ddp"
        )


def _keeps_full(plan: Plan) -> bool:
    """Return whether parameters and updates are replicated: DDP without a split model."""
    return plan.parsed.base == "ddp" and plan.dims.tp * plan.dims.pp == 1


def _shared(parameters: Sequence[_Named], buffers: Iterable[_Named], plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield trained parameters that share an element with another tensor and would lose it."""
    trained = {id(p) for _, p in parameters if p.requires_grad}
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name, tensor)
        for name, tensor in (*parameters, *buffers)
        if tensor.layout is torch.strided and tensor.numel()
        if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
        if not (_keeps_full(plan) and tensor.device.type == plan.device)
    )
    for (_, end, first, one), (begin, _, second, other) in pairwise(spans):
        if begin < end and {id(one), id(other)} & trained and _overlap(one, other):
            yield first, second


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share an element.

    Every second column of a matrix shares none with the others.
    """
    if one.element_size() != other.element_size():
        return True
    begin, size = min(one.data_ptr(), other.data_ptr()), one.element_size()
    end = max(tensor.data_ptr() + _extent(tensor) for tensor in (one, other))
    seen = torch.zeros((end - begin) // size, dtype=torch.bool)
    for tensor in (one, other):
        here = seen.as_strided(tensor.shape, tensor.stride(), (tensor.data_ptr() - begin) // size)
        if bool(here.any()):
            return True
        here.fill_(True)
    return False
