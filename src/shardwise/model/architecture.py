"""`Architecture`: shape of a transformer, read from its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shardwise.errors import ModelError
from shardwise.model.mixture import (
    MIXTURES,
    LatentAttention,
    Mixture,
    configuration_notes,
    latent_parameters,
    mixture_facts,
    mixture_parameters,
)


class Architecture(BaseModel):
    """A decoder or encoder of equal blocks.

    ``positions`` selects the position encoding: ``learned`` is a table of ``max_seq_len`` rows, ``rope`` rotates
    queries and keys, ``alibi`` and ``none`` have no weights. ``qk_norm`` is a norm of each head or of the whole
    projection. ``block_norms`` counts the norms of one block (2, 4 with norms after the sublayers, 1 where attention
    and MLP run in parallel from one norm). ``position_offset`` counts rows that a learned table has besides its
    positions (two of OPT's, token types of BERT's). ``embedding_norm`` is a norm right after the embedding;
    ``head_transform`` is BERT's: a linear layer and a norm in front of the output projection. An image family (``vit``)
    has ``max_seq_len`` patches and class token together, patches of 16 x 16 pixels of three colours, and classes in
    ``vocab``. ``mixture`` describes the experts of its sparse layers, ``latent`` an attention over latents, and
    ``sinks`` is one weight a head that attention's softmax sees beside the keys. ``notes`` are for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq_len: int | None = None
    gated: bool = True
    norm: Literal["rms", "layer", "layer_no_weight"] = "rms"
    norm_bias: bool = False
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    position_offset: int = 0
    embedding_norm: bool = False
    head_transform: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    block_norms: int = 2
    final_norm: bool = True
    parallel_block: bool = False
    fused_qkv: bool = False  # one matrix for queries, keys and values; names only, not bytes
    tied: bool = False
    causal: bool = True
    sliding_window: int | None = None
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
    sinks: bool = False
    notes: tuple[str, ...] = ()
    source: str = ""


def parameter_count(a: Architecture) -> int:
    """Count the elements of all parameters, tied ones once.

    As in transformers' causal (BERT: masked, ViT: classification) model.
    """
    q, kv, h = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden

    def norm(width: int) -> int:
        return 0 if a.norm == "layer_no_weight" else width * (2 if a.norm_bias else 1)

    def linear(n: int, k: int, bias: bool) -> int:
        return n * k + (n if bias else 0)

    attention = linear(q + 2 * kv, h, a.qkv_bias) + linear(h, q, a.output_bias)
    if a.latent is not None:
        attention = latent_parameters(a.latent, a.heads, h, a.output_bias)
    attention += a.heads if a.sinks else 0
    qk = {"none": 0, "head": 2 * norm(a.head_dim), "projection": norm(q) + norm(kv)}[a.qk_norm]
    mlp = linear(a.ffn, h, a.mlp_bias) * (2 if a.gated else 1) + linear(h, a.ffn, a.mlp_bias)
    blocks = a.layers * (attention + qk + mlp + a.block_norms * norm(h))
    if a.mixture is not None:
        blocks += sum(a.mixture.sparse) * (mixture_parameters(a.mixture, h, a.gated) - mlp)
    table = ((a.max_seq_len or 0) + a.position_offset) * h if a.positions == "learned" else 0
    first = linear(h, 3 * 16 * 16, True) + h if a.family == "vit" else a.vocab * h
    first += table + (norm(h) if a.embedding_norm else 0)
    head = (norm(h) if a.final_norm else 0) + (linear(h, h, True) + norm(h) if a.head_transform else 0)
    return first + blocks + head + (0 if a.tied else a.vocab * h) + (a.vocab if a.head_bias else 0)


# Keys of each fact in a config.json; the first key present counts, also with null.
_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "tied": ("tie_word_embeddings",),
}
_FFN_KEY = {
    "gpt2": "n_inner",
    "gpt_bigcode": "n_inner",
    "gptj": "n_inner",
    "falcon": "ffn_hidden_size",
    "opt": "ffn_dim",
}
_FIXED_FFN = ("mpt", "bloom")  # four times the width, whatever the config states


def _defaults(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int | None,
    vocab: int,
    positions: int | None,
    *,
    tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **own: object,
) -> dict[str, object]:
    """Return the defaults of a family for missing keys."""
    facts: dict[str, object] = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab}
    return facts | {"positions": positions, "tied": tied, "kv_heads": kv_heads, "head_dim": head_dim} | own


