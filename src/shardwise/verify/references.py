"""One process's gradients, computed on rank 0 and sent to all; and how well plain PyTorch agrees with itself."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.group import Ranks, broadcast_text
from shardwise.plan.plan import Plan
from shardwise.verify.batches import Batch, Key, Reference, reference
from shardwise.verify.gradients import TOLERANCE, compare

NOISY = 1e-6  # of plain PyTorch's own gradient, computed in two ways: above, there is nothing to compare with


class References:
    """One process's gradients, computed on rank 0 and sent to all; and how well plain PyTorch agrees with itself."""

    def __init__(self, make: Callable[[], nn.Module], ranks: Ranks) -> None:
        self.make, self.ranks = make, ranks
        self.tolerance = TOLERANCE
        self._known: dict[tuple[int, ...], Reference] = {}
        self._shapes = {n: p.shape for n, p in make().named_parameters() if p.requires_grad}

    def of(self, plan: Plan, step: int, batches: dict[Key, Batch]) -> Reference:
        """The reference of one global batch. Collective."""
        key = (plan.dims.dp, plan.grad_accum, plan.micro_batch or 1, step, len(batches))
        if key not in self._known:
            noise = 0.0 if self._known else self._noise(batches)
            self._known[key] = self._sent(batches, noise)
        return self._known[key]

    def _noise(self, batches: dict[Key, Batch]) -> float:
        """How far the gradient of the batch at once is from that of its samples one by one; on rank 0."""
        if not self.ranks.is_main:
            return 0.0
        whole = reference(self.make(), batches).gradients
        apart = reference(self.make(), batches, one_by_one=True).gradients
        return max((d.error for d in compare(whole, apart)), default=0.0)

    def _sent(self, batches: dict[Key, Batch], noise: float) -> Reference:
        text = ""
        found: Reference | None = None
        if self.ranks.is_main:
            found = reference(self.make(), batches)
            idle = [name for name, g in found.gradients.items() if g is None]
            text = json.dumps(
                {"idle": idle, "norm": found.norm, "loss": found.loss, "tokens": found.tokens, "noise": noise}
            )
        facts = json.loads(broadcast_text(text, self.ranks))
        self.tolerance = max(self.tolerance, 10 * facts["noise"])
        if not facts["noise"] <= NOISY:
            raise ModelError(
                "one process alone does not reproduce this model's gradient: a batch at once and its samples one by "
                f"one differ by {facts['noise']:.1e}. The model draws random numbers, or its samples depend on each "
                "other (batch norm), so no strategy can give the same gradient; use group norm or layer norm"
            )
        if self.ranks.world_size == 1 and found is not None:
            return found
        names = [name for name in self._shapes if name not in facts["idle"]]
        sizes = [self._shapes[name].numel() for name in names]
        flat = torch.empty(sum(sizes), dtype=torch.float64)
        if found is not None:
            flat = torch.cat([g.flatten() for g in found.gradients.values() if g is not None])
        dist.broadcast(flat, src=0, group=self.ranks.control)
        pieces = dict(zip(names, flat.split(sizes), strict=True))
        gradients = {n: pieces[n].view(s) if n in pieces else None for n, s in self._shapes.items()}
        return Reference(gradients, facts["norm"], facts["loss"], facts["tokens"])
