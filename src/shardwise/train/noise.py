"""NEFTune: noise on the embedded tokens while training (Jain 2023, arXiv 2310.05914)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.read import clean_name


def embedding_name(model: nn.Module) -> str:
    """Return the name of the embedding of the input's tokens.

    Raises:
        ModelError: the model does not say which it is, and has not exactly one.
    """
    names = {id(part): name for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    try:
        given = model.get_input_embeddings()  # type: ignore[operator]  # of transformers
    except (AttributeError, NotImplementedError):
        given = None
    if id(given) in names:
        return names[id(given)]
    if len(names) == 1:
        return next(iter(names.values()))
    listed = f"{len(names)} nn.Embedding ({', '.join([*names.values()][:3])})" if names else "no nn.Embedding"
    raise ModelError(
        f"train.neftune_alpha: {type(model).__name__} has {listed}; define get_input_embeddings() that returns the "
        "tokens' nn.Embedding, or remove neftune_alpha"
    )


class EmbeddingNoise:
    """Forward hook that adds uniform noise of up to ``alpha / sqrt(length × width)`` while the module trains.

    ``ranks`` share a sample's length (context parallel).
    """

    def __init__(self, alpha: float, embedding: nn.Module, ranks: int = 1) -> None:
        self.alpha, self.embedding, self.ranks = alpha, embedding, ranks
        embedding.register_forward_hook(self._add)

    @classmethod
    def on(cls, alpha: float, name: str, module: nn.Module, ranks: int) -> EmbeddingNoise | None:
        """Hook the embedding ``name`` of a prepared module; ``None`` where another pipeline stage has it."""
        for found, part in module.named_modules():
            if clean_name(f"{found}.").rstrip(".") == name:
                return cls(alpha, part, ranks)
        return None

    def _add(self, embedding: nn.Module, args: Any, outputs: torch.Tensor) -> torch.Tensor | None:
        if not embedding.training:
            return None
        length, width = outputs.shape[-2:]
        most = self.alpha / math.sqrt(length * self.ranks * width)
        return outputs + torch.empty_like(outputs).uniform_(-most, most)
