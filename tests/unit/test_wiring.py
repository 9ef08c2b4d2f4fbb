"""How a model's forward goes through its blocks: facts of the families, and what cannot be cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.read import read_model
from shardwise.model.wiring import BlockCall, Wiring, read_wiring
from shardwise.parallel.apply import stop_caching
from shardwise.parallel.materialize import build
from shardwise.plan.stage_balance import balanced_stages
from tests.families import FAMILIES, VOCAB, WIDTH, family

EMBEDDING = {
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "own": {"tokens.weight", "places"},
    "bert": {
        *("bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight"),
        *("bert.embeddings.token_type_embeddings.weight", "bert.embeddings.LayerNorm.weight"),
        "bert.embeddings.LayerNorm.bias",
    },
}


def wiring(module: nn.Module, sample: Any = None) -> Wiring:
    stop_caching(module)
    return read_wiring(module, read_model(module), 2, sample)


@pytest.mark.parametrize("name", FAMILIES)
def test_facts_of_every_family(name: str) -> None:
    module = family(name)
    before = copy.deepcopy(module.state_dict())
    identity = {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)}
    random = torch.random.get_rng_state()
    found = wiring(module)
    spec = read_model(module)
    assert found.before == EMBEDDING.get(name, {"model.embed_tokens.weight"})
    outside = {n for n in identity if not any(n.startswith(f"{block}.") for block in spec.blocks)}
    unused = {"cls.predictions.bias"} if name == "bert" else set()  # the same as the decoder's, which is what is used
    assert found.after == outside - found.before - unused
    assert set(found.calls) == set(spec.blocks)
    assert set(found.calls.values()) == {BlockCall(argument=0, returns=0)}
    assert len(set(found.block_flops)) == 1
    assert found.block_flops[0] > found.before_flops
    assert found.after_flops >= 2 * 16 * WIDTH * VOCAB
    assert all(torch.equal(value, before[n]) for n, value in module.state_dict().items())
    assert identity == {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)}
    assert torch.equal(random, torch.random.get_rng_state())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_parameters_may_be_on_the_meta_device() -> None:
    real, meta = family("own"), build(lambda: family("own"), 0, real=False)
    assert next(meta.parameters()).device.type == "meta"
    assert wiring(meta) == wiring(real)


def test_experts() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    found = wiring(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert found.before == {"model.embed_tokens.weight"}
    assert found.block_flops[0] > found.after_flops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        found: torch.Tensor = x + self.inner(x)
        return found if other is None else found + other


class Pair(Block):
    def forward(self, *, other: Any = None, x: torch.Tensor) -> Any:
        return super().forward(x), None, "aside"


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.embed(ids)))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_keywords_and_tuples() -> None:
    class Keywords(Model):
        def through(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x=x)[0]
            return x

    found = wiring(Keywords(Pair))
    assert set(found.calls.values()) == {BlockCall(argument="x", returns=3)}
    assert (found.before, found.after) == ({"embed.weight"}, {"head.weight", "head.bias"})


def test_a_sample_says_what_the_model_takes() -> None:
    class Two(Model):
        def forward(self, features: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
            return self.head(self.through(features + shift))

    found = wiring(Two(), {"features": torch.zeros(2, 3, 8), "shift": torch.zeros(8)})
    assert not found.before
    assert found.block_flops[0] == 2 * 2 * 3 * 8 * 8


def test_what_needs_no_values_of_the_hidden_state_may_be_anywhere() -> None:
    class Shapes(Model):
        def through(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, torch.zeros_like(x) + torch.ones(x.shape[-1]))
            return x

    assert len(wiring(Shapes()).calls) == 3


class Between(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * 0.5)
        return x


class Skips(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first), first)


class SkipsToTheHead(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](first)) + first


class FromTheEmbedding(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        begun = x
        for block in self.blocks:
            x = block(x, begun)
        return x


class FromTheEmbeddingToTheHead(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(x) + x


class ParameterBetween(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.scale * 2)
        return x


class ParameterInside(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class Twice(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(super().through(x))


class Backwards(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Pieces(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.inner(x)
        return x


class OfValues(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(x) if x.sum() > 0 else x


class BlockOutside(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(x) @ self.blocks[0].inner.weight


class Listed(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)[0]
        return x


class AList(Block):
    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        return [super().forward(x)]


class Cached(Block):
    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        found = super().forward(x) + (sum(other) if other else 0.0)
        other.append(x * 2)
        return found


class Channel(Model):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Between(),
            r"computes with the hidden state \(mul\) between block 'blocks.0' and the next one; move",
        ),
        (
            Skips(),
            r"'blocks.2' uses a tensor of block 'blocks.0' that is not the hidden .* \(a skip connection\)",
        ),
        (SkipsToTheHead(), "what comes after the last block uses a tensor of block 'blocks.0'"),
        (FromTheEmbedding(), "block 'blocks.1' uses a tensor that is computed from 'embed.weight' before the first"),
        (FromTheEmbeddingToTheHead(), "after the last block uses a tensor that is computed from 'embed.weight'"),
        (ParameterBetween(), "'scale' is used between the blocks, outside of any"),
        (ParameterInside(), "'scale' is a parameter of the model outside of its blocks and used by block 'blocks.0'"),
        (Twice(), "block 'blocks.0' runs more than once in a forward"),
        (Backwards(), "block 'blocks.2' runs before block 'blocks.0': not in their order"),
        (Pieces(), "block 'blocks.0' and 2 more is not called in the forward"),
        (OfValues(), "does not run there: .* pass session.prepare a sample"),
        (BlockOutside(), "'blocks.0.inner.weight' is a parameter of block 'blocks.0' and used by the model outside"),
        (Listed(AList), "block 'blocks.0' returns a list; a stage can hand on a tensor, or a tuple"),
        (Channel(Cached), "block 'blocks.1' uses a tensor of block 'blocks.0' that is not the hidden state"),
        (Model(blocks=0), r"\+pp2 splits a model between its repeated blocks .* has none"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), "use group norm or layer norm"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_cut_is_refused_by_name(module: nn.Module, message: str) -> None:
    before = {(id(part), key): id(p) for part in module.modules() for key, p in part._parameters.items()}
    with pytest.raises(ModelError, match=message) as caught:
        wiring(module)
    assert "without +pp" in str(caught.value)
    assert before == {(id(part), key): id(p) for part in module.modules() for key, p in part._parameters.items()}
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize(
    ("blocks", "before", "after", "stages", "expected"),
    [
        ([1.0] * 8, 0.0, 0.0, 4, (2, 2, 2, 2)),
        ([1.0] * 7, 0.0, 0.0, 3, (3, 2, 2)),
        ([1.0] * 8, 0.0, 3.0, 2, (6, 2)),
        ([1.0] * 8, 2.0, 2.0, 4, (1, 3, 3, 1)),
        ([1.0] * 4, 0.0, 50.0, 4, (1, 1, 1, 1)),
        ([1.0, 1.0, 1.0, 6.0], 0.0, 0.0, 2, (3, 1)),
        ([2.0] * 12, 0.0, 13.0, 4, (4, 3, 4, 1)),
    ],
)
def test_stages_are_balanced_by_cost(
    blocks: list[float], before: float, after: float, stages: int, expected: tuple[int, ...]
) -> None:
    found = balanced_stages(blocks, before, after, stages)
    assert sum(found) == len(blocks)

    def dearest(counts: tuple[int, ...]) -> float:
        ends = [sum(counts[: stage + 1]) for stage in range(stages)]
        costs = [sum(blocks[end - count : end]) for count, end in zip(counts, ends, strict=True)]
        costs[0] += before
        costs[-1] += after
        return max(costs)

    assert dearest(found) == dearest(expected)
    assert sorted(found) == sorted(expected)


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be 4 stages"):
        balanced_stages([1.0] * 3, 0.0, 0.0, 4)