# Defaults of transformers' configuration classes (transformers 5.23, src/transformers/models/*/configuration_*.py).
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": _defaults(32, 4096, 32, 11008, 32000, 2048),
    "mistral": _defaults(32, 4096, 32, 14336, 32000, 131072, kv_heads=8, sliding_window=4096),
    "qwen2": _defaults(32, 4096, 32, 22016, 151936, 32768, kv_heads=32, sliding_window=4096),
    "qwen3": _defaults(32, 4096, 32, 22016, 151936, 32768, kv_heads=32, head_dim=128, sliding_window=4096),
    "gpt2": _defaults(12, 768, 12, None, 50257, 1024, tied=True),
    "gpt_neo": _defaults(24, 2048, 16, None, 50257, 2048, tied=True),
    "gpt_bigcode": _defaults(12, 768, 12, None, 50257, 1024, tied=True, multi_query=True),
    "gpt_neox": _defaults(44, 6144, 64, 24576, 50432, 2048, use_parallel_residual=True, attention_bias=True),
    "gptj": _defaults(28, 4096, 16, None, 50400, 2048),
    "mpt": _defaults(24, 2048, 16, None, 50368, 2048, tied=True),
    "falcon": _defaults(32, 4544, 71, None, 65024, 2048, tied=True, multi_query=True, parallel_attn=True),
    "opt": _defaults(12, 768, 12, 3072, 50272, 2048, tied=True, enable_bias=True, do_layer_norm_before=True),
    "bloom": _defaults(2, 64, 8, None, 250880, None, tied=True),
    "gemma": _defaults(28, 3072, 16, 24576, 256000, 8192, tied=True, kv_heads=16, head_dim=256),
    "gemma2": _defaults(26, 2304, 8, 9216, 256000, 8192, tied=True, kv_heads=4, head_dim=256, sliding_window=4096),
    "gemma3_text": _defaults(
        26, 2304, 8, 9216, 262208, 131072, tied=True, kv_heads=4, head_dim=256, sliding_window=4096
    ),
    "phi": _defaults(24, 2048, 32, 8192, 51200, 2048),
    "phi3": _defaults(32, 3072, 32, 8192, 32064, 4096),
    "olmo": _defaults(32, 4096, 32, 11008, 50304, 2048),
    "olmo2": _defaults(32, 4096, 32, 11008, 50304, 2048),
    "olmo3": _defaults(32, 4096, 32, 11008, 50304, 2048, sliding_window=4096),
    "stablelm": _defaults(32, 2560, 32, 6912, 50304, 4096, kv_heads=32),
    "starcoder2": _defaults(30, 3072, 24, 12288, 49152, 4096, tied=True, kv_heads=2, use_bias=True),
    "granite": _defaults(32, 4096, 32, 11008, 32000, 2048),
    "cohere": _defaults(40, 8192, 64, 22528, 256000, 8192, tied=True),
    "cohere2": _defaults(40, 8192, 64, 22528, 256000, 8192, tied=True, sliding_window=4096),
    "smollm3": _defaults(36, 2048, 16, 11008, 128256, 32768, tied=True, kv_heads=4),
    "nemotron": _defaults(32, 6144, 48, 24576, 256000, 4096),
    "mixtral": _defaults(32, 4096, 32, 14336, 32000, 131072, kv_heads=8),
    "qwen2_moe": _defaults(24, 2048, 16, 5632, 151936, 32768, kv_heads=16, qkv_bias=True),
    "qwen3_moe": _defaults(24, 2048, 32, 6144, 151936, 32768, kv_heads=4, sliding_window=4096),
    "deepseek_v2": _defaults(32, 4096, 32, 11008, 102400, 2048, qk_nope_head_dim=128, qk_rope_head_dim=64),
    "deepseek_v3": _defaults(61, 7168, 128, 18432, 129280, 4096, qk_nope_head_dim=128, qk_rope_head_dim=64),
    "glm4_moe": _defaults(46, 4096, 96, 10944, 151552, 131072, kv_heads=8),
    "gpt_oss": _defaults(
        36, 2880, 64, 2880, 201088, 131072, kv_heads=8, head_dim=64, attention_bias=True, sliding_window=128
    ),
    "olmoe": _defaults(16, 2048, 16, 2048, 50304, 4096),
    "llama4_text": _defaults(48, 5120, 40, 8192, 202048, 131072, kv_heads=8, head_dim=128, sliding_window=8192),
    "phimoe": _defaults(32, 4096, 32, 6400, 32064, 131072, kv_heads=8),
    "granitemoe": _defaults(32, 4096, 32, 11008, 32000, 2048),
    "granitemoeshared": _defaults(32, 4096, 32, 11008, 32000, 2048),
    "bert": _defaults(12, 768, 12, 3072, 30522, 512, tied=True, type_vocab_size=2),
    "roberta": _defaults(12, 768, 12, 3072, 50265, 512, tied=True, type_vocab_size=2, pad_token_id=1),
    "vit": _defaults(12, 768, 12, 3072, 2, None, image_size=224, patch_size=16, num_channels=3, qkv_bias=True),
}
_LAYER: dict[str, object] = {"norm": "layer", "norm_bias": True, "gated": False}
_ALL_BIASED: dict[str, object] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_PARALLEL: dict[str, object] = {"parallel_block": True, "block_norms": 1}
_WINDOWED = {
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "starcoder2",
    "olmo3",
    "cohere2",
    "mixtral",
    "gpt_oss",
    "phimoe",
}
_WINDOWED_IF_USED = {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}
Get = Callable[[str], object]
SAME_MODULE = {"kimi_k2": "deepseek_v3"}  # names that a folder gives to another family's module


