"""The routers' own losses in one process, written out: a mistake in Shardwise's must not be on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.model.expert_layers import expert_layers
from shardwise.plan.router_terms import RouterTerms

_TERMS = "_shardwise_router_terms"


def set_terms(model: nn.Module, terms: RouterTerms) -> None:
    """Record which losses the routers of ``model`` have."""
    model.__dict__[_TERMS] = terms


def terms_of(model: nn.Module) -> RouterTerms:
    """Return the recorded losses."""
    found: RouterTerms = model.__dict__.get(_TERMS, RouterTerms())
    return found


class RouterReference:
    """What the routers of a model choose in the forwards of a global batch."""

    def __init__(self, model: nn.Module) -> None:
        self.terms, self.layers = terms_of(model), expert_layers(model)
        self._logits: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self._chosen: list[list[torch.Tensor]] = [[] for _ in self.layers]
        parts = dict(model.named_modules()) if self.terms.has_loss else {}
        self._hooks = []
        for at, layer in enumerate(self.layers if parts else ()):
            router = parts[layer.router or ""]
            self._hooks.append(router.register_forward_hook(lambda _, __, out, at=at: self._see(at, out)))
            seen = self._chosen[at]
            self._hooks.append(layer.module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1])))

    def _see(self, layer: int, found: Any) -> None:
        logits = found[0] if isinstance(found, tuple) else found
        self._logits[layer].append(logits.reshape(-1, self.layers[layer].num_experts))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def loss(self, micro_of_sample: Sequence[int]) -> torch.Tensor:
        """Return the mean over micro steps of the losses over their tokens, all ranks' and all layers'.

        ``micro_of_sample`` is the micro step of each sample of the global batch.
        """
        logits = [torch.cat(some) for some in self._logits]
        chosen = [torch.cat(some) for some in self._chosen]
        tokens = len(logits[0]) // len(micro_of_sample)
        micro = torch.tensor(micro_of_sample).repeat_interleave(tokens)
        steps, found = sorted(set(micro_of_sample)), logits[0].new_zeros(())
        for step in steps:
            here = micro == step
            z = torch.cat([one[here] for one in logits])
            picks = torch.cat([one[here] for one in chosen])
            number = z.shape[-1]
            f = torch.bincount(picks.flatten(), minlength=number).to(z.dtype) / len(z)
            balance = number * (f * z.softmax(-1).mean(0)).sum()
            found = found + self.terms.aux_loss * balance + self.terms.z_loss * z.logsumexp(-1).square().mean()
        return found / len(steps)
