"""Tiny models of the families that Shardwise is used with, in float64, random weights under a seed, no dropout."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCAB = 64
HEADS = 4
KV_HEADS = 2
WIDTH = 32
INNER = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
_LLAMA_LIKE: dict[str, Any] = {**_COMMON, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS}

FAMILIES = ("llama", "qwen3", "gpt2", "mistral", "gemma", "bert", "own")


def family(name: str, *, layers: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model that takes token ids [samples, length] and gives logits (as ``.logits``, or alone for ``own``).

    ``wide-llama`` has rows of 64 and 128, which can be packed in blocks of 64.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _Own(layers) if name == "own" else _transformers(name, layers)
        for parameter in module.parameters():  # biases and norms start as constants, which would hide mistakes
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        for part in module.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.__class__ = _exact(type(part))
        return module.to(dtype)


@functools.cache
def _exact(norm: type[nn.Module]) -> type[nn.Module]:
    """The same norm in the dtype of its input: transformers' own compute in fp32, which would be all that is seen."""
    one = 1.0 if norm.__name__ == "GemmaRMSNorm" else 0.0

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = getattr(self, "variance_epsilon", None) or self.eps
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + eps)
        return hidden_states * scale * (one + self.weight)

    return type(norm.__name__, (norm,), {"forward": forward})


def configuration(name: str, layers: int) -> Any:
    """The transformers configuration of one of the families."""
    import transformers

    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=layers, n_head=HEADS, n_positions=64, n_inner=INNER,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    if name == "bert":
        return transformers.BertConfig(
            **_COMMON, num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
        "gemma": transformers.GemmaConfig,
    }
    if name == "wide-llama":
        wide = {**_LLAMA_LIKE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        return transformers.LlamaConfig(**wide, num_hidden_layers=layers, tie_word_embeddings=False, use_cache=False)
    tied = name in ("gemma", "qwen3")
    return kinds[name](**_LLAMA_LIKE, num_hidden_layers=layers, tie_word_embeddings=tied, use_cache=False)


def _transformers(name: str, layers: int) -> nn.Module:
    import transformers

    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    module: nn.Module = kind.from_config(configuration(name, layers))
    return module


class _Own(nn.Module):
    """A decoder as users write them: fused projection, learned positions, biases, an untied head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(_Block() for _ in range(layers))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.tokens(ids) * math.sqrt(WIDTH) + self.places[position_ids]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = _Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.width = WIDTH
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (
            part.view(samples, length, self.n_head, -1).transpose(1, 2) for part in self.qkv(x).split(self.width, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(samples, length, -1))
