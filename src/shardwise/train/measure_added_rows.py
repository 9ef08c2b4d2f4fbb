"""What the rows of added tokens are when training begins, measured on the weights of all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.added_rows import embedding_names
from shardwise.checkpoint.added_tokens import AddedTokens
from shardwise.checkpoint.layout import box_of, local_of, part_of
from shardwise.model.read import clean_name
from shardwise.train.session_interface import TrainingSession


@dataclass(frozen=True)
class AddedRowsMeasurement:
    """Rows of ``added`` tokens in the parameters ``names``.

    ``distance`` is the farthest that one is from the mean of the other rows, relative to the mean's largest element;
    ``None`` where it was not measured.
    """

    added: AddedTokens
    names: tuple[str, ...]
    distance: float | None = None

    @classmethod
    def of(cls, module: nn.Module, added: AddedTokens) -> Self:
        """Find the parameters that have a row for each token, in a model that no plan has changed."""
        return cls(added, tuple(embedding_names(module)))

    def measured(self, session: TrainingSession) -> Self:
        """Measure the rows on every rank, each its own part. Collective."""
        home, old = part_of(session.module), self.added.old
        here: dict[str, torch.Tensor] = {}
        for raw, parameter in session.module.named_parameters():
            name = clean_name(raw) if home is None else home.canonical(clean_name(raw))
            if name in self.names and parameter.shape[:1] == (self.added.new,):
                here[name] = parameter
        found = []
        for name in self.names:
            width = _agreed(
                torch.tensor([float(math.prod(here[name].shape[1:])) if name in here else 0.0]),
                session,
                dist.ReduceOp.MAX,
            )
            sums = torch.zeros(2, int(width), dtype=torch.float64)  # of the old rows on all ranks, and how many
            rows = torch.zeros(0, 0, dtype=torch.float64)
            columns = slice(0, 0)
            if name in here:
                box = box_of(here[name])
                local = local_of(here[name]).reshape(box.lengths[0], math.prod(box.lengths[1:])).double().cpu()
                begin = box.offsets[1] if len(box.offsets) > 1 else 0
                columns, kept = slice(begin, begin + local.shape[1]), min(max(old - box.offsets[0], 0), len(local))
                sums[0, columns], sums[1, columns], rows = local[:kept].sum(0), kept, local[kept:]
            total, count = _agreed(sums, session, dist.ReduceOp.SUM)
            mean = total / count
            off = float((rows - mean[columns]).abs().max()) if rows.numel() else 0.0
            if width:
                worst = _agreed(torch.tensor([off]), session, dist.ReduceOp.MAX)
                found.append(float(worst) / float(mean.abs().max().clamp_min(1e-30)))
        return replace(self, distance=max(found, default=None))


def _agreed(values: torch.Tensor, session: TrainingSession, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce a tensor over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    sent = values.to(session.device)
    dist.all_reduce(sent, op=how)
    return sent.cpu()
