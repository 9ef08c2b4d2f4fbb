"""Loss as a sum, not a mean: only sums can be added over ranks and micro batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from shardwise.distributed.comm_timer import COMM_TIMER
from shardwise.errors import DataError, ModelError
from shardwise.parallel.chunked_loss import LateLogits
from shardwise.parallel.loss_terms import LossTerms

IGNORED = -100


def token_loss_sum(
    outputs: Any, labels: torch.Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> torch.Tensor:
    """Sum the cross-entropy over labels that are not ``-100``.

    Args:
        outputs: logits [..., vocabulary], or an object that has them as ``.logits``. They may be sharded over the
            vocabulary (a DTensor, as ``loss_parallel`` leaves them); they are not gathered then. Under ``loss_chunks``
            they are computed here, a chunk at a time.
        labels: [...], ``-100`` where there is no label.
        label_smoothing: the share of a label that is spread over the vocabulary, as in `functional.cross_entropy`.
        z_loss: the weight of the squared logsumexp of the logits of each label (PaLM's 1e-4).
    """
    terms = LossTerms(label_smoothing, z_loss)
    logits = outputs if isinstance(outputs, torch.Tensor | LateLogits) else outputs.logits
    if isinstance(logits, LateLogits):
        return logits.loss_sum(labels, IGNORED, terms)
    if isinstance(logits, DTensor):
        return _sharded_loss_sum(logits, labels, terms)
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    wide, flat = wide.flatten(0, -2), labels.flatten()
    found = functional.cross_entropy(wide, flat, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        found = found + z_loss * wide.logsumexp(-1).square().masked_fill(flat == IGNORED, 0.0).sum()
    return found


def _sharded_loss_sum(logits: DTensor, labels: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """Sum the cross-entropy over vocabulary-sharded logits, each rank its shard."""
    if tuple(logits.placements) != (Shard(logits.ndim - 1),):
        raise ModelError(
            f"token_loss_sum takes logits that are full or sharded over the vocabulary only, got {logits.placements}; "
            "pass what the model returned, or set parallel.loss_parallel to false"
        )
    mesh, vocab = logits.device_mesh, logits.shape[-1]
    first = mesh.get_local_rank() * -(-vocab // mesh.size())  # as DTensor splits: the last parts may be smaller
    local = logits.to_local().flatten(0, -2)
    found: torch.Tensor = _ShardedCrossEntropy.apply(local, labels.flatten(), first, vocab, mesh.get_group(), terms)
    return found


class _ShardedCrossEntropy(Function):
    """Summed cross-entropy of logits [tokens, part of the vocabulary].

    Fp32, or float64 for float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        labels: torch.Tensor,
        first: int,
        vocab: int,
        group: dist.ProcessGroup,
        terms: LossTerms,
    ) -> torch.Tensor:
        counts = labels != IGNORED
        torch._assert_async((~counts | ((labels >= 0) & (labels < vocab))).all(), f"labels: 0 to {vocab - 1}, or -100")
        wide = local if local.dtype == torch.float64 else local.float()
        tokens, width = wide.shape
        largest = wide.amax(-1) if width else wide.new_full((tokens,), -torch.inf)
        with COMM_TIMER.part("exposed_tp"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        at = labels - first
        here = counts & (at >= 0) & (at < width)
        at = at.masked_fill(~here, 0)
        sums = wide.new_zeros(2, tokens)  # of the exponentials, and this rank's part of the target
        if width:
            torch.sum((wide - largest.unsqueeze(-1)).exp_(), -1, out=sums[0])
            own = wide.gather(-1, at.unsqueeze(-1)).squeeze(-1).masked_fill_(~here, 0)
            sums[1] = terms.target(own, wide.sum(-1) if terms.label_smoothing else None, vocab)
        with COMM_TIMER.part("exposed_tp"):
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log_().add_(largest)
        ctx.terms, ctx.vocab = terms, vocab
        ctx.save_for_backward(local, log_total, at, here, counts)
        loss = log_total - sums[1] + (terms.z_loss * log_total.square() if terms.z_loss else 0.0)
        return loss.masked_fill_(~counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        local, log_total, at, here, counts = ctx.saved_tensors
        wide = local if local.dtype == torch.float64 else local.float()
        found = (wide - log_total.unsqueeze(-1)).exp_()  # this rank's part of the softmax
        if found.shape[-1]:
            own = here.to(found.dtype).unsqueeze(-1)
            ctx.terms.to_gradient(found, log_total.unsqueeze(-1), at.unsqueeze(-1), own, ctx.vocab)
        found.mul_((counts * grad.to(found.dtype)).unsqueeze(-1))
        return found.to(local.dtype), None, None, None, None, None


def full_logits(outputs: Any) -> torch.Tensor:
    """Return all logits of ``outputs`` on this rank: gathered over the vocabulary, or computed where they are late."""
    logits = outputs if isinstance(outputs, torch.Tensor | LateLogits) else outputs.logits
    if isinstance(logits, LateLogits):
        return logits.full()
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def count_labels(labels: Any) -> int:
    """Count the terms of a summed loss: integer labels other than ``-100``, else samples."""
    if not isinstance(labels, torch.Tensor):
        raise DataError(
            f"labels are a {type(labels).__name__}, not a tensor; give the number of loss terms with "
            "session.steps(loader, count=...)"
        )
    if labels.is_floating_point() or labels.is_complex():
        return labels.shape[0] if labels.ndim else 1
    return int((labels != IGNORED).sum())
