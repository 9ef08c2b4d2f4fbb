"""The router's own losses over all ranks of a micro step, added to its gradient where it is used.

The load-balancing loss of the Switch Transformer is ``experts × Σ f_i P_i``: ``f_i`` is the share of choices that took
expert i, ``P_i`` its mean probability, over the tokens of all layers as transformers has it. A product of means is no
sum over ranks, so the counts are added over the ranks before the backward. The router's z-loss (ST-MoE) is the mean
squared logsumexp of its logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from shardwise.plan.router_terms import RouterTerms


@dataclass
class MicroRouting:
    """What the routers of one micro batch chose, on this rank until `send`, then on all.

    ``sums`` are [choices of each expert, summed probability of each expert, tokens × layers, summed z]. ``factor``
    turns the mean of a micro step into this rank's part of the step's gradient.
    """

    terms: RouterTerms
    num_experts: int
    copies: int
    factor: float
    mask: torch.Tensor | None
    sums: torch.Tensor
    work: dist.Work | None = field(default=None)

    def add(self, logits: torch.Tensor, index: torch.Tensor) -> None:
        """Add one layer's choices."""
        wide = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
        rows = torch.ones(len(wide), dtype=torch.float64, device=wide.device) if self.mask is None else self.mask
        share = rows.unsqueeze(-1) * wide.softmax(-1)
        number = self.num_experts
        inside = index < number  # some routers send a token to no expert
        self.sums[:number].index_add_(0, index[inside], rows.unsqueeze(-1).expand(index.shape)[inside])
        self.sums[number : 2 * number] += share.sum(0)
        self.sums[2 * number] += rows.sum()
        self.sums[2 * number + 1] += (rows * wide.logsumexp(-1).square()).sum()

    def send(self) -> None:
        """Begin to add the sums over all ranks; they are needed in the backward."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.work = dist.all_reduce(self.sums, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the sums over all ranks."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.sums /= self.copies  # ranks of tensor parallel choose for the same tokens
        return self.sums

    def loss(self) -> torch.Tensor:
        """Return the weighted losses of the micro step, 0-d."""
        sums, number = self.wait(), self.num_experts
        rows = sums[2 * number].clamp_min(1.0)
        balance = number * (sums[:number] * sums[number : 2 * number]).sum() / rows**2
        return self.terms.aux_loss * balance + self.terms.z_loss * sums[2 * number + 1] / rows


class RouterLoss(Function):
    """Pass the weights of the chosen experts on; in the backward, add the router's losses to its logits' gradient."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, logits: torch.Tensor, routing: MicroRouting) -> torch.Tensor:
        """Return the weights."""
        ctx.routing = routing
        ctx.save_for_backward(logits)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the weights' gradient, and that of the losses for the logits."""
        (logits,) = ctx.saved_tensors
        routing: MicroRouting = ctx.routing
        sums, number = routing.wait(), routing.num_experts
        rows = sums[2 * number].clamp_min(1.0)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        share = wide.softmax(-1)
        shares = (sums[:number] / rows).to(wide.dtype)
        mean = (share * shares).sum(-1, keepdim=True)
        found = routing.terms.aux_loss * number * share * (shares - mean)
        if routing.terms.z_loss:
            found = found + 2.0 * routing.terms.z_loss * wide.logsumexp(-1, keepdim=True) * share
        found = found * (routing.factor / rows).to(wide.dtype)
        if routing.mask is not None:
            found = found * routing.mask.to(wide.dtype).unsqueeze(-1)
        return grad, found.to(logits.dtype), None
