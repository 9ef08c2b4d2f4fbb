"""Bytes of a sequence's cache held against transformers' own caches, filled by a forward of each family's module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardwise.errors import ModelError
from shardwise.model.catalogue import catalogue_names, find_architecture
from shardwise.model.kv_cache import KvCache, kv_cache_from_config, load_kv_cache, traced_cache

LENGTH, SAMPLES = 40, 2
SMALL: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
WINDOWED = GROUPED | {"sliding_window": 16, "num_hidden_layers": 12}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = SMALL | {
    "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 6,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GROUPED),
    ("llama", SMALL),
    ("mistral", WINDOWED),
    ("mistral", GROUPED | {"sliding_window": None}),
    ("qwen2", WINDOWED),
    ("qwen2", WINDOWED | {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3", GROUPED),
    ("qwen3", WINDOWED | {"use_sliding_window": True, "max_window_layers": 5}),
    ("gpt2", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101, "n_positions": 64}),
    ("gpt_neo", {"num_layers": 2, "hidden_size": 48, "num_heads": 6, "vocab_size": 101,
                 "attention_types": [[["global", "local"], 1]], "window_size": 16}),
    ("gpt_bigcode", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101}),
    ("gpt_neox", SMALL),
    ("gptj", {"n_layer": 2, "n_embd": 48, "n_head": 6, "vocab_size": 101, "rotary_dim": 4}),
    ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 101}),
    ("falcon", SMALL),
    ("opt", SMALL | {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    ("bloom", {"n_layer": 2, "hidden_size": 48, "n_head": 6, "vocab_size": 101}),
    ("gemma", GROUPED),
    ("gemma2", WINDOWED),
    ("gemma3_text", WINDOWED),
    ("gemma3_text", WINDOWED | {"sliding_window_pattern": 3}),
    ("phi", SMALL),
    ("phi3", WINDOWED),
    ("olmo2", GROUPED),
    ("olmo3", WINDOWED),
    ("stablelm", GROUPED),
    ("starcoder2", WINDOWED),
    ("granite", GROUPED),
    ("cohere2", WINDOWED),
    ("smollm3", GROUPED),
    ("smollm3", WINDOWED | {"use_sliding_window": True}),
    ("mixtral", WINDOWED | EXPERTS),
    ("qwen2_moe", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 24}),
    ("qwen2_moe", WINDOWED | EXPERTS | {"shared_expert_intermediate_size": 24, "use_sliding_window": True,
                                        "max_window_layers": 5}),
    ("qwen3_moe", WINDOWED | EXPERTS | {"use_sliding_window": True}),
    ("gpt_oss", WINDOWED | EXPERTS),
    ("llama4_text", GROUPED | EXPERTS | {"attention_chunk_size": 16, "intermediate_size_mlp": 80}),
    ("phimoe", WINDOWED | EXPERTS),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT | {"q_lora_rank": None}),
]  # fmt: skip
HYBRID: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", GROUPED | EXPERTS | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                                        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                                        "shared_expert_intermediate_size": 24}),
    ("lfm2", GROUPED | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    ("jamba", GROUPED | EXPERTS | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                                   "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    ("falcon_h1", GROUPED | {"num_hidden_layers": 2, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8,
                             "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}),
]  # fmt: skip


def facts(family: str, values: Mapping[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(family, **values)


def filled_bytes(family: str, values: Mapping[str, Any]) -> int:
    """Bytes in the cache of transformers' module after a forward over ``LENGTH`` tokens."""
    module = transformers.AutoModelForCausalLM.from_config(facts(family, values), dtype=torch.float32).eval()
    ids = torch.randint(1, 100, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = module(input_ids=ids, use_cache=True).past_key_values
    tensors = []
    for layer in cache.layers:
        parts = [layer.keys, layer.values] if getattr(layer, "keys", None) is not None else []
        for name in ("conv_states", "recurrent_states"):
            found = getattr(layer, name, None) or {}
            parts += found.values() if isinstance(found, dict) else found
        tensors += [part for part in parts if part is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def dear(family: str, values: dict[str, Any]) -> bool:
    """Whether building the module takes a second."""
    return "num_experts_per_tok" in values


@pytest.mark.parametrize(
    ("family", "values"),
    [pytest.param(*case, marks=pytest.mark.turns(3) if dear(*case) else ()) for case in CASES],
    ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)],
)
def test_as_many_bytes_as_transformers_keeps(family: str, values: dict[str, Any]) -> None:
    found = kv_cache_from_config(json.loads(json.dumps(values)) | {"model_type": family}, family)
    assert found is not None
    assert SAMPLES * found.sequence_bytes(LENGTH, itemsize=4) == filled_bytes(family, values)