def _llama(get: Get) -> dict[str, object]:
    biased = bool(get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": bool(get("mlp_bias"))}


def _biased_attention(get: Get) -> dict[str, object]:
    biased = bool(get("attention_bias"))
    return {"qkv_bias": biased, "output_bias": biased}


def _latent_attention(get: Get) -> dict[str, object]:
    """Facts of DeepSeek's attention beside its latents: whether the output has a bias, and no heads that share keys."""
    parts = [get("qk_nope_head_dim"), get("qk_rope_head_dim")]
    key = sum(part for part in parts if isinstance(part, int)) if all(isinstance(part, int) for part in parts) else 192
    return {"output_bias": bool(get("attention_bias")), "head_dim": max(1, key), "kv_heads": None}


def _falcon(get: Get) -> dict[str, object]:
    new, parallel = bool(get("new_decoder_architecture")), bool(get("parallel_attn"))
    norms = get("num_ln_in_parallel_attn")
    one_norm = parallel and (norms if norms is not None else 2 if new else 1) != 2
    facts = _LAYER | {key: bool(get("bias")) for key in _ALL_BIASED}
    facts |= {"parallel_block": parallel, "block_norms": 1 if one_norm else 2, "fused_qkv": True}
    facts |= {"positions": "alibi" if get("alibi") else "rope"}
    if not new:
        facts["kv_heads"] = 1 if get("multi_query") else None
    return facts


def _opt(get: Get) -> dict[str, object]:
    facts = _LAYER | {key: bool(get("enable_bias")) for key in _ALL_BIASED} | {"positions": "learned"}
    if get("layer_norm_elementwise_affine") is False:
        facts["norm"] = "layer_no_weight"
    before = bool(get("do_layer_norm_before")) and not get("_remove_final_layer_norm")
    return facts | {"position_offset": 2, "final_norm": before}


def _stablelm(get: Get) -> dict[str, object]:
    facts: dict[str, object] = {"norm": "layer", "norm_bias": True, "qkv_bias": bool(get("use_qkv_bias"))}
    return facts | (_PARALLEL if get("use_parallel_residual") else {})


def _gpt_neox(get: Get) -> dict[str, object]:
    biased = bool(get("attention_bias"))
    facts = _LAYER | {"qkv_bias": biased, "output_bias": biased, "mlp_bias": True, "fused_qkv": True}
    return facts | {"parallel_block": bool(get("use_parallel_residual"))}


def _bert(get: Get) -> dict[str, object]:
    rows = get("type_vocab_size")
    facts = _LAYER | _ALL_BIASED | {"positions": "learned", "position_offset": rows, "embedding_norm": True}
    return facts | {"head_transform": True, "head_bias": True, "final_norm": False, "causal": bool(get("is_decoder"))}


def _roberta(get: Get) -> dict[str, object]:
    """Defaults of RoBERTa.

    Positions start after the padding index, so a table of 514 rows serves 512 positions.
    """
    rows, padding, types = get("positions"), get("pad_token_id"), get("type_vocab_size")
    kept = padding + 1 if isinstance(padding, int) else 0
    total = rows if isinstance(rows, int) else 0
    offset = kept + (types if isinstance(types, int) else 0)
    return _bert(get) | {"max_seq_len": total - kept, "position_offset": offset}


def _vit(get: Get) -> dict[str, object]:
    side, labels = get("image_size"), get("id2label")
    patches = (side // 16) ** 2 if isinstance(side, int) else 0
    classes = len(labels) if isinstance(labels, Mapping) else get("num_labels") or 2
    facts = _LAYER | _ALL_BIASED | {"qkv_bias": bool(get("qkv_bias")), "positions": "learned", "causal": False}
    return facts | {"max_seq_len": patches + 1, "vocab": classes, "head_bias": True}


_RMS: dict[str, object] = {}
_TRAITS: dict[str, Callable[[Get], dict[str, object]]] = {
    "llama": _llama,
    "granite": _llama,
    "smollm3": _llama,
    "mistral": lambda get: _RMS,
    "qwen2": lambda get: {"qkv_bias": True},
    "qwen3": lambda get: _biased_attention(get) | {"qk_norm": "head"},
    "gpt2": lambda get: _LAYER | _ALL_BIASED | {"positions": "learned", "fused_qkv": True},
    "gpt_neo": lambda get: _LAYER | {"output_bias": True, "mlp_bias": True, "positions": "learned"},
    "gpt_bigcode": lambda get: (
        _LAYER
        | _ALL_BIASED
        | {"positions": "learned", "fused_qkv": True, "kv_heads": 1 if get("multi_query") else None}
    ),
    "gpt_neox": _gpt_neox,
    "gptj": lambda get: _LAYER | _PARALLEL | {"mlp_bias": True, "head_bias": True},
    "mpt": lambda get: _LAYER | {"norm_bias": False, "positions": "alibi", "fused_qkv": True},
    "falcon": _falcon,
    "opt": _opt,
    "bloom": lambda get: _LAYER | _ALL_BIASED | {"positions": "alibi", "fused_qkv": True, "embedding_norm": True},
    "gemma": _biased_attention,
    "gemma2": lambda get: _biased_attention(get) | {"block_norms": 4},
    "gemma3_text": lambda get: _biased_attention(get) | {"block_norms": 4, "qk_norm": "head"},
    "phi": lambda get: (
        _LAYER | _ALL_BIASED | _PARALLEL | {"head_bias": True, "qk_norm": "head" if get("qk_layernorm") else "none"}
    ),
    "phi3": lambda get: {"fused_qkv": True},
    "olmo": lambda get: _biased_attention(get) | {"norm": "layer_no_weight"},
    "olmo2": lambda get: _biased_attention(get) | {"qk_norm": "projection"},
    "olmo3": lambda get: _biased_attention(get) | {"qk_norm": "projection"},
    "stablelm": _stablelm,
    "starcoder2": lambda get: _LAYER | {key: bool(get("use_bias")) for key in _ALL_BIASED},
    "cohere": lambda get: (
        _biased_attention(get)
        | _PARALLEL
        | {"norm": "layer", "qk_norm": "projection" if get("use_qk_norm") else "none"}
    ),
    "cohere2": lambda get: _biased_attention(get) | _PARALLEL | {"norm": "layer"},
    "nemotron": lambda get: _llama(get) | _LAYER,
    "mixtral": lambda get: _RMS,
    "qwen2_moe": lambda get: {"qkv_bias": bool(get("qkv_bias"))},
    "qwen3_moe": lambda get: _biased_attention(get) | {"qk_norm": "head"},
    "deepseek_v2": _latent_attention,
    "deepseek_v3": _latent_attention,
    "glm4_moe": lambda get: {
        "qkv_bias": bool(get("attention_bias")),
        "qk_norm": "head" if get("use_qk_norm") else "none",
    },
    "gpt_oss": lambda get: _biased_attention(get) | {"sinks": True},
    "olmoe": lambda get: _biased_attention(get) | {"qk_norm": "projection"},
    "llama4_text": _biased_attention,
    "phimoe": lambda get: (
        _biased_attention(get) | {"norm": "layer", "norm_bias": True, "head_bias": bool(get("lm_head_bias"))}
    ),
    "granitemoe": _biased_attention,
    "granitemoeshared": _biased_attention,
    "bert": _bert,
    "roberta": _roberta,
    "vit": _vit,
}


def _left_out(config: Mapping[str, object]) -> Iterator[str]:
    parts = [key for key in ("vision_config", "audio_config") if config.get(key) is not None]
    if parts:
        yield (
            f"the language model alone is counted, and parameters, memory and time of {' and '.join(parts)} are not; "
            "where they are kept or trained, add them, or plan a package.module:factory"
        )


def architecture_from_config(config: Mapping[str, object], name: str = "", source: str = "") -> Architecture | None:
    """Read a Hugging Face ``config.json``; ``None`` for unknown families and variants.

    That is, where its ``model_type`` is unknown or asks for a variant that an `Architecture` cannot describe. A missing
    key has the default of transformers' configuration class. Of a multimodal model (Gemma 3, Llama 4) the text part is
    used.

    Raises:
        ModelError: sizes that are not positive integers, or are inconsistent; lists all of them.
    """
    family = str(config.get("model_type", ""))
    family = SAME_MODULE.get(family, family)
    text = config.get("text_config")
    if family in ("gemma3", "llama4") and isinstance(text, Mapping):
        note = f"{source}; text part only" if source else "text part only"
        tied: dict[str, object] = {"tie_word_embeddings": True} if family == "gemma3" else {}
        found = architecture_from_config(tied | dict(text) | {"model_type": f"{family}_text"}, name, note)
        return found and found.model_copy(update={"notes": (*found.notes, *_left_out(config))})
    if family in _TRAITS and not _variant(family, config):
        defaults, traits = _DEFAULTS[family], _TRAITS[family]
    else:
        return None

    def get(key: str) -> object:
        names = _KEYS.get(key, (key,))
        return next((config[own] for own in names if own in config), defaults.get(key))

    facts: dict[str, object] = {key: get(key) for key in _KEYS if key not in ("positions", "tied")}
    if family in _FFN_KEY:
        facts["ffn"] = config.get(_FFN_KEY[family], defaults["ffn"])
    if family in _FIXED_FFN:
        facts["ffn"] = None
    facts |= {"max_seq_len": get("positions"), "tied": bool(get("tied"))}
    windowed = family in _WINDOWED or (family in _WINDOWED_IF_USED and bool(config.get("use_sliding_window")))
    facts |= {"sliding_window": get("sliding_window") if windowed else None} | traits(get)
    facts |= {"name": name or family, "family": family, "source": source, "notes": tuple(configuration_notes(config))}
    if family in MIXTURES:
        facts |= mixture_facts(family, config, facts["layers"], facts["ffn"], name or family)
    return _checked(facts)


def _variant(family: str, config: Mapping[str, object]) -> bool:
    """Return whether options change the parameters in a way without an `Architecture` field."""
    if family == "opt":
        return config.get("word_embed_proj_dim", config.get("hidden_size", 768)) != config.get("hidden_size", 768)
    if family == "deepseek_v2":
        return bool(config.get("mlp_bias"))
    if family == "stablelm":
        return bool(config.get("qk_layernorm"))
    if family == "vit":
        square = isinstance(config.get("image_size", 224), int)
        return not square or config.get("patch_size", 16) != 16 or config.get("num_channels", 3) != 3
    return bool(config.get("add_cross_attention"))


def _checked(facts: dict[str, object]) -> Architecture:
    """Derive the remaining fields, and reject invalid values."""
    name, problems = facts["name"], []
    sizes: dict[str, int] = {}
    for key in ("layers", "hidden", "heads", "vocab", "kv_heads", "head_dim", "ffn", "max_seq_len"):
        value = facts[key]
        if value is None and key in ("kv_heads", "head_dim", "ffn", "max_seq_len"):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            sizes[key] = value
        else:
            keys = " or ".join(_KEYS.get("positions" if key == "max_seq_len" else key, (key,)))
            problems.append(f"model '{name}': {keys} is {value!r}, it must be a positive integer")
    if problems:
        raise ModelError(*problems)
    heads = sizes["heads"]
    sizes.setdefault("kv_heads", heads)
    sizes.setdefault("ffn", 4 * sizes["hidden"])
    rounds = facts["family"] == "glm4_moe" and heads <= sizes["hidden"]  # down; other configurations refuse it
    if "head_dim" not in sizes and sizes["hidden"] % heads and not rounds:
        problems.append(f"model '{name}': {heads} heads do not divide the hidden size {sizes['hidden']}")
    if heads % sizes["kv_heads"]:
        problems.append(f"model '{name}': {sizes['kv_heads']} key-value heads do not divide {heads} heads")
    if problems:
        raise ModelError(*problems)
    sizes.setdefault("head_dim", sizes["hidden"] // heads)
    try:
        return Architecture.model_validate(facts | sizes)
    except ValidationError as error:
        lines = [
            f"{e['loc'][0]} is {e['input']!r:.40}, {e['msg'].replace('Input should', 'it must')}"
            for e in error.errors()
        ]
        raise ModelError(*(f"model '{name}': {line}" for line in lines)) from None
