"""Factories for the golden messages: one that is right, and one for each way to get a factory wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

NUMBER = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Tiny(nn.Module):
    """Bytes in, logits out; a block or more in between."""

    def __init__(self, width: int, vocab: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InATuple(Tiny):
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(ids),)


class MeanOverTime(Tiny):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).mean(1)


class FailsOnRankOne(Tiny):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("rank 1 was told to fail")  # the line that a message must name
        return super().forward(ids)


def tiny(width: int = 8, vocab: int = 257, blocks: int = 2) -> nn.Module:
    return Tiny(width, vocab, blocks)


def without_blocks() -> nn.Module:
    return Tiny(8, 257, 1)


def no_module() -> dict[str, int]:
    return {"layers": 2}


def raises() -> nn.Module:
    raise RuntimeError("the table of sizes is empty")


def in_a_tuple() -> nn.Module:
    return InATuple(8, 257, 2)


def one_for_a_sample() -> nn.Module:
    return MeanOverTime(8, 257, 2)


def fails_on_rank_one() -> nn.Module:
    return FailsOnRankOne(8, 257, 2)


def no_optimizer(params: list[nn.Parameter], lr: float) -> int:
    return NUMBER
