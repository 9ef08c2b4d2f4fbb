"""Transformer and convolution modules written the plain way, for every variation that a configuration can ask for."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from shardwise.model.architecture import Architecture


def norm_of(a: Architecture, width: int) -> nn.Module:
    if a.norm == "rms":
        return nn.RMSNorm(width)
    return nn.LayerNorm(width, elementwise_affine=a.norm == "layer", bias=a.norm_bias)


def rotate(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """x [batch, length, heads, dim] in fp32 as complex numbers."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * frequencies[None, : x.shape[1], None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        if a.fused_qkv:
            self.qkv_proj = nn.Linear(a.hidden, q + 2 * kv, bias=a.qkv_bias)
        else:
            self.q_proj = nn.Linear(a.hidden, q, bias=a.qkv_bias)
            self.k_proj = nn.Linear(a.hidden, kv, bias=a.qkv_bias)
            self.v_proj = nn.Linear(a.hidden, kv, bias=a.qkv_bias)
        self.o_proj = nn.Linear(q, a.hidden, bias=a.output_bias)
        if a.qk_norm != "none":
            full = a.qk_norm == "projection"
            self.q_norm, self.k_norm = (norm_of(a, w if full else a.head_dim) for w in (q, kv))

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        a = self.a
        sizes = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim]
        if a.fused_qkv:
            q, k, v = self.qkv_proj(x).split(sizes, -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if a.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, a.head_dim)) for t in (q, k, v))
        if a.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if a.positions == "rope":
            q, k = rotate(q, frequencies), rotate(k, frequencies)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=a.causal,
            enable_gqa=a.heads != a.kv_heads,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, a: Architecture) -> None:
        super().__init__()
        if a.gated:
            self.gate_proj = nn.Linear(a.hidden, a.ffn, bias=a.mlp_bias)
        self.up_proj = nn.Linear(a.hidden, a.ffn, bias=a.mlp_bias)
        self.down_proj = nn.Linear(a.ffn, a.hidden, bias=a.mlp_bias)
        self.gated = a.gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(functional.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.norms = nn.ModuleList([norm_of(a, a.hidden) for _ in range(a.block_norms)])
        self.self_attn, self.mlp = Attention(a), Mlp(a)

    def forward(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        norms = self.norms
        if self.a.parallel_block:
            y = norms[0](x)
            attended = self.self_attn(y, frequencies)
            return x + attended + self.mlp(norms[1](x) if len(norms) > 1 else y)
        attended = self.self_attn(norms[0](x), frequencies)
        if len(norms) == 4:
            x = x + norms[1](attended)
            return x + norms[3](self.mlp(norms[2](x)))
        x = x + attended
        return x + self.mlp(norms[1](x))


class Native(nn.Module):
    """A decoder of ``a``; ``frequencies`` is a buffer, as long as the longest sequence."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.embed_tokens = nn.Embedding(a.vocab, a.hidden)
        if a.positions == "learned":
            self.embed_positions = nn.Embedding((a.max_seq_len or 0) + a.position_offset, a.hidden)
        self.layers = nn.ModuleList([Block(a) for _ in range(a.layers)])
        self.norm = norm_of(a, a.hidden) if a.final_norm else nn.Identity()
        self.lm_head = nn.Linear(a.hidden, a.vocab, bias=a.head_bias)
        if a.tied:
            self.lm_head.weight = self.embed_tokens.weight
        angles = torch.zeros(a.max_seq_len or 64, a.head_dim // 2)
        self.register_buffer("frequencies", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        if self.a.positions == "learned":
            x = x + self.embed_positions(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.layers:
            x = block(x, self.frequencies)
        return self.lm_head(self.norm(x))


class Bottleneck(nn.Module):
    """Residual block of the usual image network."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = functional.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    """The network of 16 bottlenecks and 25,557,032 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], 64
        for width, number, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(number):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, 1000)

    def example_inputs(self) -> torch.Tensor:
        return torch.zeros(2, 3, 224, 224)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(self.stem(images)))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))
