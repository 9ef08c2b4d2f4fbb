"""Tiny models of families that transformers knows: their configurations, and how each is built and called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB, WIDTH, INNER, HEADS, LAYERS, LENGTH = 64, 32, 48, 4, 2, 16

_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": WIDTH // HEADS}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
_BERT = {**_PLAIN, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LATENT = {**_PLAIN, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
           "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}  # fmt: skip
_SSM = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8, "conv_kernel": 4,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "qwen2": _GROUPED,
    "qwen3": _WIDE,
    "mistral": _WIDE,
    "mixtral": {**_WIDE, **_EXPERTS},
    "gemma": _WIDE,
    "gemma2": {**_WIDE, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {**_WIDE, "query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    "phi": _GROUPED,
    "phi3": {**_GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
                "intermediate_size": INNER, "max_position_embeddings": 64, "window_size": 8,
                "attention_types": [[["global", "local"], 1]], "embed_dropout": 0.0, "attention_dropout": 0.0,
                "resid_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neox": {**_PLAIN, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "codegen": {**_GPT2, "n_ctx": 64, "rotary_dim": 4},
    "opt": {"vocab_size": VOCAB, "hidden_size": WIDTH, "ffn_dim": INNER, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": WIDTH,
            "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
    "bloom": {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "hidden_dropout": 0.0,
              "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    "falcon": {**_PLAIN, "multi_query": False, "new_decoder_architecture": False, "alibi": False},
    "mpt": {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 64,
            "expansion_ratio": 2},
    "stablelm": _GROUPED,
    "starcoder2": {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "granite": _GROUPED,
    "granitemoe": {**_GROUPED, **_EXPERTS},
    "cohere": _GROUPED,
    "cohere2": {**_GROUPED, "sliding_window": 8},
    "deepseek_v2": {**_LATENT, "num_key_value_heads": HEADS, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": {**_LATENT, "num_key_value_heads": HEADS},
    "glm": _WIDE,
    "glm4": _WIDE,
    "llama4_text": {**_WIDE, **_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": INNER,
                    "interleave_moe_layer_step": 2},
    "qwen2_moe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "qwen3_moe": {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mamba": _SSM,
    "mamba2": {**_SSM, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": _SSM,
    "jamba": {**_GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "use_mamba_kernels": False},
    "recurrent_gemma": {**_PLAIN, "num_key_value_heads": 1, "lru_width": WIDTH, "attention_window_size": 8,
                        "conv1d_width": 4, "block_types": ["recurrent", "attention"]},
    "biogpt": {**_BERT},
    "smollm3": {**_GROUPED, "no_rope_layers": [1, 0]},
    "ernie4_5": _WIDE,
    "nemotron": _GROUPED,
    "persimmon": {**_PLAIN, "qk_layernorm": True},
    "helium": _WIDE,
    "arcee": _GROUPED,
    "exaone4": {**_WIDE, "sliding_window": 8},
    "gpt_oss": {**_WIDE, **_EXPERTS, "sliding_window": 8},
    "bert": _BERT,
    "roberta": _BERT,
    "electra": {**_BERT, "embedding_size": WIDTH},
    "albert": {**_BERT, "embedding_size": 16, "inner_group_num": 1},
    "distilbert": {"vocab_size": VOCAB, "dim": WIDTH, "hidden_dim": INNER, "n_layers": LAYERS, "n_heads": HEADS,
                   "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip
MASKED = ("bert", "roberta", "electra", "albert", "distilbert")


def family(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **keys: Any) -> nn.Module:
    """A model of the family with other ``keys``; its biases and norms are not at the constants that they start as."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **{**FAMILIES.get(name, {}), **keys})
    config._experts_implementation = "eager"  # the default, grouped_mm, knows no float64
    kind = transformers.AutoModelForMaskedLM if name in MASKED else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = kind.from_config(config)
        for parameter in module.parameters():
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.to(dtype).train()