def test_transformers_keeps_falcons_grouped_heads_once_for_each_query_head() -> None:
    """Its module repeats them before they are kept; serving engines, and this count, keep them once."""
    values = SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}
    found = kv_cache_from_config(values | {"model_type": "falcon"}, "falcon")
    assert found is not None
    assert SAMPLES * found.sequence_bytes(LENGTH, itemsize=4) * 6 // 2 == filled_bytes("falcon", values)


def test_the_page_says_how_many_families_these_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert f"the caches of {len({family for family, _ in CASES})} families" in page


@pytest.mark.parametrize(("family", "values"), HYBRID, ids=[name for name, _ in HYBRID])
def test_a_short_forward_tells_the_rest_of_hybrid_layers(family: str, values: dict[str, Any]) -> None:
    module = transformers.AutoModelForCausalLM.from_config(facts(family, values), dtype=torch.float32)
    found = traced_cache(module, family)
    assert any(layer.state_bytes for layer in found.layers)
    assert SAMPLES * found.sequence_bytes(LENGTH, itemsize=4) == filled_bytes(family, values)


def test_a_folder_of_another_family_is_read_on_the_meta_device(tmp_path: Path) -> None:
    family, values = HYBRID[0]
    facts(family, values).save_pretrained(tmp_path)
    found = load_kv_cache(str(tmp_path))
    assert found.origin == "transformers"
    module = transformers.AutoModelForCausalLM.from_config(facts(family, values), dtype=torch.bfloat16)
    assert found.layers == traced_cache(module, family).layers
    assert found.max_positions == values["max_position_embeddings"]


def test_each_language_model_of_the_catalogue_has_one() -> None:
    for name in catalogue_names():
        known = find_architecture(name)
        if known is not None and known.causal:
            assert load_kv_cache(name).sequence_bytes(1024) > 0, name
        else:
            with pytest.raises(ModelError):
                load_kv_cache(name)


@pytest.mark.parametrize(
    ("model", "kib"),
    [  # of a token, far from any window: 2 · layers · kv heads · head dim · 2 bytes; DeepSeek-V3 has (512 + 64) · 2
        ("llama-3.1-8b", 128),
        ("llama-3.1-70b", 320),
        ("llama-2-7b", 512),
        ("qwen2.5-7b", 56),
        ("deepseek-v3", 61 * 576 * 2 / 1024),
    ],
)
def test_known_bytes_of_a_token(model: str, kib: float) -> None:
    cache = load_kv_cache(model)
    assert cache.sequence_bytes(2001) - cache.sequence_bytes(2000) == kib * 1024


def test_ranks_divide_heads_and_repeat_them_where_there_are_too_few() -> None:
    cache = load_kv_cache("qwen2.5-7b")  # four heads
    one = cache.sequence_bytes(1000)
    assert [cache.sequence_bytes(1000, tp=tp) * 4 // one for tp in (1, 2, 4, 8)] == [4, 2, 1, 1]
    latent = load_kv_cache("deepseek-v3")
    assert latent.sequence_bytes(1000, tp=8) == latent.sequence_bytes(1000)


def test_a_reader_does_not_generate() -> None:
    with pytest.raises(ModelError, match=r"bert-base.*does not generate"):
        load_kv_cache("bert-base")


def test_what_is_not_known_is_none() -> None:
    assert kv_cache_from_config({"model_type": "mamba"}, "mamba") is None
    assert isinstance(kv_cache_from_config({"model_type": "llama"}, "llama"), KvCache)
