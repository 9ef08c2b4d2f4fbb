"""What the routers of a mixture of experts are trained with, beside the model's loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterTerms:
    """Weights of the router's losses, and the step of its bias: each is off at 0.

    ``bias_rate`` is DeepSeek-V3's: after each update the bias of an expert with more than the mean load falls by it,
    and that of one with less rises.
    """

    aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @property
    def has_loss(self) -> bool:
        """Return whether the routers have a loss of their own."""
        return bool(self.aux_loss or self.z_loss)
