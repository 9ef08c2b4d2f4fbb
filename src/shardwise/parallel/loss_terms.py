"""`LossTerms`: what a label's loss is beside its cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LossTerms:
    """Label smoothing (Szegedy 2016, as PyTorch has it) and the z-loss of PaLM (Chowdhery 2022, section 5).

    A label's loss is ``logsumexp - target + z_loss × logsumexp²``, where ``target`` is the mean of the logits under
    the smoothed label: ``1 - label_smoothing`` on the label's own, the rest spread evenly over the vocabulary.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def target(self, own: torch.Tensor, total: torch.Tensor | None, vocab: int) -> torch.Tensor:
        """Return the mean logit under the smoothed label, from its ``own`` and the ``total`` of all, or of a part."""
        if total is None:
            return own
        return own * (1.0 - self.label_smoothing) + total * (self.label_smoothing / vocab)

    def to_gradient(
        self, softmax: torch.Tensor, logsumexp: torch.Tensor, at: torch.Tensor, own: Any, vocab: int
    ) -> None:
        """Turn ``softmax`` [tokens, ...] of all ``vocab`` columns, or of a part, into the logits' gradient, in place.

        The label's column is ``at`` [tokens, 1]; ``own`` is 1 where it is in this part, else 0.
        """
        if self.z_loss:
            softmax.mul_(1.0 + 2.0 * self.z_loss * logsumexp)
        if self.label_smoothing:
            softmax.sub_(self.label_smoothing / vocab)
        softmax.scatter_(-1, at, softmax.gather(-1, at).sub_(own * (1.0 - self.label_smoothing)))
