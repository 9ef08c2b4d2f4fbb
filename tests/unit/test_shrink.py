"""The small model that ``verify`` compares strategies on: smaller, and in all else the model that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.gradcheck.shrink import Recipe, Shrunk, build_small, chosen, shrink, structure
from shardwise.gradcheck.shrink_config import ShrinkLimits, heads_for
from shardwise.parallel.materialize import build
from tests.families import family

transformers = pytest.importorskip("transformers")
CUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
NEED = ShrinkLimits(blocks=2, cuts=CUTS, seq_len=16, own_seq_len=256, vocab_size=257)
SIZES: dict[str, Any] = {
    "vocab_size": 5001,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}


def factory_of(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    configuration = getattr(transformers, kind)(**(SIZES | changes))
    configuration.use_cache = False
    return lambda: transformers.AutoModelForCausalLM.from_config(configuration)


def runs(factory: Callable[[], nn.Module], shrunk: Shrunk) -> nn.Module:
    """The small model, after a forward and backward; every trained parameter has a gradient."""
    module = build_small(factory, shrunk.recipe, 0)
    outputs = module(torch.zeros(2, 16, dtype=torch.int64))
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    logits.square().sum().backward()
    for parameter in module.parameters():
        assert parameter.dtype == torch.float64
        assert parameter.grad is not None or not parameter.requires_grad
    return module


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("LlamaConfig", {"num_key_value_heads": 4}),
        ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
        ("Qwen3Config", {"num_key_value_heads": 4, "head_dim": 64}),
        ("Qwen2Config", {"num_key_value_heads": 2}),
        ("MistralConfig", {"num_key_value_heads": 4, "head_dim": 16}),
        ("GPT2Config", {}),
        ("Gemma2Config", {"num_key_value_heads": 4, "head_dim": 16}),
        ("GPTNeoXConfig", {}),
        ("PhiConfig", {}),
        ("OPTConfig", {"word_embed_proj_dim": 256, "ffn_dim": 1024}),
    ],
)
def test_families_become_small_and_keep_their_structure(kind: str, changes: dict[str, Any]) -> None:
    factory = factory_of(kind, **changes)
    shrunk = shrink(factory, NEED)
    assert not shrunk.kept
    assert shrunk.num_parameters < shrunk.was_parameters / 10
    module, full = runs(factory, shrunk), build(factory, 0, real=False)
    assert structure(module) == structure(full)
    small, own = module.config, full.config
    ratio = own.num_attention_heads / (getattr(own, "num_key_value_heads", None) or own.num_attention_heads)
    assert (
        small.num_attention_heads / (getattr(small, "num_key_value_heads", None) or small.num_attention_heads) == ratio
    )
    assert small.num_attention_heads % 4 == 0
    assert shrunk.vocab_size == small.vocab_size == 257 + (5001 - 257) % NEED.granule
    assert small.tie_word_embeddings == own.tie_word_embeddings


def test_the_structure_tells_models_apart() -> None:
    base = {"num_key_value_heads": 4, "head_dim": 16}
    made = {
        "llama": structure(build(factory_of("LlamaConfig", **base), 0, real=False)),
        "biased": structure(build(factory_of("LlamaConfig", **base, attention_bias=True), 0, real=False)),
        "tied": structure(build(factory_of("LlamaConfig", **base, tie_word_embeddings=True), 0, real=False)),
        "qwen3": structure(build(factory_of("Qwen3Config", **base), 0, real=False)),
        "mistral": structure(build(factory_of("MistralConfig", **base), 0, real=False)),
    }
    assert len(set(made.values())) == len(made)
    assert structure(build(factory_of("LlamaConfig", **base, num_hidden_layers=3), 0, real=False)) == made["llama"]


def test_each_kind_of_block_stays() -> None:
    """Mixed layers: windows on some of them, experts on some of them."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    factory = factory_of(
        "Gemma3TextConfig", num_key_value_heads=4, head_dim=16, layer_types=kinds * 2, sliding_window=64
    )
    shrunk = shrink(factory, NEED)
    small = runs(factory, shrunk).config
    assert set(small.layer_types) == set(kinds)
    assert len(small.layer_types) == small.num_hidden_layers == 4
    assert small.sliding_window == 16 * 64 // 256, "a window that bites in the model's own samples bites in short ones"
    assert chosen(["a", "a", "a", "b", "a", "c"], 2) == [0, 3, 4, 5]
    assert chosen(["a"] * 10, 4) == [0, 3, 6, 9]
    assert chosen(["a"], 4) == [0]


