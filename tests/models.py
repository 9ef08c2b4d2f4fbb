"""Small models and data that the tests share; everything is seeded and float64."""

from __future__ import annotations

import torch
from torch import nn

VOCAB, WIDTH, LENGTH = 23, 12, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]  # causal, no attention needed
        return x + self.down(torch.tanh(self.up(self.norm(mixed.to(x.dtype)))))


class Decoder(nn.Module):
    """A byte-sized decoder: uneven vocabulary, optional tie, optional frozen block, a 1-element parameter."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def decoder(seed: int = 0, **options: bool) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**options).double()


def ragged_batches(number: int, micro_batch: int = 2, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches whose labels are ragged: padding of every length, and each fifth without a label at all."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(number):
        ids = torch.randint(VOCAB, (micro_batch, LENGTH + 1), generator=generator)
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        for row in range(micro_batch):
            keep = int(torch.randint(1, LENGTH + 1, (), generator=generator))
            labels[row, keep:] = -100
        if index % 5 == 1:
            labels[:] = -100
        batches.append((inputs, labels))
    return batches


class ByteDecoder(Decoder):
    """The decoder over bytes, with dropout, so that a resumed run must also resume its luck."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(tied=True)
        self.embed = nn.Embedding(257, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)  # it is the head, too
        self.head = nn.Linear(WIDTH, 257, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def byte_decoder(dropout: float = 0.1) -> ByteDecoder:
    return ByteDecoder(dropout)
