"""LoRA and QLoRA profiles, against a hand-written module with adapters that is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.model.architecture import Architecture
from shardwise.model.catalogue import find_architecture
from shardwise.model.convnet import RESNET_50, convnet_profile
from shardwise.model.lora import NF4_BYTES, unpacked_elements, with_adapters
from shardwise.model.profile import Unit
from shardwise.model.trace import trace_module
from shardwise.model.transformer import profile_of
from shardwise.plan.strategy import parse_strategy
from tests.native import Native

RANK, LENGTH = 4, 64
SHAPE = Architecture(
    name="tiny",
    family="made-up",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    ffn=176,
    vocab=100,
    max_seq_len=128,
)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def adapted(targets: set[str]) -> nn.Module:
    module = Native(SHAPE).requires_grad_(False)
    for block in module.layers:
        for part in (block.self_attn, block.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear) and name.removesuffix("_proj") in targets:
                    setattr(part, name, LoraLinear(child))
    return module


def kept(unit: Unit) -> int:
    return sum(op.saved for op in unit.ops)


@pytest.mark.parametrize("targets", [{"q", "k", "v", "o", "gate", "up", "down"}, {"q", "v"}, {"v"}, {"up"}, {"o"}])
def test_a_profile_with_adapters_is_what_a_trace_gives(targets):
    everything = len(targets) == 7
    profile = with_adapters(profile_of(SHAPE, LENGTH), "lora", RANK, None if everything else targets)
    traced = trace_module(lambda: adapted(targets), seq_len=LENGTH)
    assert profile.num_parameters == traced.num_parameters
    assert profile.num_trainable == traced.num_trainable
    block = profile.units[1]
    later = next(u for u in reversed(traced.units) if u.kind == "block")  # nothing in front of the first one trains
    assert kept(block) == kept(later)
    assert block.flops == later.flops
    assert [op.weight for op in block.ops if op.kind == "matmul"] == [
        op.weight for op in later.ops if op.kind == "matmul"
    ]
    assert [op.kept_by_selective for op in block.ops if op.kind == "matmul"] == [
        op.kept_by_selective for op in later.ops if op.kind == "matmul"
    ]
    assert kept(profile.units[-1]) == kept(traced.units[-1])
    assert kept(block) < kept(profile_of(SHAPE, LENGTH).units[1]) + 7 * LENGTH * RANK + 1


def test_what_is_frozen_and_how_it_is_held():
    base = profile_of(find_architecture("llama-3.1-8b"), 2048)
    lora, qlora = (with_adapters(base, kind) for kind in ("lora", "qlora"))
    assert lora.num_trainable == qlora.num_trainable == 41_943_040  # rank 16, all linear layers
    assert lora.num_parameters - lora.num_trainable == base.num_parameters
    held = {w.name: w.itemsize for unit in qlora.units for w in unit.weights}
    assert held["mlp.down_proj.weight"] == NF4_BYTES == pytest.approx(4.127 / 8, rel=1e-4)
    assert held["input_layernorm.weight"] == held["embed_tokens.weight"] == held["lm_head.weight"] == 2.0
    assert held["mlp.down_proj.lora_A.weight"] == 4.0
    assert {w.itemsize for unit in lora.units for w in unit.weights if not w.trainable} == {2.0}
    assert (unpacked_elements(qlora.units[1]), unpacked_elements(lora.units[1])) == (4096 * 14336, 0)
    cuts = {w.name: w.tp_dim for w in lora.units[1].weights if "lora" in w.name}
    assert (cuts["self_attn.q_proj.lora_A.weight"], cuts["self_attn.q_proj.lora_B.weight"]) == (None, 0)
    assert (cuts["mlp.down_proj.lora_A.weight"], cuts["mlp.down_proj.lora_B.weight"]) == (1, None)
    assert with_adapters(base, "none") is base
    assert with_adapters(base, parse_strategy("fsdp+qlora")) == qlora


def test_what_cannot_be():
    base = profile_of(SHAPE, LENGTH)
    with pytest.raises(PlanError, match=r"'qlra' is none of lora, qlora \(did you mean 'qlora'\?\)\nLoRA rank 0"):
        with_adapters(base, "qlra", 0)
    with pytest.raises(
        PlanError, match=r"target 'gat' is not a linear layer of the blocks \(did you mean 'gate'\?\); there are .*q"
    ):
        with_adapters(base, "lora", targets=["gat"])
    with pytest.raises(PlanError, match="'resnet-50' has no linear layers in repeated blocks"):
        with_adapters(convnet_profile(RESNET_50), "lora")
