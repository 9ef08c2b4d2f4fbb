"""The loss of a config: the cross-entropy of its labels, or the user's own function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.import_object import load_object
from shardwise.train.config import Config
from shardwise.train.evaluate import LossSum
from shardwise.train.loss import count_labels, token_loss_sum


def loss_of(config: Config) -> LossSum:
    """Return the summed loss of outputs and labels.

    Raises:
        ConfigError: ``model.loss`` cannot be imported.
    """
    named = config.model.loss
    if named is None:
        return token_loss_sum
    function = load_object(named, "model.loss")
    where = f"model.loss '{named}'"

    def own(outputs: Any, labels: Any) -> Tensor:
        found = function(outputs, labels)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
            found_type = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
            raise UserError(f"{where} returned {found_type}; return the sum of the loss, a tensor, and its count")
        total, count = found
        if total.ndim:
            raise UserError(f"{where} returned a sum of shape {tuple(total.shape)}; it must be 0-d, as torch.sum gives")
        number = int(count.item() if isinstance(count, torch.Tensor) else count)
        if number != (labelled := count_labels(labels)):
            raise UserError(
                f"{where} returned the count {number} for labels of which {labelled} count, and the sum of all ranks "
                "is divided by the latter; whole-number labels count but for -100, floating-point ones by sample"
            )
        return total

    return own
