"""Global batches for the comparison: the config's samples, one ragged step and one full one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from shardwise.gradcheck.compare import Gradients
from shardwise.gradcheck.router_reference import RouterReference
from shardwise.model.call_module import call
from shardwise.plan.plan import Plan
from shardwise.train.data.order import SampleOrder, rank_ids
from shardwise.train.data.samples import NumberedSamples
from shardwise.train.loss import IGNORED, token_loss_sum

RAGGED, WHOLE = 0, 1
STEPS = (RAGGED, WHOLE)

Key = tuple[int, int]
"""Data-parallel rank and micro batch."""
Batch = tuple[Any, torch.Tensor]


@dataclass(frozen=True)
class Data:
    """Data source; ids are taken modulo ``vocab_size`` where the small model has fewer."""

    samples: NumberedSamples
    order: SampleOrder
    vocab_size: int | None


def global_batch(data: Data, plan: Plan, step: int) -> dict[Key, Batch]:
    """Return the micro batches of one optimizer step over all data-parallel ranks.

    In the ragged step samples have different lengths, and the last rank (or the only one) has one micro batch less.
    """
    dp, micro, accumulation = plan.dims.dp, plan.micro_batch or 1, plan.grad_accum
    position = step * dp * micro * accumulation
    batches = {}
    for rank in range(dp):
        for index, ids in enumerate(rank_ids(data.order, position, dp, rank, micro, accumulation)):
            inputs, labels = data.samples.batch(ids)
            if data.vocab_size is not None:
                inputs = _within(inputs, data.vocab_size)
                labels = torch.where(labels == IGNORED, labels, labels % data.vocab_size)
            batches[rank, index] = inputs, labels
    return _ragged(batches, plan) if step == RAGGED else batches


def _within(inputs: Any, vocab_size: int) -> Any:
    """Return token ids modulo ``vocab_size``; positions stay."""
    if isinstance(inputs, dict):
        return {**inputs, "input_ids": inputs["input_ids"] % vocab_size}
    return inputs % vocab_size


def _ragged(batches: dict[Key, Batch], plan: Plan) -> dict[Key, Batch]:
    made = {}
    for number, (key, (inputs, labels)) in enumerate(batches.items()):
        labels = labels.clone()
        for row in range(len(labels)):
            kept = 1 + (7 * number + 5 * row + 3) % labels.shape[1]
            labels[row, kept:] = IGNORED
        made[key] = inputs, labels
    if plan.dims.dp > 1 or (plan.grad_accum > 1 and plan.dims.pp == 1):
        del made[plan.dims.dp - 1, plan.grad_accum - 1]
    return made


@dataclass(frozen=True)
class Reference:
    """Single-process result for a global batch: gradient of the mean loss, its norm, the loss."""

    gradients: Gradients
    norm: float
    loss: float
    tokens: int


def reference(model: nn.Module, batches: Mapping[Key, Batch], *, one_by_one: bool = False) -> Reference:
    """Run forward and backward over the global batch without Shardwise.

    At once, or sample by sample.
    """
    inputs = _pytree.tree_map(lambda *parts: torch.cat(parts), *(batch[0] for batch in batches.values()))
    labels = torch.cat([batch[1] for batch in batches.values()])
    tokens = int((labels != IGNORED).sum())
    model.zero_grad(set_to_none=True)
    size = 1 if one_by_one else len(labels)
    total, routers = 0.0, RouterReference(model)
    waiting: list[torch.Tensor] = []
    for begin in range(0, len(labels), size):
        here = slice(begin, begin + size)
        outputs, targets = call(model, _pytree.tree_map(lambda part, here=here: part[here], inputs)), labels[here]
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        # PyTorch's own loss: an error in Shardwise's must not be on both sides of the comparison
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = loss / max(tokens, 1)
        total += float(loss.detach())
        if routers.terms.has_loss:  # one backward: models round gradients to fp32 where they compute in it
            waiting.append(loss)
        else:
            loss.backward()
    routers.stop()
    if routers.terms.has_loss:
        micros = [micro for (_, micro), batch in batches.items() for _ in range(len(batch[1]))]
        torch.stack([*waiting, routers.loss(micros)]).sum().backward()
    gradients = taken(model)
    squares = [float((g * g).sum()) for g in gradients.values() if g is not None]
    return Reference(gradients, sum(squares) ** 0.5, total, tokens)


def taken(model: nn.Module) -> Gradients:
    """Take the gradients of the trained parameters off the model."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = None if parameter.grad is None else parameter.grad.detach().clone()
    model.zero_grad(set_to_none=True)
    return found


def contributions(make: Callable[[], nn.Module], batches: Mapping[Key, Batch]) -> dict[Key, Gradients]:
    """Return the gradient of each micro batch's summed loss."""
    model, found = make(), {}
    for key, (inputs, labels) in batches.items():
        token_loss_sum(call(model, inputs), labels).backward()
        found[key] = taken(model)
    return found


def tokens_of(batches: Mapping[Key, Batch]) -> dict[Key, int]:
    """Count the labels (not ignored) in each micro batch."""
    return {key: int((labels != IGNORED).sum()) for key, (_, labels) in batches.items()}
