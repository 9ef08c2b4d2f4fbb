"""Small models and data that the tests share; everything is seeded and float64."""

from __future__ import annotations

import time

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


class SlowDecoder(ByteDecoder):
    """A decoder that takes its time and no processor, so that there is time to do something to its ranks."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(dropout=0.0)
        self.pause_s = pause_s

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s if self.training else 0.0)
        return super().forward(ids)


def slow_decoder(pause_s: float = 0.04) -> SlowDecoder:
    return SlowDecoder(pause_s)


class WideBytes(nn.Module):
    """Matrices of three megabytes, which are worth swapping to a drive."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 64)
        self.up, self.down = nn.Linear(64, 12288), nn.Linear(12288, 64)
        self.head = nn.Linear(64, 257)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def wide_bytes() -> WideBytes:
    return WideBytes()


class Heads(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = 4
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.attention = Heads(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class ByteAttention(nn.Module):
    """A decoder over bytes (257: no even vocabulary) with attention, tied ends and dropout in the blocks."""

    def __init__(self, dropout: float = 0.1, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(AttentionBlock(width, dropout) for _ in range(4))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 257, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def byte_attention(dropout: float = 0.1) -> ByteAttention:
    return ByteAttention(dropout)
