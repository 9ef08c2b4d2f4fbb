"""Configurations read without transformers, held against the models that transformers builds from them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from shardwise.errors import ModelError
from shardwise.model.architecture import Architecture, architecture_from_config, parameter_count

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "vocab_size": 101,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
CASES: list[tuple[str, dict[str, object]]] = [
    ("llama", GROUPED),
    ("llama", GROUPED | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", SMALL | {"head_dim": 16}),
    ("mistral", GROUPED),
    ("mistral", SMALL | {"num_attention_heads": 8, "head_dim": 10}),
    ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    ("qwen2", GROUPED),
    ("qwen3", GROUPED),
    ("qwen3", GROUPED | {"head_dim": 12, "attention_bias": True}),
    ("gpt2", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101, "n_positions": 64}),
    ("gpt2", SMALL | {"n_inner": 72, "tie_word_embeddings": False}),
    (
        "gpt_neo",
        {"num_layers": 2, "hidden_size": 48, "num_heads": 6, "vocab_size": 101, "attention_types": [[["global"], 2]]},
    ),
    ("gpt_bigcode", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101}),
    ("gpt_bigcode", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101, "multi_query": False}),
    ("gpt_neox", SMALL),
    ("gpt_neox", SMALL | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}),
    ("gptj", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101, "rotary_dim": 4}),
    ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 101}),
    ("falcon", SMALL),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 90}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", SMALL | {"bias": True, "parallel_attn": False, "multi_query": False, "alibi": True}),
    ("opt", SMALL | {"ffn_dim": 80, "max_position_embeddings": 32}),
    ("opt", SMALL | {"ffn_dim": 80, "do_layer_norm_before": False, "enable_bias": False}),
    ("bloom", {"n_layer": 2, "hidden_size": 48, "n_head": 6, "vocab_size": 101}),
    ("gemma", GROUPED),
    ("gemma2", GROUPED | {"head_dim": 16}),
    ("gemma3_text", GROUPED | {"head_dim": 16}),
    ("phi", SMALL),
    ("phi", GROUPED | {"qk_layernorm": True}),
    ("phi3", GROUPED | {"pad_token_id": 0}),
    ("olmo", GROUPED),
    ("olmo2", GROUPED),
    ("olmo3", GROUPED),
    ("stablelm", GROUPED),
    ("stablelm", GROUPED | {"use_qkv_bias": True, "use_parallel_residual": True}),
    ("starcoder2", GROUPED),
    ("starcoder2", GROUPED | {"use_bias": False, "tie_word_embeddings": False}),
    ("granite", GROUPED | {"mlp_bias": True}),
    ("cohere", GROUPED),
    ("cohere", GROUPED | {"use_qk_norm": True}),
    ("cohere2", GROUPED),
    ("smollm3", GROUPED | {"pad_token_id": 0}),
    ("nemotron", GROUPED),
    ("bert", SMALL | {"max_position_embeddings": 64}),
    ("roberta", SMALL | {"max_position_embeddings": 66, "type_vocab_size": 1}),
    (
        "vit",
        {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 80, "num_labels": 7},
    ),
]
DEFAULTS = sorted({family for family, _ in CASES})


def built(family: str, values: dict[str, object]) -> tuple[dict[str, object], int]:
    """The config.json that transformers would write, and the parameters of the model that it builds from it."""
    import transformers

    config = transformers.CONFIG_MAPPING[family](**values)
    heads = {
        "bert": transformers.BertForMaskedLM,
        "roberta": transformers.RobertaForMaskedLM,
        "vit": transformers.ViTForImageClassification,
    }
    with torch.device("meta"):
        if family in heads:
            model = heads[family](config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return json.loads(config.to_json_string()), sum(p.numel() for p in model.parameters())


def ours(config: dict[str, object]) -> Architecture:
    found = architecture_from_config(config, "it")
    assert found is not None
    return found


@pytest.mark.parametrize(("family", "values"), CASES, ids=[f"{family}-{i}" for i, (family, _) in enumerate(CASES)])
def test_as_many_parameters_as_transformers_has(family, values):
    full, count = built(family, values)
    short = values | {"model_type": family}
    assert parameter_count(ours(full)) == count, "from all keys"
    assert parameter_count(ours(short)) == count, "what is left out has the default of the configuration class"


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_the_configuration_class(family):
    import transformers

    config = json.loads(transformers.CONFIG_MAPPING[family]().to_json_string())
    assert ours({"model_type": family}) == ours(config)


def test_a_known_config_gives_these_facts():
    found = ours(
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        }
    )
    assert (found.family, found.layers, found.heads, found.kv_heads, found.head_dim) == ("qwen2", 24, 14, 2, 64)
    assert found.qkv_bias and not found.output_bias and found.tied and found.sliding_window is None
    assert parameter_count(found) == 494_032_768


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "mamba"},
        {"model_type": "t5"},
        {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512},
        {"model_type": "stablelm", "qk_layernorm": True},
        {"model_type": "vit", "patch_size": 14},
        {"model_type": "gpt2", "add_cross_attention": True},
    ],
)
def test_what_is_not_known_is_none(config):
    assert architecture_from_config(config) is None


def test_all_wrong_sizes_at_once():
    config = {"model_type": "llama", "hidden_size": "wide", "num_hidden_layers": 0, "num_attention_heads": True}
    with pytest.raises(ModelError) as caught:
        architecture_from_config(config, "mine")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "hidden_size" in lines[1] and "'wide'" in lines[1] and all("'mine'" in line for line in lines)
    with pytest.raises(ModelError, match="3 key-value heads do not divide 32 heads"):
        architecture_from_config({"model_type": "llama", "num_key_value_heads": 3})
    with pytest.raises(ModelError, match="7 heads do not divide the hidden size 4096"):
        architecture_from_config({"model_type": "llama", "num_attention_heads": 7})


def test_a_model_of_several_modes_gives_its_text_part():
    found = ours({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 3}})
    assert (found.layers, found.family, found.source) == (3, "gemma3_text", "text part only")
    assert not found.notes
    for family in ("gemma3", "llama4"):
        found = ours({"model_type": family, "text_config": {"num_hidden_layers": 3}, "vision_config": {}})
        assert "language model alone is counted" in found.notes[-1] and "vision_config" in found.notes[-1]


def test_more_layers_add_the_same_each():
    counts = [parameter_count(ours({"model_type": "gemma2", "num_hidden_layers": n})) for n in (1, 2, 3)]
    assert len({b - a for a, b in pairwise(counts)}) == 1
