"""The loss as a sum, never as a mean: only a sum can be added up over ranks and micro batches and stay right."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from shardwise.errors import DataError

IGNORED = -100


def token_loss_sum(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over the labels that count.

    Args:
        outputs: logits [..., vocabulary], or an object that has them as ``.logits``.
        labels: [...], ``-100`` where there is no label.
    """
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return functional.cross_entropy(
        logits.float().flatten(0, -2) if logits.dtype in (torch.bfloat16, torch.float16) else logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def count_labels(labels: Any) -> int:
    """How many terms a summed loss over ``labels`` has: integer labels that are not ``-100``, else samples."""
    if not isinstance(labels, torch.Tensor):
        raise DataError(
            f"labels are a {type(labels).__name__}, not a tensor; say how many loss terms they stand for with "
            "session.steps(loader, count=...)"
        )
    if labels.is_floating_point() or labels.is_complex():
        return labels.shape[0] if labels.ndim else 1
    return int((labels != IGNORED).sum())