def test_a_window_that_does_not_bite_stays() -> None:
    factory = factory_of("MistralConfig", num_key_value_heads=4, sliding_window=4096)
    assert runs(factory, shrink(factory, NEED)).config.sliding_window == 4096


@pytest.mark.parametrize(
    ("heads", "key_values", "cuts", "expected"),
    [
        (32, 8, ((1, 1),), (8, 2)),
        (32, 8, ((2, 1),), (16, 4)),
        (32, 32, ((2, 2),), (4, 4)),
        (32, 1, ((2, 1),), (32, 1)),
        (6, 6, ((2, 1),), (4, 4)),
        (6, 2, ((2, 1),), (6, 2)),
        (9, 3, ((1, 1),), (6, 2)),
        (7, 2, ((2, 1),), (7, 2)),
        (64, 8, ((8, 1),), (64, 8)),
    ],
)
def test_heads_keep_their_ratio_and_what_they_allow(
    heads: int, key_values: int, cuts: tuple[tuple[int, int], ...], expected: tuple[int, int]
) -> None:
    assert heads_for(heads, key_values, cuts) == expected


def test_dropout_is_taken_out_and_said() -> None:
    factory = factory_of("GPT2Config")
    shrunk = shrink(factory, NEED)
    assert any(line.startswith("dropout 0 instead of") and "0.1" in line for line in shrunk.changes)
    module = build_small(factory, shrunk.recipe, 0).train()
    ids = torch.arange(16)[None]
    assert torch.equal(module(ids).logits, module(ids).logits)


def test_frozen_blocks_stay_frozen() -> None:
    made = factory_of("LlamaConfig", num_key_value_heads=4)

    def factory() -> nn.Module:
        module = made()
        for name, parameter in module.named_parameters():
            frozen = name.startswith(tuple(f"model.layers.{i}." for i in range(6))) or "embed" in name
            parameter.requires_grad_(not frozen)
        return module

    module = runs(factory, shrink(factory, NEED))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert not any(name.startswith("model.layers.0.") or "embed" in name for name in trained)
    assert any(name.startswith("model.layers.1.") for name in trained)


def test_every_weight_is_random_and_a_function_of_the_seed() -> None:
    factory = factory_of("LlamaConfig", num_key_value_heads=4)
    recipe = shrink(factory, NEED).recipe
    one, same, other = (dict(build_small(factory, recipe, seed).named_parameters()) for seed in (1, 1, 2))
    for name, parameter in one.items():
        assert torch.equal(parameter, same[name])
        assert not torch.equal(parameter, other[name])
        assert parameter.unique().numel() > 1, f"{name} is a constant, which would hide mistakes"
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_blocks_are_taken_out_of_a_factorys_model() -> None:
    shrunk = shrink(lambda: family("own", layers=9), NEED)
    assert shrunk.changes == ("2 of 9 blocks of 'blocks'",)
    assert "widths are unchanged" in shrunk.kept[0]
    module = runs(lambda: family("own", layers=9), shrunk)
    assert [name for name, _ in module.blocks.named_children()] == ["0", "1"]


class _Counted(nn.Module):
    """Its forward counts blocks by a number of its own, so none can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(8, 300)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index in range(5):
            x = x + self.blocks[index](x)
        return self.head(x)


class _Gated(_Counted):
    """Each block has a gate elsewhere: without the block, its gate takes part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block, gate in zip(self.blocks, self.gates, strict=False):
            x = x + block(x) * gate
        return self.head(x)


@pytest.mark.parametrize(("kind", "why"), [(_Counted, "it does not run"), (_Gated, "takes no part in the loss")])
def test_a_model_that_needs_its_blocks_keeps_them(kind: type[nn.Module], why: str) -> None:
    shrunk = shrink(kind, NEED)
    assert not shrunk.changes
    assert "the 5 blocks of 'blocks' stay" in shrunk.kept[0]
    assert why in shrunk.kept[0]
    assert shrunk.num_parameters == shrunk.was_parameters
    runs(kind, shrunk)
